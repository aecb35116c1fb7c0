"""The address of a peer: ``host:port``, ``[v6]:port`` or ``unix:/path``.

Invariant: ``Address.parse(str(address)) == address`` for every address that :meth:`Address.parse` returns. Resolving
names and reaching addresses is the transport's business.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

_FORMS = "write host:port, [IPv6 address]:port or unix:/path"
_UNIX_PREFIX = "unix:"
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address (``host`` and ``port``) or the ``path`` of a Unix socket."""

    host: str = ""  # name or IP address, IPv6 without its brackets
    port: int = 0  # a listening server's 0 means "any free one"; :meth:`parse` never returns 0
    path: str = ""  # of a Unix socket; empty for TCP
    name: str = field(default="", compare=False)  # in messages, instead of an address that tells users nothing

    def __post_init__(self) -> None:
        if self.path and (self.host or self.port):
            raise ValueError(f"an address has a host and a port, or a path, not both: {self.host!r}, {self.path!r}")
        if not 0 <= self.port <= _MAX_PORT:
            raise ValueError(f"port {self.port} is not in 0..{_MAX_PORT}")

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse one address as users write it.

        Args:
            text: ``host:port``, ``[v6]:port`` or ``unix:/path``.

        Raises:
            ValueError: The text is malformed; the message quotes it and says what to write.
        """
        if text != text.strip() or not text.isprintable():
            raise _error(text, "it contains blanks or control characters")
        if "://" in text:
            scheme, _, rest = text.partition("://")
            rest = "unix:/" + rest.lstrip("/") if scheme == "unix" else rest.split("/")[0] or "host:port"
            raise _error(text, "it has a scheme", f"write {rest}")
        if text.startswith(_UNIX_PREFIX):
            path = text.removeprefix(_UNIX_PREFIX)
            if not path.startswith("/"):
                raise _error(text, "the path of a Unix socket must be absolute", "write unix:/path")
            return cls(path=path)
        if text.startswith("["):
            return cls._parse_ipv6(text)
        if text.count(":") > 1:
            if " " in text or ";" in text:
                raise _error(text, "it is more than one address", "separate them by commas")
            raise _error(text, "an IPv6 address needs brackets", "write [address]:port, such as [::1]:6543")
        host, colon, port = text.partition(":")
        if not colon:
            raise _error(text, "the port is missing")
        # Lenient, since names are resolved elsewhere: it catches texts meant otherwise, such as a list of nodes as
        # Slurm writes it (node[01-04]:6543), two addresses at once, or user@host.
        if not host.translate(_HOST_PUNCTUATION).isalnum():
            raise _error(text, f"{host!r} is not the name of one host")
        try:
            host.encode("idna")  # as a look-up does
        except UnicodeError:
            raise _error(text, f"each part of {host!r} between dots must have 1 to 63 characters") from None
        return cls(host, _parse_port(text, port))

    @classmethod
    def _parse_ipv6(cls, text: str) -> Address:
        host, closed, rest = text[1:].partition("]")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _error(text, f"{host!r} is not an IPv6 address") from None
        if not closed or not rest.startswith(":"):
            raise _error(text, "the port is missing", f"write [{host}]:port")
        return cls(host, _parse_port(text, rest[1:]))

    @property
    def is_unix(self) -> bool:
        """Whether this is the path of a Unix socket."""
        return bool(self.path)

    def __str__(self) -> str:
        if self.name:
            return self.name
        if self.path:
            return _UNIX_PREFIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_HOST_PUNCTUATION = str.maketrans("", "", ".-_")


def _parse_port(text: str, port: str) -> int:
    # isdecimal alone would accept Arabic digits, and int() alone "+80", " 80" and "8_0".
    if not (port.isascii() and port.isdecimal()):
        raise _error(text, f"the port {port!r} is not a number")
    if len(port) > 5 or not 1 <= int(port) <= _MAX_PORT:
        raise _error(text, f"the port {port} is not in 1..{_MAX_PORT}")
    return int(port)


def _error(text: str, problem: str, advice: str = _FORMS) -> ValueError:
    return ValueError(f"cannot read the address {text!r}: {problem}; {advice}")
