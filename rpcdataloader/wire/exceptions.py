"""Exceptions of tasks: they reach the trainer with their own type and the traceback of the worker.

A worker pickles an exception, and tries the pickle. Parts that cannot be pickled, such as a file, are left out. The
trainer gets a ``RemoteError`` only if its class cannot be sent, or not be found there.

A worker says with :func:`name_sample` what it was loading. The trainer adds it as a note, with the worker and its node.
Python 3.10 has no notes: there, it stands below the traceback of the worker.
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from rpcdataloader.errors import RemoteError, RemoteTraceback
from rpcdataloader.host.environment import hint_at
from rpcdataloader.host.signals import USER_ERRORS, is_interrupt
from rpcdataloader.wire.picklers import ReplyPickler, Unpickler, parts_of, reduce_parts

#: A longer text is cut in the middle: a message with a whole array in it is of no use.
_MAX_TEXT_CHARACTERS = 1 << 16

# Attribute of an exception: the sample being loaded when it was raised.
_SAMPLE = "_rpcdataloader_sample"

# Attribute of an exception: the state of the stream after it.
_STATE = "_rpcdataloader_state"

_HAS_NOTES = hasattr(BaseException, "add_note")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

_Result = TypeVar("_Result")
_Error = TypeVar("_Error", bound=BaseException)


def name_sample(exc: BaseException, sample: str) -> None:
    """Say what was being loaded when an exception was raised; for :func:`dumps_exception`."""
    _guard(lambda: object.__setattr__(exc, _SAMPLE, sample), None)


def add_state(exc: BaseException, state: object) -> None:
    """Add the state of the stream that has raised an exception; for :func:`take_state`, also in the trainer."""
    _guard(lambda: object.__setattr__(exc, _STATE, state), None)


def take_state(exc: BaseException) -> Any:
    """Take the state of its stream from an exception; None without one."""
    return _guard(lambda: vars(exc).pop(_STATE, None), None)


def add_note(exc: BaseException, note: str) -> None:
    """Add a note, also to an exception that refuses changes; no effect in Python 3.10."""
    if _HAS_NOTES:
        _guard(lambda: object.__setattr__(exc, "__notes__", [*getattr(exc, "__notes__", ()), note]), None)


def copy_to_raise(exc: _Error) -> _Error:
    """Copy an exception that is kept, perhaps for other callers: a raised one keeps the variables of every caller.

    Returns:
        The copy; the exception itself if its class does not make the same one again.
    """
    again = _guard(lambda: copy.copy(exc), exc)
    if type(again) is not type(exc) or _texts(again) != _texts(exc):
        return exc
    again.__cause__ = exc.__cause__
    return again


def summarize(exc: BaseException) -> str:
    """Type and message of an exception, as in the last line of its traceback. Never fails, like the next function."""
    return _guard(lambda: _shorten("".join(traceback.format_exception_only(exc)).strip()), type(exc).__name__)


def dumps_exception(exc: BaseException, where: str) -> bytes:
    """Encode an exception. Never fails, even if the exception's own methods do.

    Args:
        exc: Exception to encode; its traceback, causes and notes travel as text.
        where: Name of the process that raised it, such as ``worker 3 (pid 123) on node07:6543``.
    """
    summary = summarize(exc)
    text = _guard(lambda: _shorten(_format(exc)), summary)
    sample = _guard(lambda: vars(exc).pop(_SAMPLE, None), None)
    state = take_state(exc)
    state = None if state is None else _guard(lambda: _dumps(state), None)
    pickled = _guard(lambda: _pickle(exc), None)
    notes = [note for note in (sample and f"{sample}, {where}", _guard(lambda: hint_at(exc), None)) if note]
    return pickle.dumps((where, summary, text, pickled, notes, state), protocol=5)


def loads_exception(payload: bytes | bytearray | memoryview, peer: str = "") -> Exception:
    """Decode an exception. Never fails; runs code that the sender chose.

    Args:
        peer: Address of its node server as the user knows it, for a note and for the cause.

    Returns:
        The exception, not raised, with a :class:`~rpcdataloader.errors.RemoteTraceback` as its cause. A
        :class:`~rpcdataloader.errors.RemoteError` if it is not an ``Exception``, or cannot be rebuilt here.
    """
    try:
        where, summary, text, pickled, notes, state = pickle.loads(payload)
    except USER_ERRORS as error:
        return RemoteError(f"a task raised an exception whose message cannot be read ({type(error).__name__}: {error})")
    if peer:
        named = f"{where} ({peer})"
        notes = [f"{note[: -len(where)]}{named}" if note.endswith(where) else note for note in notes]
        if not any(note.endswith(named) for note in notes):
            notes.insert(0, f"raised by {named}")
        where = named
    cause = RemoteTraceback("\n".join([f"{where}:\n\n{text}", *([] if _HAS_NOTES else notes)]))
    exc: Exception = RemoteError(f"{where} raised {summary}")
    found = None if pickled is None else _rebuilt(pickled)
    if isinstance(found, Exception):  # SystemExit or KeyboardInterrupt of a worker must not end the trainer
        exc = found
    # Also of a class that refuses changes.
    object.__setattr__(exc, "__cause__", cause)
    for note in notes:
        add_note(exc, note)
    if state is not None:
        add_state(exc, _rebuilt(state))
    return exc


def _guard(attempt: Callable[[], _Result], otherwise: _Result) -> _Result:
    try:
        return attempt()
    except BaseException:  # a __str__ or __reduce__ may raise anything
        return otherwise


def _format(exc: BaseException) -> str:
    """The traceback as text, with causes and contexts, from the first frame outside of this package on."""
    found = traceback.TracebackException(type(exc), exc, exc.__traceback__, compact=True)
    waiting: list[Any] = [found]
    while waiting:
        part = waiting.pop()
        if part is not None:
            frames = itertools.dropwhile(lambda frame: frame.filename.startswith(_PACKAGE), part.stack)
            # The package's own exceptions have no other frames.
            part.stack[:] = list(frames) or part.stack[:]
            waiting += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
    return "".join(found.format())


def _shorten(text: str) -> str:
    if len(text) <= _MAX_TEXT_CHARACTERS:
        return text
    half = _MAX_TEXT_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _pickle(exc: BaseException) -> bytes | None:
    """A pickle that gives the same type and texts again; None if its class cannot be sent."""
    (sent,) = _sendable(exc) or (None,)
    return None if sent is None else _guard(lambda: _dumps(sent), None)


def _sendable(value: Any, depth: int = 4) -> list[Any]:
    """The value in a list, or what of an exception can be sent in its place; an empty list for what cannot be sent.

    Args:
        depth: Most exceptions inside of each other, as they may lead back to one.
    """
    if _guard(lambda: _texts(_unpickle(_dumps(value))) == _texts(value), False):
        return [value]
    if isinstance(value, BaseException) and depth:
        kind, args, attributes = parts_of(value)
        # In words if need be: a text that is made of the arguments has that part, too.
        sent = tuple((_sendable(arg, depth - 1) or [_in_words(arg)])[0] for arg in args)
        found = {name: _sendable(part, depth - 1) for name, part in attributes.items()}
        return [_Parts(kind, sent, {name: part[0] for name, part in found.items() if part})]
    if type(value) in (list, tuple) and any(isinstance(each, BaseException) for each in value):
        return [[part for each in value for part in _sendable(each, depth)]]  # of an ExceptionGroup
    return []


def _in_words(value: Any) -> str:
    return _guard(lambda: repr(value), type(value).__name__)


class _Parts:
    """Stands for an exception on the wire."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_parts(*self._parts)


def _texts(value: Any) -> Any:
    """What must be the same after pickling: types and texts of exceptions."""
    if isinstance(value, BaseException):
        # A constructor that makes a text of its argument makes another one of that text.
        return type(value), _texts(value.args)
    if type(value) in (list, tuple):
        return [_texts(each) for each in value]
    return value if isinstance(value, str) else None


def _dumps(value: object) -> bytes:
    file = io.BytesIO()
    ReplyPickler(file, None).dump(value)
    return file.getvalue()


def _unpickle(data: bytes) -> Any:
    return Unpickler(io.BytesIO(data)).load()


def _rebuilt(data: bytes) -> Any:
    """The object of a pickle; None if its class is missing here, or fails."""
    try:
        return _unpickle(data)
    except BaseException as error:
        if is_interrupt(error):
            raise
        return None
