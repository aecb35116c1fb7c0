"""Servers that come and go while this process runs: a thread looks once a second.

It polls, because the kernel's notifications for directories do not cross an NFS server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from rpcdataloader.client.register import Lookup
from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.lines import printable
from rpcdataloader.wire.registration import Registration
from rpcdataloader.wire.transport import Deadline

logger = logging.getLogger("rpcdataloader.client")

# A thread that waits for a hanging file server cannot be woken; it does not use torch.
JOIN_TIMEOUT = 2.0

#: A watch's callback: addresses that have come, in the order of the lookup, and addresses that have gone.
Changed = Callable[[tuple[Address, ...], tuple[Address, ...]], None]


class RegisterWatcher:
    """One lookup, shared by all watches in this process. Thread-safe.

    Its thread runs while there are watches.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._watches: list[Watch] = []
        self._thread: threading.Thread | None = None
        self._is_new = False  # whether a watch has begun, which is told at once
        self._closed = False

    def find(self, timeout: float) -> Sequence[Registration]:
        """The current servers, or the first ones that come.

        Raises:
            ConnectError: No server came in time.
        """
        lookup, deadline = self._lookup, Deadline(timeout)
        found = lookup.look()
        if not found:
            logger.warning("waiting for a node server to be %s, for at most %g s", lookup.place, timeout)
        while not found:
            if not deadline.pause(min(lookup.pause, timeout / 10)):
                # Other users may have chosen the names, if they can write to the directory.
                problems = printable("; ".join(": ".join(item) for item in lookup.problems.items()))
                raise ConnectError(
                    f"no node server is {lookup.place}, and none came within {timeout:g} s"
                    + (f" ({problems})" if problems else "")
                    + f"; {lookup.advice}"
                )
            found = lookup.look()
        return found

    def watch(self, known: Iterable[Address], changed: Changed) -> Watch:
        """Report changes until the watch is closed.

        Args:
            known: Addresses that the caller knows. The first report gives the differences between these and the
                current ones, so that no change between :meth:`find` and this is missed.
            changed: Callback, which must not block; called in the thread of this object, one call at a time. An
                address that has gone and come, because its server was started again, is in both arguments.
        """
        watch = Watch(self, known, changed)
        with self._condition:
            if not self._closed:
                self._watches.append(watch)
                self._is_new = True
                self._condition.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="rpcdl-register", daemon=True)
                    self._thread.start()
        return watch

    def _end(self, watch: Watch) -> None:
        with self._condition:
            if watch in self._watches:
                self._watches.remove(watch)
                self._condition.notify_all()

    def close(self) -> None:
        """End all watches, and the thread."""
        with self._condition:
            self._closed = True
            self._watches.clear()
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_TIMEOUT)

    def forget_in_child(self) -> None:
        """After a fork, in the child: there is no thread, but watches can still be closed."""
        self._condition = threading.Condition()
        self._watches.clear()
        self._closed = True

    def _run(self) -> None:
        while watches := self._next():
            try:
                found = self._lookup.look()
            except Exception:
                logger.exception("cannot look for node servers")
            else:
                for watch in watches:
                    watch._tell(found)
                del found
            del watches
            with self._condition:
                self._condition.wait_for(lambda: self._is_new or not self._watches, self._lookup.pause)

    def _next(self) -> list[Watch]:
        """The watches to tell; without any, the thread ends."""
        with self._condition:
            self._is_new = False
            if not self._watches:
                self._thread = None
            return list(self._watches)


class Watch:
    """A request for reports of servers that come and go; see :meth:`RegisterWatcher.watch`."""

    def __init__(self, watcher: RegisterWatcher, known: Iterable[Address], changed: Changed) -> None:
        self._watcher = watcher
        self._changed = changed
        # For the watcher's thread alone. The server at an address is unknown before the first look.
        self._known: dict[Address, Registration | None] = dict.fromkeys(known)
        self._closed = False

    def close(self) -> None:
        """End the reports; idempotent, from any thread, and from ``changed`` itself.

        Never waits: a report under way goes on.
        """
        self._closed = True
        self._watcher._end(self)

    @property
    def known(self) -> list[Address]:
        """The servers reported so far; after :meth:`close`, the starting point of another watch."""
        return list(self._known)

    def _tell(self, found: Sequence[Registration]) -> None:
        if self._closed:
            return
        known, self._known = self._known, {server.address: server for server in found}
        added = tuple(
            address
            for address, server in self._known.items()
            if address not in known or known[address] not in (None, server)
        )
        removed = tuple(address for address in known if address not in self._known or address in added)
        if not (added or removed):
            return
        try:
            self._changed(added, removed)
        except Exception:
            logger.exception("handling node servers that came or went failed")
