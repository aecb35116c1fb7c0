"""Settings that every process of a node server inherits through the forks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rpcdataloader.errors import AuthenticationError, RPCError
from rpcdataloader.server.connections import Kind, Origin, describe
from rpcdataloader.server.connections import logger as connection_logger
from rpcdataloader.server.counters import CounterTable
from rpcdataloader.server.output import SharedLimit
from rpcdataloader.wire.certificates import TlsFiles
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.handshake import TlsError

logger = logging.getLogger("rpcdataloader.server")

# Strangers who reach the port can be refused at any rate. All processes together log this many refusals per period (in
# seconds).
MAX_REFUSALS = 20
REFUSALS_PERIOD = 10.0


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The part of the server's settings that sessions and workers need.

    Attributes:
        parallel: Threads per worker for ``rpc_async`` calls.
        timeout: Seconds for an ``rpc_async`` call whose caller set no limit; 0 for no limit.
        max_tasks: Tasks of a loader after which a worker retires; 0 for no limit.
        tls: Files for TLS, read again for every connection; None for no TLS.
        tells_clients: True if warnings go to the client, too; False where the log is the client's terminal.
        refusals: Limit on the lines of :meth:`log_refusal`.
    """

    node: str
    num_workers: int
    parallel: int
    timeout: float
    max_tasks: int
    credentials: Credentials
    max_connections: int | None = None
    tls: TlsFiles | None = None
    tells_clients: bool = True
    refusals: SharedLimit = field(default_factory=lambda: SharedLimit(MAX_REFUSALS, REFUSALS_PERIOD))
    counters: CounterTable = field(default_factory=CounterTable)

    def log_refusal(
        self, peer: str, reason: RPCError | str, kind: Kind | None = None, origin: Origin | None = None
    ) -> None:
        """Count a refused connection and log it, within limits; a wrong secret is logged as a warning."""
        self.counters.refused()
        num_left_out = self.refusals.take()
        if num_left_out is None:
            return
        if num_left_out:
            logger.info("left %d more refusals out of this log", num_left_out)
        level, text = logging.INFO, str(reason)
        if isinstance(reason, AuthenticationError):
            level = logging.WARNING
            if not isinstance(reason, TlsError):
                text += (
                    f" (this server's secret: {self.credentials.source}, fingerprint {self.credentials.fingerprint})"
                )
        connection_logger.log(level, "%s", describe("refused", kind, peer, origin, reason=text))
