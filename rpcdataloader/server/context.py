"""State that every process of a node server inherits through the forks."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass, field

from rpcdataloader.errors import AuthenticationError, RPCError
from rpcdataloader.server.counters import CounterTable
from rpcdataloader.server.logs import Kind, Origin, SharedLimit, describe
from rpcdataloader.server.logs import logger as connection_logger
from rpcdataloader.server.settings import ServerSettings
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.handshake import TlsError
from rpcdataloader.wire.tls import TlsFiles

logger = logging.getLogger("rpcdataloader.server")

# Strangers who reach the port can be refused at any rate. All processes together log this many refusals per period (in
# seconds).
MAX_REFUSALS = 20
REFUSALS_PERIOD = 10.0


@dataclass(frozen=True, slots=True)
class ServerContext:
    """State that every process of a node server inherits through the forks.

    Attributes:
        embedded: True for the pool of one trainer: workers are not capped, and warnings only go to the log, which is
            the trainer's terminal.
        tls: Files for TLS, with absolute paths: sessions change the working directory, and workers the environment.
        refusals: Limit on the lines of :meth:`log_refusal`.
    """

    settings: ServerSettings
    credentials: Credentials
    num_workers: int
    embedded: bool = False
    tls: TlsFiles | None = None
    node: str = field(default_factory=socket.gethostname)
    refusals: SharedLimit = field(default_factory=lambda: SharedLimit(MAX_REFUSALS, REFUSALS_PERIOD))
    counters: CounterTable = field(default_factory=CounterTable)

    @property
    def max_connections(self) -> int | None:
        """Cap on the workers of all clients together; None for no cap."""
        return None if self.embedded else self.settings.max_connections or 4 * self.num_workers

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
