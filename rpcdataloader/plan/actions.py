"""What the engine wants done. The driver carries these out without its lock, in the order in which they came. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

N = TypeVar("N", bound=Hashable)


class Load(NamedTuple):
    """Send a task to a worker: what was added under its number; ``is_last`` asks for the request of the last try.

    The samples at the places ``left_out`` are not to be loaded, each for a reason.
    """

    worker: int
    number: int
    payload: Any
    is_last: bool
    left_out: Mapping[int, str] | None = None


class Cancel(NamedTuple):
    """A worker need not load a task any more. It answers all the same."""

    worker: int
    number: int


@dataclass(frozen=True, slots=True)
class Open(Generic[N]):
    """Ask a node for a worker. ``is_promised``: there will be room for it, so a busy node is waited for."""

    worker: int
    place: int
    node: N
    is_promised: bool


class Close(NamedTuple):
    """End a worker that has nothing to do here any more."""

    worker: int


class End(NamedTuple):
    """End a worker that is over its time with a task, and keep its stack for the error."""

    worker: int
    number: int


class Restart(NamedTuple):
    """Tell a worker that another epoch begins, before anything else is sent to it."""

    worker: int


@dataclass(frozen=True, slots=True)
class Seek(Generic[N]):
    """Try to reach a node after ``delay`` seconds, and say what came of it."""

    node: N
    delay: float


class ReportWait(NamedTuple):
    """Tell the user that the consumer has waited for this task for ``seconds``; ``worker`` is None if none has it."""

    worker: int | None
    payload: Any
    seconds: float


class Say(NamedTuple):
    """Tell the user."""

    text: str
    is_warning: bool = True


Action = Load | Cancel | Open[Any] | Close | End | Restart | Seek[Any] | ReportWait | Say
