"""The datasets of one client on one node: how each is made, and made once where that can be shared.

A session builds; its workers inherit what it built by the fork. A dataset that cannot be inherited (it started
threads, or holds files open whose offset all workers would share) is kept as a recipe, and each worker makes its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.host.generators import set_states
from rpcdataloader.server.processes import memory_of_its_own, num_threads, open_files
from rpcdataloader.wire.pickling import loads
from rpcdataloader.wire.slabs import Block

# Seconds until a thread that was joined, such as those of a pool, is gone: some instructions, on a busy machine.
THREAD_END_TIMEOUT = 0.5

# A collection that finds what was frozen visits, and so copies, all that comes from the node server: 90 ms, and 100 MB.
WORTH_COLLECTING_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """A pickled ``(instance,)`` or ``(callable, args, kwargs)``, with the blocks and random states that it needs."""

    name: str
    generators: tuple[Any, ...]
    pickled: bytes
    blocks: Sequence[Block]

    def build(self) -> Any:
        """Make the dataset.

        Raises:
            SerializationError: A module or name that the pickle needs is missing here.
            Exception: Whatever the callable raises.
        """
        # A change that the constructor makes stays, as when the client had called it.
        set_states(self.generators)
        made = loads(self.pickled, self.blocks, adopt_main=True)
        if len(made) == 1:
            return made[0]
        factory, args, kwargs = made
        return factory(*args, **kwargs)


class DatasetTable:
    """Datasets by key; keys are chosen by the client and are the same on all of its nodes."""

    def __init__(self) -> None:
        self._recipes: dict[int, Recipe] = {}
        self._built: dict[int, Any] = {}
        # The least that this process had since the last collection of everything.
        self._kept_bytes = memory_of_its_own()

    def add(self, key: int, recipe: Recipe, *, shared: bool) -> tuple[Any, str | None]:
        """Take in a dataset.

        Args:
            shared: Build it here, for the workers that are forked afterwards; False leaves it to them.

        Returns:
            The dataset, or None where workers build their own; and the reason when they do so although ``shared``
            was asked for.
        """
        self._recipes[key] = recipe
        if not shared:
            return None, None
        threads, files = num_threads(), open_files()
        dataset = recipe.build()
        reason = why_not_shared(threads, files)
        if reason is not None:
            return None, reason
        self._built[key] = dataset
        # What lives now is not visited by the collector of any fork, so its pages stay shared.
        gc.collect()
        gc.freeze()
        return dataset, None

    def get(self, key: int) -> Any:
        """The dataset, made now if this process has not done so yet.

        Raises:
            LocalProtocolError: No such dataset is known here.
        """
        if key not in self._built:
            if key not in self._recipes:
                raise LocalProtocolError(f"dataset {key} is not known to this process")
            self._built[key] = self._recipes[key].build()
        return self._built[key]

    def release(self, keys: Sequence[int]) -> None:
        """Forget datasets; their memory goes with the last worker that inherited them."""
        for key in keys:
            self._recipes.pop(key, None)
            self._built.pop(key, None)
        # What is not in a cycle is gone by now.
        left_bytes = memory_of_its_own()
        if left_bytes < self._kept_bytes + WORTH_COLLECTING_BYTES:
            self._kept_bytes = min(self._kept_bytes, left_bytes)
            return
        gc.unfreeze()
        gc.collect()
        # Those that are left are to stay shared with workers that are forked later.
        gc.freeze()
        self._kept_bytes = memory_of_its_own()


def length_of(dataset: object) -> int | None:
    """``len(dataset)``, or None for a dataset without one: whoever asks for it then gets the error."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except Exception:
        return None


def kind_of(dataset: object) -> str:
    """How batches are loaded from it: ``"map"`` by index, ``"iterable"``, or ``""`` for not at all."""
    # Every Dataset of torch has __getitem__; that of an iterable one only raises.
    if isinstance(dataset, IterableDataset):
        return "iterable"
    return "map" if hasattr(dataset, "__getitem__") else ""


def why_not_shared(threads: int, files: set[tuple[int, int]]) -> str | None:
    """Why a dataset cannot be inherited that was built since ``num_threads`` and ``open_files`` said this; or None."""
    end = time.monotonic() + THREAD_END_TIMEOUT
    while num_threads() > threads:
        if time.monotonic() > end:
            return "its constructor started threads, which a fork does not copy"
        time.sleep(0.001)
    if open_files() - files:
        return "it holds files open, whose position forked workers would share"
    return None
