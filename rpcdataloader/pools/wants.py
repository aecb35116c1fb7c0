"""The number of node servers of a pool, from what the training loops want that use it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rpcdataloader.client.asking import ask_all
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.status import count_wanted

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
    return count_wanted(ask_all(map(Address.parse, addresses), lambda _address: credentials))
