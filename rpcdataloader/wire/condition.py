"""What threads wait on, in connections, loaders and pools."""

from __future__ import annotations

import operator
import threading


class Condition(threading.Condition):
    """A condition that Ctrl-C never leaves locked.

    A signal handler may raise at every call of a Python function, as those of ``threading.Condition`` are: before its
    lock is released, for example. The ``with`` block here is that of the lock itself, which is written in C.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)

    __enter__ = property(operator.attrgetter("lock.__enter__"))
    __exit__ = property(operator.attrgetter("lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as ``threading.Condition`` does; for a thread that has locked this once."""
        try:
            return super().wait(timeout)
        except BaseException:
            # Ctrl-C has come between the release of the lock and the wait.
            if not self._is_owned():  # type: ignore[attr-defined]
                self.lock.acquire()
            raise


class Event(threading.Event):
    """An event whose lock is never left locked by Ctrl-C in :meth:`set`."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()
