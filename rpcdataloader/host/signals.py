"""Signal handlers of the script, put off while something is done that must not be left in the middle.

Ctrl-C is one of them. Python runs handlers in the main thread, wherever that is, whichever thread has got the signal;
so to block signals in one thread would put off nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _Held:
    """Stands for a handler of the script meanwhile."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self._pid = os.getpid()
        self.has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        # A signal may come while the handlers are set back, of which the first may raise; and a fork keeps this one.
        if _holding.depth and os.getpid() == self._pid:
            self.has_come = True
            return None
        return self.handler(number, frame)


class _Holding(threading.local):
    depth = 0  # blocks that the main thread is in, without those in which handlers act again


_holding = _Holding()


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let handlers of signals that come in the block act at its end; not for long waits."""
    if _holding.depth or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: dict[int, _Held] = {}
    try:
        for number in map(int, signal.valid_signals()):
            handler = signal.getsignal(number)
            if callable(handler):
                held[number] = _Held(handler)
                signal.signal(number, held[number])
        _holding.depth = 1
        yield
    finally:
        _holding.depth = 0
        with contextlib.ExitStack() as stack:  # the last ones first, and the others even if one raises
            for number in [number for number, each in held.items() if each.has_come]:
                # Not by another signal, of which the loop of asyncio would hear too.
                stack.callback(held[number].handler, number, inspect.currentframe())
            for number, each in held.items():
                stack.callback(signal.signal, number, each.handler)


@contextlib.contextmanager
def signals_let_through() -> Iterator[None]:
    """Let handlers act at once within a block in which they are held: for a wait in its middle."""
    depth, _holding.depth = _holding.depth, 0
    try:
        yield
    finally:
        _holding.depth = depth
