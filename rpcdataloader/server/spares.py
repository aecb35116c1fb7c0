"""Gates that are forked before anybody connects, so that no connection waits for the fork of a large process.

The node server forks them while nothing comes in: beside workers that begin, they would take their time.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.gate import run_gate
from rpcdataloader.server.link import Link
from rpcdataloader.server.processes import EXHAUSTED_PAUSE, Process, fork, name_process

logger = logging.getLogger("rpcdataloader.server")

# At most so many wait, as the first batch comes from one of the first workers. Each occupies 2.4 MB.
MAX_SPARES = 4

# Seconds since the last connection after which new ones are forked.
QUIET_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Gate:
    """A process that waits for its connection."""

    process: Process
    link: Link

    def end(self) -> None:
        """End it, and wait until it has ended."""
        self.process.kill("nobody has connected")
        self.process.reap(wait=True)
        self.link.close()


def fork_gate(forget: Callable[[], None], context: ServerContext) -> Gate:
    """Fork a gate, which waits for its connection.

    Args:
        forget: Closes, in the fork, what belongs to the node server.
        context: What it is told.

    Raises:
        OSError: The system has no room for a process or a descriptor.
    """
    ours, theirs = Link.pair()

    def run() -> None:
        name_process("rpcdl-spare")
        forget()
        ours.close()
        run_gate(theirs, context)

    try:
        return Gate(fork(run), ours)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


class SpareGates:
    """The gates that wait.

    Args:
        num_wanted: So many, at most :data:`MAX_SPARES`.
        fork: Makes one.
    """

    def __init__(self, num_wanted: int, fork: Callable[[], Gate]) -> None:
        self._num_wanted = min(num_wanted, MAX_SPARES)
        self._fork = fork
        self._gates: deque[Gate] = deque()
        self.due = math.inf  # when to call refill

    @property
    def pids(self) -> set[int]:
        """Their process ids."""
        return {gate.process.pid for gate in self._gates}

    def take(self, now: float) -> Gate:
        """The one that has waited longest, or a new one.

        Args:
            now: In seconds.

        Raises:
            OSError: The system has no room for a process or a descriptor.
        """
        self.wait(now)
        while self._gates:
            gate = self._gates.popleft()
            if gate.process.reap() is None:
                return gate
            gate.end()  # somebody has killed it
        return self._fork()

    def give_back(self, gate: Gate) -> None:
        """Keep one that was taken, and that has no connection yet."""
        self._gates.append(gate)

    def wait(self, now: float) -> None:
        """Fork no more before it has been quiet for a while."""
        self.due = now + QUIET_SECONDS

    def refill(self, now: float) -> None:
        """Fork one, if it is time for that and one is missing."""
        if now < self.due:
            return
        if len(self._gates) >= self._num_wanted:
            self.due = math.inf
            return
        try:
            self._gates.append(self._fork())
        except OSError as exc:
            logger.info("cannot fork a gate in advance: %s", exc.strerror or exc)
            self.due = now + EXHAUSTED_PAUSE

    def forget_in_child(self) -> None:
        """Close, in a fork, what belongs to the node server."""
        for gate in self._gates:
            gate.link.close()
            os.close(gate.process.fileno())

    def close(self) -> None:
        """End them; idempotent."""
        self.due = math.inf
        while self._gates:
            self._gates.pop().end()
