"""From the user's ``workers=`` to the places of the workers. Reads the environment, starts nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rpcdataloader.client.register import Elastic, Names, Register
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.status import Registration

WORKERS_VARIABLE = "RPCDATALOADER_WORKERS"

_FORMS = (
    "write host:port, [v6]:port, unix:/path, several of them separated by commas, @DIRECTORY, dns://host:port, local:N "
    "or inline"
)


_DNS = "dns://"


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
    """Node servers, each at an address."""

    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))


class Joined(Elastic):
    """Named node servers, which are always there, and all from elastic places.

    Args:
        named: Addresses of the named ones.
        places: Elastic places of others.
    """

    def __init__(self, named: tuple[Address, ...], places: tuple[Elastic, ...]) -> None:
        self.named = named
        self.places = places
        self.pause = min((place.pause for place in places), default=1.0)
        self.place = " or ".join(place.place for place in places)
        self.advice = "; ".join(place.advice for place in places)
        self.problems: dict[str, str] = {}

    @classmethod
    def of(cls, where: Remote | Elastic) -> Joined:
        """The same node servers in this form."""
        if isinstance(where, Joined):
            return where
        return cls(where.addresses, ()) if isinstance(where, Remote) else cls((), (where,))

    @property
    def parts(self) -> tuple[Address | Elastic, ...]:
        return self.named + self.places

    def open(self) -> Joined:
        return Joined(self.named, tuple(place.open() for place in self.places))

    def look(self) -> tuple[Registration, ...]:
        """The current servers, named ones first."""
        found = {address: Registration(address) for address in self.named}
        for place in self.places:
            found |= {server.address: server for server in place.look()}
        self.problems = {name: reason for place in self.places for name, reason in place.problems.items()}
        return tuple(found.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return Joined, (self.named, self.places)

    def __str__(self) -> str:
        return ",".join(map(str, self.parts))


Where = Inline | Local | Remote | Elastic


def find_workers(
    workers: str | Iterable[str] | Elastic | None, environ: Mapping[str, str] = os.environ
) -> Where | None:
    """Parse ``workers=``.

    Args:
        workers: A list of ``host:port``, ``[v6]:port`` or ``unix:/path``; a string of them separated by commas;
            ``@/path`` of a directory in which they register; ``dns://host:port`` of a name that stands for all of
            them; a pool; ``local:N``; ``inline``; None for the environment variable ``RPCDATALOADER_WORKERS``.

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
            return _parse(named)
        except ValueError as exc:
            raise ValueError(f"environment variable {WORKERS_VARIABLE}: {exc}") from None
    if isinstance(workers, Elastic):
        return workers
    if isinstance(workers, str):
        return _parse(workers)
    if not isinstance(workers, Iterable):
        raise TypeError(f"workers must be a string or a list of strings, but is {workers!r}; {_FORMS}")
    texts = list(workers)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"workers must be strings, but one of them is a {type(text).__name__}; {_FORMS}")
    return _remote(texts)


def _parse(text: str) -> Where:
    text = text.strip()
    if text == "inline":
        return Inline()
    if match := re.fullmatch(r"local(?::(\d+))?", text):
        if match[1] is not None and int(match[1]) < 1:
            raise ValueError(f"{text!r} asks for no worker; use inline to load in this process")
        return Local(int(match[1]) if match[1] else None)
    if text.startswith("local:") and "," not in text:
        raise ValueError(f"{text!r} names no number of workers; write local:N, or local for one per CPU")
    if text.startswith("@") and "," not in text:
        if text == "@":
            raise ValueError("'@' names no directory; write @/path")
        return Register(os.path.abspath(os.path.expanduser(text[1:])))
    if text.startswith(_DNS) and "," not in text:
        if (name := Address.parse(text.removeprefix(_DNS))).is_unix:
            raise ValueError(f"{text!r} names no host; write dns://host:port")
        return Names(name)
    return _remote([part.strip() for part in text.split(",") if part.strip()])


def _remote(texts: list[str]) -> Remote:
    if not texts:
        raise ValueError(f"workers names no worker; {_FORMS}")
    for text in texts:
        if text == "inline" or text.startswith(("@", _DNS)) or re.match(r"local(:\d*)?$", text):
            raise ValueError(f"{text!r} cannot be one of several: it stands alone")
    addresses = tuple(Address.parse(text) for text in texts)
    for address in addresses:
        if addresses.count(address) > 1:
            raise ValueError(
                f"workers names {address} more than once; a node server offers all of its workers at one address"
            )
    return Remote(addresses)
