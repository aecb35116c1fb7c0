"""Node servers without a session: where the user's ``workers=`` finds them, and their status.

Starts nothing, and imports no torch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import Channel, local_identity, open_channel
from rpcdataloader.wire.connecting import first_that_listens, look_up
from rpcdataloader.wire.credentials import Credentials, client_credentials
from rpcdataloader.wire.frames import MessageType
from rpcdataloader.wire.handshake import STATUS_TICKET
from rpcdataloader.wire.register import Lookup, Register
from rpcdataloader.wire.status import NodeStatus, StatusRequest
from rpcdataloader.wire.tls import TlsFiles, client_tls
from rpcdataloader.wire.transport import Deadline

logger = logging.getLogger("rpcdataloader.client")

WORKERS_VARIABLE = "RPCDATALOADER_WORKERS"

_FORMS = (
    "write host:port, [v6]:port, unix:/path, @DIRECTORY, dns://host:port, local:N, several of them separated by "
    "commas, or inline"
)

_DNS = "dns://"

# Seconds in which one server of the preferred family of addresses must take a connection, or the other one counts.
PROBE_TIMEOUT = 1.0

# The name does not exist, or has no address. Other errors are the resolver's.
_NOTHING = (socket.EAI_NONAME, socket.EAI_NODATA)


class Names(Lookup):
    """The node servers behind a DNS name, such as a headless service of Kubernetes.

    Args:
        name: Host, and the port of all of them.
    """

    advice = "does it exist, and are the node servers ready?"

    def __init__(self, name: Address) -> None:
        super().__init__(name.host, name)
        self._address = name
        self.condition = f"behind the name {name.host}"
        self._family: int | None = None  # guarded by the lock; that in which the servers listen, once it is known

    def __str__(self) -> str:
        return f"dns://{self._address}"

    def _look(self) -> tuple[dict[Address, str], dict[str, str]]:
        """In the order of their addresses."""
        host, port = self._address.host, self._address.port
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as exc:
            if exc.errno not in _NOTHING:
                raise
            return {}, {host: exc.strerror or str(exc)}
        families: dict[int, list[str]] = {}
        for family, *_rest, sockaddr in infos:
            families.setdefault(family, []).append(str(sockaddr[0]))
        # With addresses of both families, each server has one of each, and may listen on one alone.
        if len(families) > 1 and self._family not in families:
            addresses = {family: [(each, port) for each in hosts] for family, hosts in families.items()}
            self._family = first_that_listens(addresses, PROBE_TIMEOUT)
        hosts = families[self._family if self._family in families else infos[0][0]]
        return {Address(each, port): "" for each in sorted({*hosts}, key=ipaddress.ip_address)}, {}


class Resolver(Lookup):
    """Whether a resolver says where one node server is, or that there is no such name; otherwise that is a problem."""

    advice = ""

    def __init__(self, address: Address) -> None:
        super().__init__(address.host, address)
        self._address = address
        self.condition = f"behind the name {address.host}"

    def _look(self) -> tuple[dict[Address, str], dict[str, str]]:
        try:
            look_up(self._address.host, self._address.port)
        except socket.gaierror as exc:
            if exc.errno not in _NOTHING:
                raise
        return {}, {}


@dataclass(frozen=True, slots=True)
class Inline:
    """No workers: everything runs in the caller's process, so that a debugger works."""

    def __str__(self) -> str:
        return "inline"


@dataclass(frozen=True, slots=True)
class Local:
    """Processes of this machine, which this one starts."""

    num_workers: int | None = None  # None for one per CPU

    def __str__(self) -> str:
        return "local" if self.num_workers is None else f"local:{self.num_workers}"


