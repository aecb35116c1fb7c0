"""The number of node servers of a pool, from what the training loops want that use it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from rpcdataloader.client.discovery import ask_all
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.status import count_wanted

# Seconds for which node servers are kept that were needed: longer than the time between two reports of a loop.
SHRINK_AFTER = 15.0


class Size:
    """The number of node servers: the most that were needed in the last :data:`SHRINK_AFTER` seconds. Pure.

    Args:
        least, most: Limits of the number.
        num_workers: Number of workers of each.
    """

    def __init__(self, least: int, most: int, num_workers: int) -> None:
        self.number = least
        self._least, self._most, self._num_workers = least, most, num_workers
        self._needed: deque[tuple[float, int]] = deque()  # with the time

    def decide(self, now: float, wanted: int) -> int:
        """Return the number of node servers for a number of wanted workers; 0 for an unknown one changes nothing."""
        needed = min(max(math.ceil(wanted / self._num_workers), self._least), self._most) if wanted else self.number
        self._needed.append((now, needed))
        while self._needed[0][0] < now - SHRINK_AFTER:
            self._needed.popleft()
        self.number = max(number for _time, number in self._needed)
        return self.number


def ask_wanted(addresses: Iterable[str], credentials: Credentials) -> int:
    """Ask node servers how many workers the loops of all clients want together; 0 if none is known."""
    return count_wanted(ask_all(map(Address.parse, addresses), lambda _address: credentials))
