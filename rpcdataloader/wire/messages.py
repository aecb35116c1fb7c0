"""The payloads of messages, on both sides, and how the JSON and the text of other processes are read. Pure.

One class per message type that carries fields. WELCOME, BUSY, EXITED, STACK and GOAWAY are JSON or empty; CALL, BUILD
and REPLY are pickles, read behind a valid seal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rpcdataloader.errors import RemoteProtocolError

_Made = TypeVar("_Made")


def read_json(data: bytes | bytearray | memoryview) -> dict[str, Any]:
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


def from_json(kind: type[_Made], fields: dict[str, Any]) -> _Made:
    """Make a dataclass of plain values; ignores unknown fields.

    Args:
        kind: Dataclass whose fields are numbers, strings, booleans, None, and dataclasses, lists or dicts of these.

    Raises:
        ValueError: A field is missing, or of another type.
    """
    values, hints = {}, _hints(kind)
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if field.name not in fields:
            raise ValueError(f"{field.name} is missing")
        values[field.name] = _convert(hints[field.name], fields[field.name], field.name)
    return kind(**values)


_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def _convert(hint: Any, value: Any, name: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None and types.NoneType in hint.__args__:
            return None
        (hint,) = [other for other in hint.__args__ if other is not types.NoneType]
    if typing.get_origin(hint) is list and isinstance(value, list):
        return [_convert(hint.__args__[0], item, name) for item in value]
    if typing.get_origin(hint) is dict and isinstance(value, dict):
        return {key: _convert(hint.__args__[1], item, key) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return from_json(hint, value)
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
            return from_json(cls, read_json(payload))
        except ValueError as exc:
            raise RemoteProtocolError(f"malformed {cls.__name__} message: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Welcome(Json):
    """The server is ready for requests."""

    node: str
    pid: int  # of a session, its number in tickets
    num_workers: int
    worker: int = 0  # its number in the session; 0 for the session itself


@dataclass(frozen=True, slots=True)
class Busy(Json):
    """The server has no room for another worker now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited(Json):
    """A worker of this session ended."""

    worker: int  # its number
    pid: int
    reason: str  # how it ended, in words
    batch: int = -1  # the last one begun for a loader, -1 for none
    sample: int = 0  # a number of ``fetch/samples.py``

    @property
    def by_itself(self) -> bool:
        """Whether it has called an end, so that another one would, too; with status 0, it has lost its connection."""
        return self.reason.startswith("exited with status ") and not self.reason.endswith(" 0")


@dataclass(frozen=True, slots=True)
class StackRequest(Json):
    """Ask for a worker's stack; with a reason, also end that worker."""

    worker: int
    end_because: str | None = None


@dataclass(frozen=True, slots=True)
class Goaway(Json):
    """The worker ends; requests above ``last_request`` were not begun and will not be answered."""

    last_request: int
    retired: bool = False  # it has done its share of work, and can be replaced; otherwise the node server ends


@dataclass(frozen=True, slots=True)
class Log(Json):
    """A worker's or session's warning, or log record of warning level or above; or a line that it has printed."""

    level: int
    logger: str
    text: str
    printed_by: str | None = None  # ``worker 3`` or ``session``; empty for a note on lines left out; None for a log


class Call(NamedTuple):
    """Run ``func(*args, **kwargs)``. Pickled as a plain tuple, which is smaller and faster."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep: bool = False  # hold the result on the worker and reply with its handle


#: What stands in a request for an object of its receiver: ``"handle"`` or ``"dataset"``, its number, and the path of a
#: part of it, if that is meant.
Reference = tuple[str, int, "Path"]

#: The steps from an object to a part of it: ``(True, name)`` of an attribute, ``(False, key)`` of an item.
Path = tuple[tuple[bool, Any], ...]


def pack_handles(handles: Iterable[int]) -> bytes:
    """The payload of a RELEASE message: handles (or dataset keys) as little-endian 64-bit numbers."""
    handles = list(handles)
    return struct.pack(f"<{len(handles)}Q", *handles)


def unpack_handles(payload: bytes | bytearray | memoryview) -> list[int]:
    """The handles of a RELEASE message.

    Raises:
        RemoteProtocolError: The payload is not a list of 64-bit numbers.
    """
    if len(payload) % 8:
        raise RemoteProtocolError(f"a RELEASE message of {len(payload)} bytes")
    return list(struct.unpack(f"<{len(payload) // 8}Q", payload))


def pack_blocks(blocks: Iterable[tuple[int, int]]) -> bytes:
    """The payload of a RETURN message: mapping and offset of each shared block."""
    return pack_handles(number for block in blocks for number in block)


def unpack_blocks(payload: bytes | bytearray | memoryview) -> list[tuple[int, int]]:
    """The blocks of a RETURN message.

    Raises:
        RemoteProtocolError: The payload is not a list of pairs of 64-bit numbers.
    """
    numbers = unpack_handles(payload)
    if len(numbers) % 2:
        raise RemoteProtocolError(f"a RETURN message of {len(payload)} bytes")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


# Without the two that every reply carries.
_STAGES = struct.Struct("<7f")
STAGES_BYTES = _STAGES.size

# A peer may send infinity. Three years is longer than any batch.
_LONGEST = 1e8


class Stages(NamedTuple):
    """Seconds that a batch took at its worker. Durations, so that the clocks of two machines need not agree.

    Every reply carries the times of fetch and collate in its pickle. The others are measured where the request asks for
    it, and follow the pickle.
    """

    fetch: float = 0.0  # in the dataset
    collate: float = 0.0  # in the collate function
    idle: float = 0.0  # without any request before; 0 if this one was there when the previous one was answered
    encode: float = 0.0  # to pickle the batch
    cpu: float = 0.0  # CPU time of all threads of the worker, and of its ended children, in fetch, collate and encode
    runqueue: float = 0.0  # that the main thread waited for a CPU in these (second number of /proc/self/schedstat)
    fetch_cpu: float = 0.0  # part of ``cpu`` in fetch
    # CPUs of the machine that the worker may use, and how many of these were busy, with any program, in the last
    # moments; 0 where the kernel does not tell.
    cpus: float = 0.0
    busy_cpus: float = 0.0

    @property
    def task(self) -> float:
        """Time that the worker spent on the batch."""
        return self.fetch + self.collate + self.encode

    def pack(self) -> bytes:
        """The bytes on the wire."""
        return _STAGES.pack(*self[2:])

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Stages:
        """Read :meth:`pack`; negative durations and NaN count as 0.

        Raises:
            RemoteProtocolError: The length is wrong.
        """
        if len(data) != STAGES_BYTES:
            raise RemoteProtocolError(f"stages of {len(data)} bytes instead of {STAGES_BYTES}")
        return cls(0.0, 0.0, *map(_checked, _STAGES.unpack(data)))

    def with_timings(self, timings: tuple[float, float]) -> Stages:
        """With the times of fetch and collate, which are checked in the same way."""
        fetch, collate = map(_checked, timings)
        return self._replace(fetch=fetch, collate=collate)


def _checked(seconds: float) -> float:
    return seconds if 0 <= seconds < _LONGEST else 0.0


# Longer lines of output are cut.
MAX_CHARS = 1000


def printable(text: str, keep: str = "") -> str:
    """``text`` with characters that could affect a terminal, or begin a line, written as in ``\\x1b``.

    Args:
        keep: Characters to leave as they are.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)
