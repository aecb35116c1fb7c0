"""Signal handlers of the script, put off while something is done that must not be left in the middle.

Ctrl-C is one of them. Python runs handlers in the main thread, wherever that is, whichever thread has got the signal;
so to block signals in one thread would put off nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

#: What user code raises as its errors.
USER_ERRORS = (Exception, SystemExit, GeneratorExit)


def is_interrupt(error: BaseException) -> bool:
    """Whether a signal handler has raised it, or may have: in the main thread, and not of a kind that user code raises.

    Handlers act anywhere, so no error of what was done at that moment may be made of theirs.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    return not isinstance(error, USER_ERRORS) or _is_of_handler(error)


@contextlib.contextmanager
def suppress_errors() -> Iterator[None]:
    """End the block at an error of user code, as if that had not been there; what a signal handler raises comes out."""
    try:
        yield
    except Exception as error:
        if is_interrupt(error):
            raise


def _is_of_handler(error: BaseException) -> bool:
    begin = error.__traceback__
    # Most errors are those of the code that asks. To look for all handlers takes 0.2 ms.
    if begin is None or begin.tb_next is None:
        return False
    handlers = map(signal.getsignal, range(1, signal.NSIG))
    codes = {_code_of(handler) for handler in handlers if callable(handler)} - {None}
    return any(frame.f_code in codes for frame, _line in traceback.walk_tb(begin))


def _code_of(handler: Any) -> Any:
    """The code of a function, a method, a partial, or an object that can be called; None for others."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    own = handler if hasattr(handler, "__code__") else type(handler).__call__
    return getattr(own, "__code__", None)


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
