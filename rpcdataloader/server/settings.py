"""Settings of a node server, from which command line and ``run_worker`` derive, and what its processes inherit."""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from rpcdataloader.errors import AuthenticationError, RPCError
from rpcdataloader.host.output import Output
from rpcdataloader.host.resources import available_cpus
from rpcdataloader.server.events import CounterTable, Refused
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.handshake import TlsError, UnavailableError
from rpcdataloader.wire.tls import TlsFiles, name_files

# Default cap on workers: an idle one costs little, and loaders with persistent workers keep theirs, often five of them.
CONNECTIONS_PER_WORKER = 16
MIN_CONNECTIONS = 64

WILDCARDS = ("0.0.0.0", "::")
DEFAULT_PORT = "6543"


def _option(default: Any, text: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a node server. The help texts give units, and apply to ``run_worker`` as well.

    Raises:
        ValueError: A value is out of range, or two contradict each other.
    """

    host: str = _option(
        "127.0.0.1",
        "address or name to listen on, such as one network card's, or unix:/path for a Unix socket; "
        "0.0.0.0 or :: for every interface",
    )
    port: str = _option(
        DEFAULT_PORT, "port: a number, 0 for any free one, or FIRST-LAST for the first free one of a range"
    )
    advertise: str = _option(
        "",
        "host name or address that clients use, shown in the ready line "
        "(default: the address listened on, or this machine's name when it listens on every interface)",
    )
    num_workers: int = _option(
        0,
        "worker processes that the server offers; 0 for one per available CPU: the least of CPU "
        "affinity, cgroup quota and SLURM_CPUS_PER_TASK",
    )
    max_connections: int = _option(
        0, "cap on the workers of all clients together; 0 for 16 times --num-workers, and at least 64"
    )
    max_tasks_per_worker: int = _option(
        0,
        "batches after which a loader's worker is replaced, so that memory "
        "leaked by decoders is returned; 0 for no limit",
    )
    preload: tuple[str, ...] = _option(
        (), "modules to import at the start, separated by commas: all workers share them"
    )
    tls_cert: str = _option(
        "",
        "require TLS, and show the certificate in this PEM file; needs --tls-key and --tls-ca (default: none)",
        "FILE",
    )
    tls_key: str = _option("", "PEM file with the private key of --tls-cert (default: none)", "FILE")
    tls_ca: str = _option(
        "", "PEM file with the certificates of the CA that signed the clients' certificates (default: none)", "FILE"
    )
    grace: float = _option(
        30.0, "seconds that running tasks get to finish after SIGTERM; a second SIGTERM ends them at once"
    )
    register: str = _option(
        "",
        "directory to register in until the server drains: clients find it with workers='@DIR'; "
        "created if missing (default: none)",
        "DIR",
    )

    def __post_init__(self) -> None:
        for name in ("register", "tls_cert", "tls_key", "tls_ca"):  # the server may leave the folder of its start
            if path := getattr(self, name):
                object.__setattr__(self, name, os.path.abspath(os.path.expanduser(path)))
        for name in ("num_workers", "max_connections", "max_tasks_per_worker"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if not 0 <= self.grace <= threading.TIMEOUT_MAX:
            raise ValueError(f"grace must be a number of seconds, 0 or more, but is {self.grace}")
        if not self.host:
            raise ValueError("host is empty; write 0.0.0.0 or :: to listen on every interface")
        if self.is_unix and (self.advertise or self.port != DEFAULT_PORT):
            raise ValueError("a Unix socket takes neither port nor advertise")
        if self.is_unix and not self.unix_path.startswith("/"):
            raise ValueError(f"a Unix socket needs an absolute path, but host is {self.host!r}")
        if not self.is_unix:
            self.ports  # noqa: B018  # validates
        if self.tls is not None and self.is_unix:
            raise ValueError("a Unix socket needs no TLS: leave out the --tls options, or listen on TCP")

    @property
    def is_unix(self) -> bool:
        return self.host.startswith("unix:")

    @property
    def unix_path(self) -> str:
        return self.host.removeprefix("unix:")

    @property
    def ports(self) -> range:
        """Ports to try, in order; raises ``ValueError`` for a malformed ``port``."""
        numbers = self.port.split("-", 1)
        # Without `re`, whose first use would take each session of a training process a good millisecond.
        if all(number.isascii() and number.isdigit() and len(number) <= 5 for number in numbers):
            first, last = int(numbers[0]), int(numbers[-1])
            if first <= last <= 65535 and (first > 0 or last == 0):
                return range(first, last + 1)
        raise ValueError(f"port must be 0 to 65535 or FIRST-LAST, but is {self.port!r}")

    @property
    def tls(self) -> TlsFiles | None:
        """Files for TLS, or None; raises ``ValueError`` if some of the three are missing."""
        return name_files(("--tls-cert", "--tls-key", "--tls-ca"), (self.tls_cert, self.tls_key, self.tls_ca))

    @property
    def workers(self) -> int:
        """Number of workers that the server offers."""
        return self.num_workers or available_cpus()

    def advertised_host(self) -> str:
        """Host that clients use."""
        if self.advertise:
            return self.advertise
        return socket.gethostname() if self.host in WILDCARDS else self.host


# Longest reason of a refusal in the log, in characters.
MAX_REASON_CHARS = 600


@dataclass(frozen=True, slots=True)
class ServerContext:
    """State that every process of a node server inherits through the forks."""

    settings: ServerSettings
    credentials: Credentials
    num_workers: int
    # A pipe whose writing end the node server has until it dies, or the training process of a local session.
    life: Connection
    # Of the node server, which also gets the lines that workers print; sessions close it. None without a node server.
    log: Output = None  # type: ignore[assignment]
    # True for a session that a trainer has started itself, whose output goes where the trainer's goes.
    is_local: bool = False
    # Files for TLS, with absolute paths: sessions change the working directory, and workers the environment.
    tls: TlsFiles | None = None
    # Soft limit on open files that the server was started with, for workers: their programs may use select(2), or close
    # all numbers up to the limit.
    open_files: int | None = None
    node: str = field(default_factory=socket.gethostname)
    counters: CounterTable = field(default_factory=CounterTable)

    @property
    def max_connections(self) -> int:
        """Cap on the workers of all clients together."""
        return self.settings.max_connections or max(MIN_CONNECTIONS, CONNECTIONS_PER_WORKER * self.num_workers)

    def refusal(self, peer: str, error: RPCError) -> Refused:
        """The refusal of a peer that failed authentication, TLS or the protocol, for the node server's log."""
        text = str(error)
        if isinstance(error, AuthenticationError) and not isinstance(error, TlsError):
            text += f" (this server's secret: {self.credentials.source}, fingerprint {self.credentials.fingerprint})"
        is_ours = isinstance(error, UnavailableError)
        level = logging.WARNING if is_ours or isinstance(error, AuthenticationError) else logging.INFO
        return Refused(peer, text[:MAX_REASON_CHARS], level, is_ours)
