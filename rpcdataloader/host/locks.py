"""What threads lock and wait on, where a signal handler of the script may raise: Ctrl-C leaves nothing locked.

Handlers run where Python code calls something. From Python 3.14 on, that includes the entry of a ``with`` block: a lock
that is written in C is taken then, and its block has not begun. They do not run where code reads an attribute. The
locks here are taken by that, and released by a function that is written in C.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from rpcdataloader.host.forks import Part, at_fork

if TYPE_CHECKING:
    from threading import _RLock as RLock
else:
    RLock = type(threading.RLock())


class Lock(RLock):  # type: ignore[misc]  # which is final in typeshed alone
    """A reentrant lock that Ctrl-C never leaves locked; for ``with`` blocks."""

    if sys.version_info >= (3, 14):
        taken = property(operator.methodcaller("acquire"))

        def __enter__(self) -> Any:  # type: ignore[override]  # there, typeshed has `acquire` itself
            return self.taken


class Condition(threading.Condition):
    """A condition that Ctrl-C never leaves locked."""

    def __init__(self) -> None:
        self.lock = Lock()
        super().__init__(self.lock)

    # As of the lock: each call of a function of Python begins with a place for signal handlers.
    __exit__ = property(operator.attrgetter("lock.__exit__"))
    if sys.version_info >= (3, 14):
        taken = property(operator.attrgetter("lock.taken"))

        def __enter__(self) -> Any:
            return self.taken

    else:
        __enter__ = property(operator.attrgetter("lock.__enter__"))

    def wake_all(self) -> None:
        """Wake all that wait; for a thread that has not locked this."""
        with self:
            self.notify_all()

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


# Of objects that the children of forks may use.
_inherited: weakref.WeakSet[Lock | Condition] = weakref.WeakSet()

_Inherited = TypeVar("_Inherited", Lock, Condition)


def inherited(lock: _Inherited) -> _Inherited:
    """Let each child of a fork find a lock free that another thread of its parent has; returns the lock."""
    _inherited.add(lock)
    return lock


def _free_in_child() -> None:
    for lock in [lock for lock in _inherited if not lock._is_owned()]:  # type: ignore[union-attr]  # of all locks
        lock._at_fork_reinit()  # type: ignore[union-attr]


at_fork(Part.LOCKS, in_child=_free_in_child)
