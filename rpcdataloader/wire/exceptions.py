"""Exceptions of tasks: they reach the trainer with their own type and the traceback of the worker.

``BaseException`` pickles as a call of its class with its ``args``. That fails for every class whose constructor takes
other arguments, or runs the constructor a second time on its own message. Here an exception is rebuilt without its
constructor, unless its class defines how to pickle it.

A worker says with :func:`name_sample` what it was loading. The trainer adds it as a note, with the worker and its node.
Python 3.10 has no notes: there, it stands below the traceback of the worker.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import os
import pickle
import traceback
import types
from collections.abc import Callable
from typing import Any, TypeVar

from rpcdataloader.errors import RemoteError, RemoteTraceback
from rpcdataloader.host.environment import hint_at
from rpcdataloader.wire.picklers import USER_ERRORS, ReplyPickler, Unpickler

#: A longer text is cut in the middle: a message with a whole array in it is of no use.
_MAX_TEXT_CHARACTERS = 1 << 16

# Attribute of an exception: the sample being loaded when it was raised.
_SAMPLE = "_rpcdataloader_sample"

_HAS_NOTES = hasattr(BaseException, "add_note")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

_Result = TypeVar("_Result")

# Python 3.10 has no groups; isinstance(exc, ()) is false.
_GROUP: Any = getattr(builtins, "ExceptionGroup", ())


def name_sample(exc: BaseException, sample: str) -> None:
    """Say what was being loaded when an exception was raised; for :func:`dumps_exception`."""
    _guard(lambda: _restore(exc, {_SAMPLE: sample}), None)


def add_note(exc: BaseException, note: str) -> None:
    """Add a note, also to an exception that refuses changes; no effect in Python 3.10."""
    if _HAS_NOTES:
        _guard(lambda: _restore(exc, {"__notes__": [*getattr(exc, "__notes__", ()), note]}), None)


def dumps_exception(exc: BaseException, where: str) -> bytes:
    """Encode an exception. Never fails, even if the exception's own methods do.

    Args:
        exc: Exception to encode; its traceback, causes and notes travel as text.
        where: Name of the process that raised it, such as ``worker 3 (pid 123) on node07:6543``.
    """
    name = type(exc).__name__
    summary = _guard(lambda: _shorten("".join(traceback.format_exception_only(type(exc), exc)).strip()), name)
    text = _guard(lambda: _shorten(_format(exc)), summary)
    sample = _guard(lambda: vars(exc).pop(_SAMPLE, None), None)
    recipe = _guard(lambda: _pickle(_reduce(exc)), None)
    notes = [note for note in (sample and f"{sample}, {where}", _guard(lambda: hint_at(exc), None)) if note]
    return pickle.dumps((where, summary, text, recipe, notes), protocol=5)


def loads_exception(payload: bytes | bytearray | memoryview) -> Exception:
    """Decode an exception. Never fails; runs code that the sender chose.

    Returns:
        The exception, not raised, with a :class:`~rpcdataloader.errors.RemoteTraceback` as its cause. A
        :class:`~rpcdataloader.errors.RemoteError` if it is not an ``Exception``, or cannot be rebuilt here.
    """
    try:
        where, summary, text, recipe, notes = pickle.loads(payload)
    except USER_ERRORS as error:
        return RemoteError(f"a task raised an exception whose message cannot be read ({type(error).__name__}: {error})")
    cause = RemoteTraceback("\n".join([f"{where}:\n\n{text}", *([] if _HAS_NOTES else notes)]))
    exc: Exception = RemoteError(f"{where} raised {summary}")
    if recipe is not None:
        with contextlib.suppress(*USER_ERRORS):  # its class is missing here, or cannot be rebuilt
            exc = _rebuild(_unpickle(recipe))
    _restore(exc, {"__cause__": cause})
    for note in notes:
        add_note(exc, note)
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


def _pickle(obj: Any) -> bytes:
    file = io.BytesIO()
    ReplyPickler(file, None).dump(obj)
    return file.getvalue()


def _unpickle(data: bytes) -> Any:
    return Unpickler(io.BytesIO(data)).load()


def _survives(obj: Any) -> bool:
    """Whether an object can be pickled and rebuilt."""
    try:
        return type(_unpickle(_pickle(obj))) is type(obj)
    except USER_ERRORS:
        return False


def _reduce(exc: BaseException) -> tuple[Any, ...]:
    """Return a recipe for :func:`_rebuild`."""
    kind, base = type(exc), _builtin_base(type(exc))
    if isinstance(exc, _GROUP):
        members = [_reduce(member) for member in exc.exceptions]
        return "group", kind, exc.message, members, _state(exc)
    reduces_itself = kind.__reduce__ is not base.__reduce__ or kind.__reduce_ex__ is not base.__reduce_ex__
    if reduces_itself and _survives(exc):
        return "whole", exc
    reduction: Any = base.__reduce__(exc)
    args = tuple(arg if _survives(arg) else repr(arg) for arg in reduction[1])
    return "parts", kind, args, _state(exc)


def _state(exc: BaseException) -> dict[str, Any]:
    """Values outside of ``args`` that survive: the dictionary, slots, and fields of builtin classes."""
    state: dict[str, Any] = {}
    for cls in type(exc).__mro__:
        if cls in (BaseException, _GROUP):
            break
        if cls in (AttributeError, NameError):
            # Python derives suggestions from their fields, and from the local variables of the frame that raises: this
            # package's. And the object without the attribute may be the whole dataset.
            continue
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(exc, name):
                value = getattr(exc, name)
                # In builtin classes, None means a missing value.
                if value is not None or cls.__module__ != "builtins":
                    state[name] = value
    return {name: value for name, value in (state | vars(exc)).items() if _survives(value)}


def _rebuild(recipe: tuple[Any, ...]) -> Exception:
    exc: Any
    if recipe[0] == "whole":
        _, exc = recipe
    elif recipe[0] == "group":
        _, kind, message, members, state = recipe
        exc = _GROUP.__new__(kind, message, [_rebuild(member) for member in members])
        _restore(exc, state)
    else:
        _, kind, args, state = recipe
        # The constructors of builtin classes fill their fields from the arguments.
        base = _builtin_base(kind)
        exc = base.__new__(kind, *args)
        base.__init__(exc, *args)
        _restore(exc, state)
    if not isinstance(exc, Exception):  # SystemExit or KeyboardInterrupt of a worker must not end the trainer
        raise TypeError(f"{type(exc).__name__} is not an exception for tasks")
    return exc


def _restore(exc: BaseException, state: dict[str, Any]) -> None:
    """Set attributes, also of a class that refuses changes."""
    for name, value in state.items():
        object.__setattr__(exc, name, value)


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")
