"""Persistent workers between two passes, or of a pass that was left in the middle.

Where a node has no room for another loader of this client, their places go to that loader.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rpcdataloader.client.worker import RemoteWorker

logger = logging.getLogger("rpcdataloader.client")


class Idler(Protocol):
    """A loader's persistent workers.

    Attributes:
        is_given_up: True if they end, or have ended, for others; guarded by the lock of :class:`IdleWorkers`.
    """

    is_given_up: bool

    @property
    def workers(self) -> list[RemoteWorker]:
        """The workers that are not lost."""

    def close(self) -> None:
        """End the workers."""


class Leavable(Protocol):
    """A loader with persistent workers."""

    def _left(self) -> Idler | None:
        """The workers, if the user has left the last pass in the middle."""


class IdleWorkers:
    """The loaders of this client whose persistent workers are idle, by the time since when. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._loaders: weakref.WeakSet[Leavable] = weakref.WeakSet()
        self._idlers: dict[weakref.ref[Idler], None] = {}  # oldest first

    def watch(self, loader: Leavable) -> None:
        """A pass with persistent workers has begun, which may be left in the middle."""
        with self._lock:
            self._loaders.add(loader)

    def put(self, idler: Idler) -> None:
        """The workers have nothing to do from now on."""
        with self._lock:
            self._idlers = {other: None for other in self._idlers if other() not in (None, idler)}
            self._idlers[weakref.ref(idler)] = None

    def take(self, idler: Idler) -> bool:
        """The workers are used again; returns False if they were given up."""
        with self._lock:
            self._idlers.pop(weakref.ref(idler), None)
            return not idler.is_given_up

    def make_room(self, asking: RemoteWorker, num_exited: int) -> bool:
        """Give up a place on the node of ``asking``, which was busy, unless one is about to be free anyway.

        All workers of a loader go together, the oldest first, and then those of passes that the user has left.

        Args:
            num_exited: Attribute of the session, from before its node was asked.

        Returns:
            False if no place will be free: no worker leaves, and no other loader is idle.
        """
        session = asking.session
        with self._lock:
            if session.num_exited != num_exited or session.is_a_worker_leaving:
                return True
            if (found := self._pop(asking)) is None:
                return False
            found.is_given_up = True
            leaving = [worker for worker in found.workers if worker.session is session]
            for worker in leaving:
                worker.draining = True  # before the next one asks here
        logger.info(
            "%s is busy: %d idle persistent workers are given up for another loader", session.name, len(leaving)
        )
        found.close()
        return True

    def _pop(self, asking: RemoteWorker) -> Idler | None:
        found = [reference() for reference in self._idlers] + [loader._left() for loader in list(self._loaders)]
        for idler in found:
            # The one that asks is to join those that are idle by now.
            if idler is None or idler.is_given_up or asking in (workers := idler.workers):
                continue
            if any(worker.session is asking.session for worker in workers):
                self._idlers.pop(weakref.ref(idler), None)
                return idler
        return None


def describe_holders(workers: Sequence[RemoteWorker]) -> str:
    """Say which workers of a session this process holds; empty without any."""
    held = [(worker.holder, worker.group) for worker in workers if worker.number]
    num_groups = Counter(holder for holder, _group in set(held))
    counts = Counter(holder for holder, _group in held).most_common()
    several = {holder: f" ({number} such loaders)" for holder, number in num_groups.items() if number > 1}
    return ", ".join(f"{count} for {holder}{several.get(holder, '')}" for holder, count in counts)