@dataclass(frozen=True, slots=True)
class Remote:
    """Node servers at addresses, those that lookups find, and beside them processes of this machine."""

    addresses: tuple[Address, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    local: Local | None = None

    def __str__(self) -> str:
        return ",".join(map(str, filter(None, (*self.addresses, *self.lookups, self.local))))


Where = Inline | Local | Remote


def find_workers(
    workers: str | Iterable[str | Lookup] | Lookup | None, environ: Mapping[str, str] = os.environ
) -> Where | None:
    """Parse ``workers=``.

    Args:
        workers: A list of ``host:port``, ``[v6]:port`` or ``unix:/path``, ``@/path`` of a directory in which node
            servers register, ``dns://host:port`` of a name that stands for several, pools, and ``local:N``; a string of
            them separated by commas; one of them; ``inline``; None for the environment variable
            ``RPCDATALOADER_WORKERS``.

    Returns:
        The places of the workers; None if neither the caller nor the environment names any.

    Raises:
        ValueError: The list is empty, an address is malformed or named twice, or a directory has no name.
        TypeError: ``workers`` is neither a string nor a list of strings.
    """
    if workers is None:
        named = environ.get(WORKERS_VARIABLE, "").strip()
        if not named:
            return None
        try:
            return find_workers(named)
        except ValueError as exc:
            raise ValueError(f"environment variable {WORKERS_VARIABLE}: {exc}") from None
    if isinstance(workers, Lookup):
        return Remote(lookups=(workers,))
    if isinstance(workers, str):
        workers = _split(workers)
    elif not isinstance(workers, Iterable):
        raise TypeError(f"workers must be a string or a list of strings, but is {workers!r}; {_FORMS}")
    return _join([_parse(each) for each in workers])


# How an entry of a list begins, or the whole of it.
_ENTRY = re.compile(r"\s*(@|/|unix:|dns://|local:|\[|(local|inline|[\w.-]+:[0-9]+)\s*$)")


def _split(text: str) -> list[str]:
    """The entries of a list. A comma in the name of a folder, as in ``@/sweep/lr=0.1,bs=64/pool``, separates nothing.

    It is one if a slash follows before the next entry.
    """
    entries, pieces = [], text.split(",")
    while pieces:
        entry = pieces.pop(0).strip()
        if entry.startswith(("@", "unix:")):
            others = list(itertools.takewhile(lambda piece: not _ENTRY.match(piece), pieces))
            num_inside = max((number for number, piece in enumerate(others, 1) if "/" in piece), default=0)
            entry = ",".join([entry, *pieces[:num_inside]]).strip()
            del pieces[:num_inside]
        entries += [entry] if entry else []
    return entries


def _join(parts: list[Address | Lookup | Local | Inline]) -> Where:
    if not parts:
        raise ValueError(f"workers names no worker; {_FORMS}")
    for part in parts:
        if parts.count(part) > 1:
            raise ValueError(
                f"workers names {part} more than once; a node server offers all of its workers at one address"
            )
    first, *more = parts
    if isinstance(first, (Inline, Local)) and not more:
        return first
    if Inline() in parts:
        raise ValueError("'inline' cannot be one of several: it stands alone")
    pools = [part for part in parts if isinstance(part, Local)]
    if len(pools) > 1:
        raise ValueError(
            f"there is one number of workers on this machine, but workers names {' and '.join(map(str, pools))}"
        )
    return Remote(
        tuple(part for part in parts if isinstance(part, Address)),
        tuple(part for part in parts if isinstance(part, Lookup)),
        pools[0] if pools else None,
    )


def _parse(part: str | Lookup) -> Address | Lookup | Local | Inline:
    if isinstance(part, Lookup):
        return part
    if not isinstance(part, str):
        raise TypeError(f"workers must be strings, but one of them is a {type(part).__name__}; {_FORMS}")
    text = part.strip()
    if text == "inline":
        return Inline()
    if match := re.fullmatch(r"local(?::(\d+))?", text):
        if match[1] is not None and int(match[1]) < 1:
            raise ValueError(f"{text!r} asks for no worker; use inline to load in this process")
        return Local(int(match[1]) if match[1] else None)
    if text.startswith("local:"):
        raise ValueError(f"{text!r} names no number of workers; write local:N, or local for one per CPU")
    if text.startswith("@"):
        if text == "@":
            raise ValueError("'@' names no directory; write @/path")
        return Register(os.path.abspath(os.path.expanduser(text[1:])))
    if text.startswith(_DNS):
        if (name := Address.parse(text.removeprefix(_DNS))).is_unix:
            raise ValueError(f"{text!r} names no host; write dns://host:port")
        return Names(name)
    return Address.parse(text)


# Seconds for the answer of each of several node servers.
ASK_TIMEOUT = 3.0


def ask_all(
    addresses: Iterable[Address], find_credentials: Callable[[Address], Credentials] = client_credentials
) -> Iterator[NodeStatus]:
    """Ask node servers for their status, one after the other; leaves out those that do not answer."""
    for address in addresses:
        try:
            yield ask_status(address, find_credentials(address), client_tls(), Deadline(ASK_TIMEOUT))[0]
        except (TimeoutError, RPCError, ValueError) as exc:
            logger.debug("%s does not tell its status: %s", address, exc)


def ask_status(
    address: Address, credentials: Credentials, tls: TlsFiles | None, deadline: Deadline, *, stacks: bool = False
) -> tuple[NodeStatus, Channel]:
    """Return a node server's status, and the closed channel, which knows the peer and its versions.

    Raises:
        TimeoutError: No answer came before the deadline.
        RPCError: There is no node server, or it does not answer.
        ValueError: A variable of the environment is malformed.
    """
    tls = None if address.is_unix else tls
    channel = open_channel(address, credentials, local_identity("client"), STATUS_TICKET, deadline, tls=tls)
    with contextlib.closing(channel.transport):
        channel.transport.limit(deadline)
        channel.send(MessageType.STATS, payload=StatusRequest(stacks).encode())
        message = channel.recv()
    if message is None:
        raise ConnectionLostError(f"{address} closed the connection without an answer")
    if message.type != MessageType.STATS:
        raise RemoteProtocolError(f"{address} answered with message type {message.type} instead of its status")
    return NodeStatus.decode(message.payload), channel
