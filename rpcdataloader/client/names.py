"""Asking the resolver for a name that stands for many node servers, such as a headless service of Kubernetes."""

from __future__ import annotations

import ipaddress
import logging
import socket

from rpcdataloader.client.register import Found
from rpcdataloader.wire.address import Address

logger = logging.getLogger("rpcdataloader.client")

# There is no such name, or nothing behind it. All else says that the resolver has a problem.
_NOTHING = (socket.EAI_NONAME, socket.EAI_NODATA)


class Names:
    """The addresses behind a name, as this process has seen them last. Thread-safe."""

    pause = 2.0

    def __init__(self, name: Address) -> None:
        self._name = name
        self.place = f"behind the name {name.host}"
        self.advice = "does it exist, and are the node servers ready?"
        self.problems: dict[str, str] = {}
        self._found: tuple[Found, ...] = ()

    def look(self) -> tuple[Found, ...]:
        """The servers that are there now, in the order of their addresses, which is the same for everybody."""
        try:
            infos = socket.getaddrinfo(self._name.host, self._name.port, type=socket.SOCK_STREAM)
        except OSError as exc:  # that it could not be asked says nothing about the servers
            self.problems = {self._name.host: exc.strerror or str(exc)}
            if exc.errno in _NOTHING:
                self._found = ()
            logger.debug("cannot resolve %s: %s", self._name.host, exc)
            return self._found
        # With addresses of both families, each server has one of each.
        hosts = {info[4][0] for info in infos if info[0] == infos[0][0]}
        self.problems = {}
        self._found = tuple(
            Found(Address(str(host), self._name.port)) for host in sorted(hosts, key=ipaddress.ip_address)
        )
        return self._found
