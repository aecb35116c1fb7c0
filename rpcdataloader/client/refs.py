"""Stand-ins in a client for objects that live elsewhere.

Neither class can be pickled on its own: the pickler of a call replaces them inside its arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from rpcdataloader.errors import LocalProtocolError


class Owner(Protocol):
    """The worker that an object lives in, as its references see it."""

    name: str

    @property
    def is_usable(self) -> bool:
        """Whether it still takes requests."""


class RRef:
    """Handle of an object that lives in a worker.

    Anywhere inside the arguments of a call to the same worker it becomes the object itself. The worker releases the
    object when its last RRef is collected. Copies made by :mod:`copy` are the same RRef.

    Attributes:
        handle: Number of the object on its worker.
        owner: The object's worker.
    """

    __slots__ = ("__weakref__", "handle", "owner")

    def __init__(self, owner: Owner, handle: int, release: Callable[[int], None]) -> None:
        self.owner = owner
        self.handle = handle
        # A finalizer may run in any thread, inside any lock, so release only enqueues. At exit, the connection's end
        # releases everything.
        weakref.finalize(self, release, handle).atexit = False

    def __repr__(self) -> str:
        return f"RRef({self.handle} in {self.owner.name})"

    def __copy__(self) -> RRef:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RRef:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise LocalProtocolError(f"{self!r} has a meaning only in this process and in calls to its own worker")


class DatasetRef:
    """Stands for a dataset in a request to a session or worker that has it.

    Attributes:
        key: The dataset's key, the same on every node.
    """

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise LocalProtocolError("a dataset reference has a meaning only in calls to a node that has the dataset")
