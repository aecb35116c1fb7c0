"""The last quarter of an hour of looks, for the lines of the live page. Pure."""

from __future__ import annotations

import math
from collections import deque

from rpcdataloader.status.report import Tree

SECONDS = 900.0

# More lines cannot be told apart.
_MAX_CLIENTS = 7


class History:
    """Points in memory, of which the oldest go.

    Args:
        interval: Seconds between two looks.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._points: deque[Tree] = deque(maxlen=max(2, math.ceil(SECONDS / interval)))

    def add(self, document: Tree) -> None:
        """Keep what matters of a look; its rates, only if they are over the time since the one before."""
        nodes = [node for node in document["nodes"] if node["interval_seconds"]]
        waits = {_name(client): client["loops"][0]["wait_share"] for client in document["clients"] if client["loops"]}
        point: Tree = {"time": document["time_unix_seconds"], "waits": waits}
        for name in "tasks", "sent_bytes":
            point[name] = sum(node[f"{name}_per_second"] for node in nodes) if nodes else None
        self._points.append(point)

    def as_columns(self) -> Tree:
        """Times, rates, and for those present clients that wait most, how much: lists of the same length.

        With them comes the interval between two looks.
        """
        # The last look has them in that order.
        names = list(self._points[-1]["waits"])[:_MAX_CLIENTS] if self._points else []
        columns: Tree = {name: [point[name] for point in self._points] for name in ("time", "tasks", "sent_bytes")}
        columns["interval_seconds"] = self._interval
        columns["waits"] = {name: [point["waits"].get(name) for point in self._points] for name in sorted(names)}
        return columns


def _name(client: Tree) -> str:
    rank = "" if client["rank"] is None else f" rank {client['rank']}"
    return f"{client['host']}:{client['pid']}{rank}"
