"""The log of connections: one line for each that is accepted, refused or closed, for ``grep`` and ``awk``.

Lines of level INFO say which client has come, and what was refused; those of level DEBUG are of all other connections.

A line is ``key=value`` pairs in a fixed order, with ``-`` for what is not known. No value holds a blank, an equals
sign or a quotation mark, whatever a stranger calls himself, except the reason, which comes last, in quotation marks,
and may hold blanks. So nobody can write a pair, or a line, that is not his.
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

# Names of hosts have at most 253 characters.
MAX_VALUE_CHARS = 255
MAX_REASON_CHARS = 600


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose connection it is, as he has said and proved.

    Attributes:
        client: Host and process id, ``"gpu01:2304"``.
        rank: In a distributed job; None outside of one.
        job: Of Slurm; empty outside of one.
    """

    client: str
    rank: int | None
    job: str

    @classmethod
    def of(cls, identity: Identity) -> Origin:
        """That of a peer that has proved that it knows the secret."""
        return cls(f"{identity.host}:{identity.pid}", identity.rank, identity.job)


class AcceptedConnection:
    """A connection that was accepted, from then on; writes the line when it is made.

    Args:
        traffic: Bytes received and sent, in shared memory, so that they are known of a process that was killed, too.
    """

    def __init__(self, peer: str, origin: Origin, traffic: memoryview, worker: int = 0) -> None:
        self._peer = peer
        self.origin = origin
        self._traffic = traffic
        self._worker = worker
        self._start = time.monotonic()
        self._log("accepted")

    def closed(self, reason: str) -> None:
        """Write the line of its end."""
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
    """One line, without time and line feed."""
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
    """Such as ``\\x3d``."""
    number = ord(char)
    return f"\\x{number:02x}" if number < 256 else f"\\u{{{number:x}}}"
