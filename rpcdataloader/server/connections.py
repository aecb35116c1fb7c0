"""The log of connections: one line for each accepted, refused or closed connection, for ``grep`` and ``awk``.

Level INFO has the arrival of each client and all refusals; level DEBUG has the rest.

A line has ``key=value`` pairs in a fixed order, with ``-`` for an unknown value. Values contain no blanks, equals signs
or quotation marks, whatever a peer calls itself. Only the reason, last and in quotation marks, may contain blanks. So a
peer cannot forge a pair or a line.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

from rpcdataloader.wire.handshake import Identity

logger = logging.getLogger("rpcdataloader.connections")

Event = Literal["accepted", "refused", "closed"]
Kind = Literal["control", "worker", "status"]

# Host names have at most 253 characters.
MAX_VALUE_CHARS = 255
MAX_REASON_CHARS = 600


@dataclass(frozen=True, slots=True)
class Origin:
    """The owner of a connection, as it has said and proved.

    Attributes:
        client: Host and process id, ``"gpu01:2304"``.
        rank: Rank in a distributed job; None outside of one.
        job: Slurm job; empty outside of one.
    """

    client: str
    rank: int | None
    job: str

    @classmethod
    def of(cls, identity: Identity) -> Origin:
        """The origin of an authenticated peer."""
        return cls(f"{identity.host}:{identity.pid}", identity.rank, identity.job)


class AcceptedConnection:
    """An accepted connection; logs its beginning when created, and its end.

    Args:
        traffic: Bytes received and sent, in shared memory: they outlive a killed process.
    """

    def __init__(self, peer: str, origin: Origin, traffic: memoryview, worker: int = 0) -> None:
        self._peer = peer
        self.origin = origin
        self._traffic = traffic
        self._worker = worker
        self._start = time.monotonic()
        self._log("accepted")

    def closed(self, reason: str) -> None:
        """Log the end."""
        received, sent = self._traffic
        seconds = f"{time.monotonic() - self._start:.3f}"
        self._log("closed", seconds=seconds, received=received, sent=sent, reason=reason)

    def _log(self, event: Event, **fields: Any) -> None:
        kind: Kind = "worker" if self._worker else "control"
        # One line per client: a rank of a large job opens hundreds of connections.
        level = logging.INFO if kind == "control" and event == "accepted" else logging.DEBUG
        logger.log(level, "%s", describe(event, kind, self._peer, self.origin, worker=self._worker or None, **fields))


def describe(
    event: Event,
    kind: Kind | None,
    peer: str,
    origin: Origin | None = None,
    *,
    worker: int | None = None,
    seconds: str | None = None,
    received: int | None = None,
    sent: int | None = None,
    reason: str = "",
) -> str:
    """Return the line, without time and line feed."""
    values = {
        "event": event,
        "kind": kind,
        "peer": peer,
        "client": origin and origin.client,
        "rank": origin and origin.rank,
        "job": origin and origin.job,
        "worker": worker,
        "seconds": seconds,
        "received": received,
        "sent": sent,
    }
    pairs = [f"{key}={_escape(value, MAX_VALUE_CHARS).replace(' ', _code(' '))}" for key, value in values.items()]
    return " ".join([*pairs, f'reason="{_escape(reason, MAX_REASON_CHARS)}"'])


def _escape(value: object, max_chars: int) -> str:
    if value is None or value == "":
        return "-"
    text = str(value)
    escaped = "".join(char if " " <= char <= "~" and char not in '"=\\' else _code(char) for char in text[:max_chars])
    return escaped if len(text) <= max_chars else f"{escaped}..."


def _code(char: str) -> str:
    """Escape a character, as in ``\\x3d``."""
    number = ord(char)
    return f"\\x{number:02x}" if number < 256 else f"\\u{{{number:x}}}"
