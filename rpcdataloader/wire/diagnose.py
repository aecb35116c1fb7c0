"""Finds the part of an object that cannot be pickled, and the attribute path to it."""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

#: Exceptions of user code while its objects are pickled or rebuilt. KeyboardInterrupt comes from the user instead.
USER_ERRORS = (Exception, SystemExit, GeneratorExit)

#: No deeper than users nest objects on purpose.
_MAX_DEPTH = 30

Attempt = Callable[[Any], "BaseException | None"]


def find_culprit(obj: Any, path: str, error: BaseException, attempt: Attempt) -> tuple[str, Any, BaseException]:
    """Find the innermost part that cannot be pickled.

    Args:
        path: The caller's name for the object.
        attempt: Function that pickles its argument and returns the error, or None.

    Returns:
        The path of the part, the part, and the error. The part is ``obj`` itself if all of its parts can be pickled.
    """
    return _search(obj, path, error, attempt, set(), _MAX_DEPTH) or (path, obj, error)


def _search(
    obj: Any, path: str, error: BaseException, attempt: Attempt, visited: set[int], depth: int
) -> tuple[str, Any, BaseException] | None:
    visited.add(id(obj))
    is_innermost = True
    for part_path, part in _parts(obj, path) if depth else ():
        part_error = attempt(part)
        if part_error is None:
            continue
        # In a cycle, a part fails because it leads back to another part: then it is not the culprit.
        is_innermost = False
        if id(part) not in visited:
            found = _search(part, part_path, part_error, attempt, visited, depth - 1)
            if found:
                return found
    return (path, obj, error) if is_innermost else None


def _parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts that are pickled with an object, and their paths."""
    if isinstance(obj, dict):
        yield from ((f"{path}[{key!r}]", value) for key, value in obj.items())
        yield from ((f"a key of {path}", key) for key in obj)
    elif isinstance(obj, (list, tuple)):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(obj))
    elif isinstance(obj, (set, frozenset)):
        yield from ((f"an element of {path}", item) for item in obj)
    elif isinstance(obj, types.FunctionType):
        yield from _function_parts(obj, path)
    elif isinstance(obj, type):
        yield from ((f"{path}.{name}", value) for name, value in vars(obj).items() if not name.startswith("__"))
        yield from ((f"{path}.{name}", value) for name, value in vars(obj).items() if inspect.isfunction(value))
    elif isinstance(obj, functools.partial):
        yield f"{path}.func", obj.func
        yield from _parts(obj.args, f"{path}.args")
        yield from _parts(obj.keywords, f"{path}.keywords")
    elif isinstance(obj, types.MethodType):
        yield from ((f"{path}.__self__", obj.__self__), (f"{path}.__func__", obj.__func__))
    else:
        yield from _reduction_parts(obj, path)


def _function_parts(function: types.FunctionType, path: str) -> Iterator[tuple[str, Any]]:
    try:
        used = inspect.getclosurevars(function)
    except ValueError:  # a variable of the closure has no value yet
        return
    yield from ((f"{path}.<closure>.{name}", value) for name, value in used.nonlocals.items())
    yield from ((f"{path}.<globals>.{name}", value) for name, value in used.globals.items())
    yield from ((f"{path}.__defaults__[{i}]", value) for i, value in enumerate(function.__defaults__ or ()))
    yield from ((f"{path}.{name}", value) for name, value in vars(function).items())


def _reduction_parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    reduce: Any = copyreg.dispatch_table.get(type(obj))
    try:
        reduction: Any = reduce(obj) if reduce else obj.__reduce_ex__(5)
    except USER_ERRORS:  # this is why it cannot be pickled
        return
    if not isinstance(reduction, tuple):
        return
    parts: list[Any] = [*reduction, None, None, None, None]
    _, args, state, items, pairs, *_ = parts
    # Instances with slots have two states: those of their dictionary and of their slots.
    states = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for part in states:
        if isinstance(part, dict):
            yield from ((f"{path}.{name}", value) for name, value in part.items())
        elif part is not None:
            yield f"{path}.__getstate__()", part
    for i, arg in enumerate(args or ()):
        yield f"{path}.__class__" if arg is type(obj) else f"{path}.__reduce__()[1][{i}]", arg
    yield from ((f"{path}[{i}]", item) for i, item in enumerate(items or ()))
    yield from ((f"{path}[{key!r}]", value) for key, value in pairs or ())
