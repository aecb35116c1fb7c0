"""The address of a peer: ``host:port``, ``[v6]:port`` or ``unix:/path``.

Invariant: ``Address.parse(str(address)) == address`` for every address that :meth:`Address.parse` returns. Resolving
names and reaching addresses is the transport's business.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

_UNIX_PREFIX = "unix:"
_MAX_PORT = 65535
_FORMS = f"write host:port (1 to {_MAX_PORT}), [IPv6 address]:port or unix:/path"

# Lenient, since names are resolved elsewhere: it refuses texts meant otherwise, such as a list of nodes as Slurm writes
# it (node[01-04]:6543), two addresses at once, or user@host.
_HOST_AND_PORT = re.compile(r"(\[(?P<v6>[^]]+)]|(?P<host>[\w.-]+)):(?P<port>[0-9]{1,5})")


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
        path = text.removeprefix(_UNIX_PREFIX)
        if path.startswith("/") and path != text and path == path.strip() and path.isprintable():
            return cls(path=path)
        try:
            if (found := _HOST_AND_PORT.fullmatch(text)) is None:
                raise ValueError
            host = found["v6"] or found["host"]
            if found["v6"]:
                ipaddress.IPv6Address(host)
            else:
                host.encode("idna")  # as a look-up does: each part between dots has 1 to 63 characters
            port = int(found["port"])
            if port == 0:
                raise ValueError
            return cls(host, port)
        except ValueError:
            raise ValueError(f"cannot read the address {text!r}: {_FORMS}{_guess(text)}") from None

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


def _guess(text: str) -> str:
    """The probable meaning of a text that is no address, for the end of an error; or nothing."""
    parts = re.split(r"[\s;]+", text.strip())
    if len(parts) > 1 and all(map(_HOST_AND_PORT.fullmatch, parts)):
        return f"; commas separate addresses: {','.join(parts)}"
    if re.fullmatch(r"[\w.-]+", text):
        own = ", or local for workers of this script's own" if text == "localhost" else ""
        return f"; the port of its node server is missing, as in {text}:6543{own}"
    return ""
