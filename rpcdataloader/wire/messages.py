"""The payloads of messages, on both sides: one class per message type that carries fields.

WELCOME, BUSY, EXITED, STACK and GOAWAY are JSON or empty; CALL, BUILD and REPLY are pickles, read behind a valid seal.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.wire.plain import Json


@dataclass(frozen=True, slots=True)
class Welcome(Json):
    """The server is ready for requests.

    Attributes:
        session: Hexadecimal session id, for the worker connections that follow.
        worker: Number of this worker in its session; 0 for the session itself.
        takes_reports: True if the session knows REPORT. An older one would wait for what comes after it.
    """

    node: str
    pid: int
    session: str
    num_workers: int
    worker: int = 0
    takes_reports: bool = False


@dataclass(frozen=True, slots=True)
class Busy(Json):
    """The server has no room for another worker now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited(Json):
    """A worker of this session ended: its number, process id, and how it ended, in words.

    ``batch`` is the last one begun for a loader, -1 for none; ``sample`` is a number of ``fetch/whereabouts.py``.
    """

    worker: int
    pid: int
    reason: str
    batch: int = -1
    sample: int = 0


@dataclass(frozen=True, slots=True)
class StackRequest(Json):
    """Ask for a worker's stack; with a reason, also end that worker."""

    worker: int
    end_because: str | None = None


@dataclass(frozen=True, slots=True)
class Goaway(Json):
    """The worker ends; requests above ``last_request`` were not begun and will not be answered.

    Attributes:
        last_request: Number of the last request to be answered.
        retired: True if it has done its share of work, and can be replaced; otherwise the node server ends.
    """

    last_request: int
    retired: bool = False


@dataclass(frozen=True, slots=True)
class Log(Json):
    """A worker's or session's warning, or log record of warning level or above; or a line that it has printed.

    Attributes:
        printed_by: Origin of a line, ``worker 3`` or ``session``; empty for a note on lines left out; None for a log.
    """

    level: int
    logger: str
    text: str
    printed_by: str | None = None


@dataclass(frozen=True, slots=True)
class Build:
    """Make a dataset, in the session if ``shared``, else in each worker that needs it.

    Attributes:
        key: Number chosen by the client; the same on all its nodes.
        generators: States of the client's random generators, which a constructor may draw from.
        pickled: Pickle of ``(instance,)`` or ``(callable, args, kwargs)``; its blocks are the message's.
    """

    key: int
    name: str
    shared: bool
    generators: tuple[Any, ...]
    pickled: bytes

    def encode(self) -> bytes:
        """The payload."""
        return pickle.dumps((self.key, self.name, self.shared, self.generators, self.pickled), protocol=5)

    @classmethod
    def decode(cls, payload: bytes | bytearray | memoryview) -> Build:
        """Read a payload whose seal was checked."""
        return cls(*pickle.loads(payload))


@dataclass(frozen=True, slots=True)
class Call:
    """Run ``func(*args, **kwargs)``.

    Attributes:
        keep: Hold the result on the worker and reply with its handle.
        ordered: Run after all earlier requests, in the main thread: the loader's share global random generators.
        limited: True if the caller set no limit, so that the server's own applies.
        task: True for a loader's batch: a worker may retire after a number of them.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep: bool = False
    ordered: bool = False
    limited: bool = False
    task: bool = False

    def fields(self) -> tuple[Any, ...]:
        """The values to pickle, in the order of the arguments: a plain tuple is smaller and faster than the object."""
        return (self.func, self.args, self.kwargs, self.keep, self.ordered, self.limited, self.task)


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
