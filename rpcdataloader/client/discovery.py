"""From what the user wrote in ``workers=`` to where the workers are. Reads the environment, starts nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rpcdataloader.wire.address import Address

WORKERS_VARIABLE = "RPCDATALOADER_WORKERS"

_FORMS = "write host:port, [v6]:port, unix:/path, several of them separated by commas, @DIRECTORY, local:N or inline"


@dataclass(frozen=True, slots=True)
class Inline:
    """No workers: everything runs in the process of the caller, so that a debugger works."""

    def __str__(self) -> str:
        return "inline"


@dataclass(frozen=True, slots=True)
class Local:
    """The embedded pool of this process.

    Attributes:
        num_workers: How many of its workers to use; None for as many as there are CPUs.
    """

    num_workers: int | None = None

    def __str__(self) -> str:
        return "local" if self.num_workers is None else f"local:{self.num_workers}"


@dataclass(frozen=True, slots=True)
class Remote:
    """Node servers, each at an address."""

    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))


@dataclass(frozen=True, slots=True)
class Registered:
    """The node servers that have registered in a directory, whenever one looks.

    Attributes:
        directory: Its absolute path.
    """

    directory: str

    def __str__(self) -> str:
        return f"@{self.directory}"


Where = Inline | Local | Remote | Registered


def find_workers(workers: str | Iterable[str] | None, environ: Mapping[str, str] = os.environ) -> Where | None:
    """Understand ``workers=``.

    Args:
        workers: A list of ``host:port``, ``[v6]:port`` or ``unix:/path``; a string of them separated by commas;
            ``@/path`` of a directory in which they register; ``local:N``; ``inline``; None to let the environment
            variable ``RPCDATALOADER_WORKERS`` decide.

    Returns:
        Where the workers are, or None if neither the caller nor the environment says.

    Raises:
        ValueError: The list is empty, an address is malformed or named twice, a directory has no name.
        TypeError: It is neither a string nor a list of strings.
    """
    if workers is None:
        named = environ.get(WORKERS_VARIABLE, "").strip()
        if not named:
            return None
        try:
            return _parse(named)
        except ValueError as exc:
            raise ValueError(f"environment variable {WORKERS_VARIABLE}: {exc}") from None
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
        return Registered(os.path.abspath(os.path.expanduser(text[1:])))
    return _remote([part.strip() for part in text.split(",") if part.strip()])


def _remote(texts: list[str]) -> Remote:
    if not texts:
        raise ValueError(f"workers names no worker; {_FORMS}")
    for text in texts:
        if text == "inline" or text.startswith("@") or re.match(r"local(:\d*)?$", text):
            raise ValueError(f"{text!r} cannot be one of several: it stands alone")
    addresses = tuple(Address.parse(text) for text in texts)
    for address in addresses:
        if addresses.count(address) > 1:
            raise ValueError(
                f"workers names {address} more than once; a node server offers all of its workers at one address"
            )
    return Remote(addresses)
