"""From the user's ``workers=`` to the places of the workers. Reads the environment, starts nothing."""

from __future__ import annotations

import contextlib
import glob
import ipaddress
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import is_listening
from rpcdataloader.wire.credentials import INSECURE, remember_credentials
from rpcdataloader.wire.register import Lookup, Register

logger = logging.getLogger("rpcdataloader.client")

WORKERS_VARIABLE = "RPCDATALOADER_WORKERS"

_FORMS = (
    "write host:port, [v6]:port, unix:/path, @DIRECTORY, dns://host:port, local:N, several of them separated by "
    "commas, or inline"
)

_DNS = "dns://"

# Beginning of the names of embedded pools' folders.
POOL_PREFIX = "rpcdataloader-local-"

# The name does not exist, or has no address. Other errors are the resolver's.
_NOTHING = (socket.EAI_NONAME, socket.EAI_NODATA)


class Names(Lookup):
    """The node servers behind a DNS name, such as a headless service of Kubernetes.

    Args:
        name: Host, and the port of all of them.
    """

    pause = 2.0

    def __init__(self, name: Address) -> None:
        self._name = name
        self.condition = f"behind the name {name.host}"
        self.advice = "does it exist, and are the node servers ready?"
        self.problems: dict[str, str] = {}
        self._found: dict[Address, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Names, (self._name,)

    def __str__(self) -> str:
        return f"dns://{self._name}"

    def look(self) -> dict[Address, str]:
        """The current servers, in the order of their addresses."""
        try:
            infos = socket.getaddrinfo(self._name.host, self._name.port, type=socket.SOCK_STREAM)
        except OSError as exc:  # a resolver's error says nothing about the servers
            self.problems = {self._name.host: exc.strerror or str(exc)}
            if exc.errno in _NOTHING:
                self._found = {}
            logger.debug("cannot resolve %s: %s", self._name.host, exc)
            return self._found
        # With addresses of both families, each server has one of each.
        hosts = {str(info[4][0]) for info in infos if info[0] == infos[0][0]}
        self.problems = {}
        self._found = {Address(host, self._name.port): "" for host in sorted(hosts, key=ipaddress.ip_address)}
        return self._found


class LocalPools(Lookup):
    """The embedded pools of this user's training processes on this machine."""

    pause = 2.0
    condition = "under way"
    advice = "does the training process have the same TMPDIR?"

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalPools, ()

    def __str__(self) -> str:
        return "embedded pools"

    def look(self) -> dict[Address, str]:
        """Those that take connections: a pool may still start, or have been killed together with its trainer."""
        found = {}
        for folder in sorted(glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{POOL_PREFIX}*"))):
            address = Address(path=os.path.join(folder, "socket"), name=folder)
            with contextlib.suppress(OSError):
                if os.lstat(folder).st_uid == os.geteuid() and is_listening(address.path):
                    remember_credentials(address, INSECURE)
                    found[address] = ""
        return found


@dataclass(frozen=True, slots=True)
class Inline:
    """No workers: everything runs in the caller's process, so that a debugger works."""

    def __str__(self) -> str:
        return "inline"


@dataclass(frozen=True, slots=True)
class Local:
    """The embedded pool of this process."""

    num_workers: int | None = None  # number of its workers to use; None for one per CPU

    def __str__(self) -> str:
        return "local" if self.num_workers is None else f"local:{self.num_workers}"


@dataclass(frozen=True, slots=True)
class Remote:
    """Node servers at addresses, those that lookups find, and beside them the embedded pool."""

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
        workers = filter(None, map(str.strip, workers.split(",")))
    elif not isinstance(workers, Iterable):
        raise TypeError(f"workers must be a string or a list of strings, but is {workers!r}; {_FORMS}")
    return _join([_parse(each) for each in workers])


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
        raise ValueError(f"there is one embedded pool, but workers names {' and '.join(map(str, pools))}")
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
