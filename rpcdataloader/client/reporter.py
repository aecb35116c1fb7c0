"""Tells node servers, every few seconds, how the training loops of this process do.

The alarm's thread sends one small message without reply per node server. Errors are logged once, and end nothing.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence

from rpcdataloader.client.alarm import Alarm
from rpcdataloader.client.node import Node
from rpcdataloader.wire.status import LoopStatus, Report

logger = logging.getLogger("rpcdataloader.client")

# Seconds between two reports.
PERIOD = 5.0


class Reporter:
    """The loops of a client; thread-safe."""

    def __init__(self, alarm: Alarm, find_nodes: Callable[[], Sequence[Node]]) -> None:
        self.num_failures = 0
        self._alarm = alarm
        self._find_nodes = find_nodes
        self._has_told = False  # whether the last report had a loop; for the alarm's thread alone
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._loops: list[weakref.WeakMethod[Callable[[], LoopStatus | None]]] = []
        self._is_running = False

    def add(self, describe: Callable[[], LoopStatus | None]) -> None:
        """A loop begins; it is reported if there is a node to tell.

        Args:
            describe: Method of the loop, referred to weakly. Returns None while there is nothing to report.
        """
        with self._lock:
            if self._find_nodes():
                self._loops.append(weakref.WeakMethod(describe))
                if not self._is_running:
                    self._is_running = True
                    self._alarm.call_after(PERIOD, self._report)

    def _report(self) -> None:
        try:
            found = [describe() for loop in list(self._loops) if (describe := loop()) is not None]
            told = [status for status in found if status is not None]
            if told or self._has_told:  # the last report has no loop
                payload = Report.of(told)
                for node in self._find_nodes():
                    node.report(payload)
            self._has_told = bool(told)
        except Exception:
            self.num_failures += 1
            level = logging.WARNING if self.num_failures == 1 else logging.DEBUG
            logger.log(level, "cannot report how the training loops do; they go on", exc_info=True)
        describe = None  # or it would keep the loop
        with self._lock:
            self._loops = [loop for loop in self._loops if loop() is not None]
            self._is_running = bool(self._loops)
            if self._is_running:
                self._alarm.call_after(PERIOD, self._report)
