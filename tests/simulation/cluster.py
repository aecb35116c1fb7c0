"""A cluster that does not exist: nodes, workers, wires and the time, with faults."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.wire.messages import Exited
from tests.simulation.scenarios import Scenario


class Node:
    """A node server, or its absence."""

    def __init__(self, name: str, offered: int, room: int) -> None:
        self.name = name
        self.offered = offered
        self.room = room
        self.used = 0
        self.is_up = True
        self.is_draining = False
        self.incarnation = 1
        # While it is mute: whether its sessions are, too, and whether clients wait for as long as that takes.
        self.has_mute_sessions = self.is_building = False
        self.mute_until = 0.0
        self.until: dict[str, float] = {}  # the ends of other faults, by their kinds

    @property
    def answers(self) -> bool:
        return self.is_up and not self.is_draining

    def has(self, fault: str, now: float) -> bool:
        """Whether something is wrong with it."""
        return self.until.get(fault, 0.0) > now

    def has_mute_sessions_at(self, now: float) -> bool:
        """Whether its sessions do not answer."""
        return self.has_mute_sessions and self.mute_until > now


class Session:
    """A session of a rank on a node, with the dataset."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.incarnation = node.incarnation

    @property
    def is_ready(self) -> bool:
        return self.node.answers and self.node.incarnation == self.incarnation


class Worker:
    """A worker process, and the connection to it, as the driver knows both."""

    def __init__(self, crew: Any, session: Session, owner: Any, keep_waiting: Callable[[], bool]) -> None:
        self.crew = crew
        self.session = session
        self.node = session.node
        self.owner = owner
        self.keep_waiting = keep_waiting
        self.connection = Connection(self)
        self.place = -1
        self.position = 0  # of its stream
        self.num_sent = 0
        self.queue: deque[tuple[int, Any, Any]] = deque()  # number on the connection, payload, and what takes the reply
        self.at: tuple[Any, int] | None = None  # batch and place, as it has noted them
        self.cancelled: set[int] = set()
        self.is_busy = True  # with its opening
        self.is_alive = True
        self.is_draining = self.is_lost = self.will_retire = self.retired = self.has_come = self.has_failed = False
        self.refusal = ""
        self.dies_answering = False
        self.hung_until = 0.0
        self.wire = 0.0  # when the last message on its way is there
        self.error: RPCError | None = None
        self.exited: Exited | None = None

    @property
    def name(self) -> str:
        return f"worker {self.number} on {self.node.name}"

    @property
    def machine(self) -> str:
        return str(self.node.name)

    @property
    def number(self) -> int:
        number: int = self.owner.number
        return number

    def submit(self, encoded: Any, complete: Callable[[Any], None]) -> None:
        """The first request of an epoch."""
        self.crew.must_begin(encoded.payload.epoch)
        self.connection.put(encoded.payload, complete)

    def close(self) -> None:
        cluster = self.crew.cluster
        if self.is_alive and not self.has_come:  # its node may have been full at that moment
            self.refusal = "it has no room" if cluster.random.random() < 0.3 else ""
        cluster.die(self, CLOSED)


class Connection:
    """What is sent to a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def submit(self, _type: Any, encoded: Any, request: Any) -> int:
        return self.put(encoded.payload, request.complete)

    def put(self, payload: Any, complete: Callable[[Any], None]) -> int:
        worker = self.worker
        if worker.is_lost:
            raise LOST
        worker.num_sent += 1
        worker.queue.append((worker.num_sent, payload, complete))
        if worker.is_alive and not worker.is_busy:
            worker.crew.work(worker)
        return worker.num_sent

    def cancel(self, number: int) -> None:
        self.worker.cancelled.add(number)

    def cancel_all(self) -> None:
        self.worker.cancelled.update(number for number, _payload, _complete in self.worker.queue)


class Clock:
    """Time, and what happens in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ties = itertools.count()

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Call something after a while."""
        self.at(self.now + delay, call, *args)

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """Call something at a moment, after what was to be called at the same moment before."""
        heapq.heappush(self._heap, (time, next(self._ties), call, args))

    def step(self, until: float = math.inf) -> bool:
        """Call what comes next, unless that is later; returns whether it has."""
        if not self._heap or self._heap[0][0] > until:
            return False
        self.now, _tie, call, args = heapq.heappop(self._heap)
        call(*args)
        return True


class Cluster(Clock):
    """Nodes and workers of all ranks."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario
        self.noise = scenario.noise
        self.random = random.Random(scenario.seed)
        self.nodes: dict[str, Node] = {}
        self.alive: list[Worker] = []  # those that have come
        self.counts: Counter[str] = Counter()  # faults of each kind
        self.num_passes = 0
        self.has_ended = False  # no more faults, and no more passes
        self.ranks: list[Any] = []
        self.deadly: dict[Any, float] = {}  # batches that kill their workers; when, as a part of what they would take
        self.bad: set[Any] = set()  # batches that raise exceptions
        self.num_ids = 0
        for offered in scenario.offered:
            self.add_node(offered)

    def add_node(self, offered: int) -> Node:
        node = Node(f"node{len(self.nodes)}", offered, max(1, round(offered * self.scenario.room)))
        self.nodes[node.name] = node
        return node

    def latency(self) -> float:
        """Seconds that a message takes."""
        return 0.0005 * (1 + self.random.random())

    def new_ids(self, num: int) -> list[int]:
        """The sampler of a rank begins."""
        self.num_ids += num
        return list(range(self.num_ids - num, self.num_ids))

    # Workers

    def come(self, worker: Worker) -> None:
        worker.has_come = True
        worker.node.used += 1
        self.alive.append(worker)

    def die(self, worker: Worker, error: RPCError) -> None:
        """A process ends. Its client learns of that when it has had what was on the wire before."""
        if not worker.is_alive:
            return
        worker.is_alive = False
        worker.error = error
        if worker.has_come:
            worker.node.used -= 1
            self.alive.remove(worker)
        worker.wire = max(worker.wire, self.now) + 0.02 * self.random.random() ** 3
        if worker.has_come and worker.node.has_mute_sessions_at(self.now):
            worker.wire += FATE_TIMEOUT  # until its client stops waiting for the reason
        self.at(worker.wire, worker.crew.lose, worker)

    # Nodes

    def lose_node(self, node: Node) -> None:
        """A node ends with all of its workers."""
        node.is_up = node.is_draining = False
        node.incarnation += 1
        for worker in [worker for worker in self.alive if worker.node is node]:
            self.die(worker, LOST)

    def return_node(self, node: Node, incarnation: int) -> None:
        node.is_up = node.is_up or node.incarnation == incarnation


FATE_TIMEOUT = 2.0

LOST = ConnectionLostError("the node is lost")
CLOSED = ConnectionLostError("it was closed")
