"""The number of node servers of a pool, from what the training loops want that use it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from rpcdataloader.client.asking import ask_status
from rpcdataloader.errors import RPCError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.status import ClientStatus, NodeStatus
from rpcdataloader.wire.tls import client_tls
from rpcdataloader.wire.transport import Deadline

logger = logging.getLogger("rpcdataloader.pools")

# Seconds for a node server's answer.
ASK_TIMEOUT = 3.0

# Seconds for which fewer node servers must suffice before one goes: longer than the time between two reports of a loop.
SHRINK_AFTER = 15.0


class Size:
    """The number of node servers. Pure.

    Args:
        least, most: Limits of the number.
        num_workers: Number of workers of each.
    """

    def __init__(self, least: int, most: int, num_workers: int) -> None:
        self.number = least
        self._least, self._most, self._num_workers = least, most, num_workers
        self._since: float | None = None  # time since which fewer suffice
        self._enough = 0  # the most that were needed since then

    def decide(self, now: float, wanted: int) -> int:
        """Return the number of node servers for a number of wanted workers; 0 for an unknown one changes nothing."""
        number = min(max(math.ceil(wanted / self._num_workers), self._least), self._most)
        if not wanted or number >= self.number:
            self.number = number if wanted else self.number
            self._since = None
        elif self._since is None:
            self._since, self._enough = now, number
        else:
            self._enough = max(self._enough, number)
            if now - self._since >= SHRINK_AFTER:
                self.number, self._since = self._enough, None
        return self.number


def ask_wanted(addresses: Iterable[str], credentials: Credentials) -> int:
    """Ask node servers how many workers the loops of all clients want together; 0 if none is known."""
    found = []
    for address in addresses:
        try:
            found.append(ask_status(Address.parse(address), credentials, client_tls(), Deadline(ASK_TIMEOUT))[0])
        except (TimeoutError, RPCError, ValueError) as exc:
            logger.debug("%s does not say what is wanted: %s", address, exc)
    return count_wanted(found)


def count_wanted(nodes: Iterable[NodeStatus]) -> int:
    """Add up what all clients want: what their loops have reported or, without any, the workers that they have."""
    clients: dict[tuple[str, int], list[ClientStatus]] = {}
    for node in nodes:
        for client in node.clients:
            clients.setdefault((client.host, client.pid), []).append(client)
    wanted = 0
    for parts in clients.values():
        # All sessions of a client get the same report.
        reports = [(part.loops_seconds, part.loops) for part in parts if part.loops_seconds is not None and part.loops]
        loops = min(reports, key=lambda report: report[0])[1] if reports else []
        wanted += sum(loop.wanted_workers for loop in loops) if loops else sum(len(part.workers) for part in parts)
    return wanted
