"""JSON objects as dataclasses, and the errors of malformed ones. Pure.

All JSON from peers, files and other processes of a node is read here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from typing import Any, TypeVar

from rpcdataloader.errors import RemoteProtocolError

_Made = TypeVar("_Made")


def load(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: The data is no JSON object; the message begins with "is".
    """
    try:
        fields = json.loads(bytes(data).decode())
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError:
        raise ValueError("is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("is not a JSON object")
    return fields


def make(kind: type[_Made], fields: dict[str, Any]) -> _Made:
    """Make a dataclass of plain values; ignores unknown fields.

    Args:
        kind: Dataclass whose fields are numbers, strings, booleans, None, and dataclasses or lists of these.

    Raises:
        ValueError: A field is missing, or of another type.
    """
    values = {}
    for name, (hint, is_needed) in _hints(typing.cast(Any, kind)).items():
        if name in fields:
            values[name] = _convert(hint, fields[name], name)
        elif is_needed:
            raise ValueError(f"{name} is missing")
    return kind(**values)


@functools.cache
def _hints(kind: Any) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        found[field.name] = hints[field.name], not has_default
    return found


def _convert(hint: Any, value: Any, name: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None and types.NoneType in hint.__args__:
            return None
        (hint,) = [other for other in hint.__args__ if other is not types.NoneType]
    if typing.get_origin(hint) is list and isinstance(value, list):
        return [_convert(hint.__args__[0], item, name) for item in value]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return make(hint, value)
    if hint is float and type(value) is int:
        return value
    if type(value) is not hint:
        raise ValueError(f"{name} is of another type")
    return value


class Json:
    """A dataclass whose JSON object is the payload of a message."""

    __slots__ = ()

    def encode(self) -> bytes:
        """The payload."""
        return json.dumps(dataclasses.asdict(typing.cast(Any, self))).encode()

    @classmethod
    def decode(cls: type[_Made], payload: bytes | bytearray | memoryview) -> _Made:
        """Read a payload; ignores unknown fields.

        Raises:
            RemoteProtocolError: The payload is not a JSON object with these fields.
        """
        try:
            return make(cls, load(payload))
        except ValueError as exc:
            raise RemoteProtocolError(f"malformed {cls.__name__} message: {exc}") from exc
