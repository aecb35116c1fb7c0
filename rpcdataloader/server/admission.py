"""Who gets a worker: a cap on all of them with a fair share for every client, and a cap on those of one client.

Pure: clients are any hashable. A client that has reached its share waits, and one that came late gets its own as soon
as workers end; those that run are never taken away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Admission:
    """Counts the workers of each client.

    Args:
        max_workers: Cap on all workers together; None for no cap.
        max_per_client: Cap on the workers of one client; None for no cap but its fair share.
    """

    def __init__(self, max_workers: int | None, max_per_client: int | None = None) -> None:
        self._max_workers = max_workers
        self._max_per_client = max_per_client
        self._held: Counter[Hashable] = Counter()

    def admit(self, client: Hashable) -> str | None:
        """Give ``client`` one more worker; returns None, or why it gets none now."""
        if self._max_per_client is not None and self._held[client] >= self._max_per_client:
            return f"this client has its {self._max_per_client} connections (--max-connections-per-client)"
        if self._max_workers is not None:
            total = self._held.total()
            if total >= self._max_workers:
                return f"all {self._max_workers} connections are in use (--max-connections)"
            others = sum(1 for other in self._held if other != client)
            share = max(1, self._max_workers // (others + 1))
            if self._held[client] >= share:
                return f"this client has its share of {share} of {self._max_workers} connections (--max-connections)"
        self._held[client] += 1
        return None

    def release(self, client: Hashable, count: int = 1) -> None:
        """``count`` workers of ``client`` have ended."""
        self._held[client] -= count
        if self._held[client] <= 0:
            del self._held[client]

    def held(self, client: Hashable) -> int:
        """Workers of ``client``."""
        return self._held.get(client, 0)
