"""Servers that register while this process runs: a thread that looks into a directory once a second.

A look and no notification of the kernel's, because these do not cross an NFS server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from rpcdataloader.client.register import Register
from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.deadline import Deadline
from rpcdataloader.wire.printable import printable
from rpcdataloader.wire.registration import Registration

logger = logging.getLogger("rpcdataloader.client")

# Seconds between two looks.
PAUSE = 1.0

# A thread that waits for a file server that hangs cannot be woken; it touches nothing of torch's.
JOIN_TIMEOUT = 2.0

#: What a watch calls: addresses that have come, in the order of the register, and addresses that have gone.
Changed = Callable[[tuple[Address, ...], tuple[Address, ...]], None]


class RegisterWatcher:
    """One directory, for everybody in this process who wants to know of it. Thread-safe.

    Its thread runs while there are watches.
    """

    def __init__(self, directory: str) -> None:
        self._register = Register(directory)
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._watches: list[Watch] = []
        self._thread: threading.Thread | None = None
        self._is_new = False  # a watch, which is told at once
        self._closed = False

    def find(self, timeout: float) -> tuple[Registration, ...]:
        """The servers that are there now, or the first ones that come.

        Args:
            timeout: Seconds to wait for them.

        Raises:
            ConnectError: None came.
        """
        directory, deadline = self._register.directory, Deadline(timeout)
        found = self._register.look()
        if not found:
            logger.warning("waiting for a node server to register in %s, for at most %g s", directory, timeout)
        while not found:
            if not deadline.pause(min(PAUSE, timeout / 10)):
                # Others may have named the files, where they may write to the directory.
                problems = printable("; ".join(": ".join(item) for item in self._register.problems.items()))
                raise ConnectError(
                    f"no node server is registered in {directory}, and none came within {timeout:g} s"
                    + (f" ({problems})" if problems else "")
                    + f"; start some with: python -m rpcdataloader.launch --register {directory}"
                )
            found = self._register.look()
        return found

    def watch(self, known: Iterable[Address], changed: Changed) -> Watch:
        """Have changes reported until the watch is closed.

        Args:
            known: The addresses that the caller knows of. The first report says how the register differs from these,
                if it does; so nothing is missed between :meth:`find` and this.
            changed: Called in the thread of this object, never for two changes at once. Must not block. An address
                that has gone and come, because its server was started again, is in both of its arguments.
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
        """After a fork, in the child: there is no thread, and watches may still be closed."""
        self._condition = threading.Condition()
        self._watches.clear()
        self._closed = True

    def _run(self) -> None:
        while watches := self._next():
            try:
                found = self._register.look()
            except Exception:
                logger.exception("cannot look into the register of node servers")
            else:
                for watch in watches:
                    watch._tell(found)
                del found
            del watches
            with self._condition:
                self._condition.wait_for(lambda: self._is_new or not self._watches, PAUSE)

    def _next(self) -> list[Watch]:
        """Whom to tell; nobody ends the thread."""
        with self._condition:
            self._is_new = False
            if not self._watches:
                self._thread = None
            return list(self._watches)


class Watch:
    """Somebody's interest in the changes of a register; see :meth:`RegisterWatcher.watch`."""

    def __init__(self, watcher: RegisterWatcher, known: Iterable[Address], changed: Changed) -> None:
        self._watcher = watcher
        self._changed = changed
        # Of the watcher's thread alone. Which server is at an address is not known before the first look.
        self._known: dict[Address, Registration | None] = dict.fromkeys(known)
        self._closed = False

    def close(self) -> None:
        """Have nothing reported any more; idempotent, from any thread, and from ``changed`` itself.

        Never waits: a report that has begun goes on.
        """
        self._closed = True
        self._watcher._end(self)

    def _tell(self, found: tuple[Registration, ...]) -> None:
        known, self._known = self._known, {registration.address: registration for registration in found}
        added = tuple(
            address
            for address, registration in self._known.items()
            if address not in known or known[address] not in (None, registration)
        )
        removed = tuple(address for address in known if address not in self._known or address in added)
        if self._closed or not (added or removed):
            return
        try:
            self._changed(added, removed)
        except Exception:
            logger.exception("a change of the register of node servers could not be handled")
