"""A pass over a loader that does not exist: drives an engine as the real driver does, with a judge beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.plan.actions import Action, Cancel, Close, End, Load, Open, PlanOptions, Restart, Seek
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.engine import Engine
from rpcdataloader.plan.table import Entry
from tests.simulation.cluster import Cluster, Worker
from tests.simulation.judge import Judge, ViolationError

if TYPE_CHECKING:
    from tests.simulation.ranks import Rank

GONE = ConnectionLostError("it is gone")
CLOSED = ConnectionLostError("it was closed")
LATE = ConnectionLostError("it took too long")
DIED = ConnectionLostError("it was killed by its batch")
FAILED = OSError("it did not work")
UNREACHABLE = ConnectionLostError("it cannot be reached")

_OF_EPOCH = {Load, Cancel, End}  # in another one, the numbers of tasks mean others

NUM_PLACES = 3  # samples of a batch

BATCH, EXCEPTION, MAY_PASS, END, CANCELLED = range(5)


class Reduced(NamedTuple):
    """A batch without some of its samples."""

    payload: Any
    left_out: frozenset[int]


class Pass:
    """What stands behind an iterator.

    Args:
        rank: Whose it is.
        options: Of the engine.
        homes: The node of each worker.
        others: Nodes that may help.
        payloads: What the sampler gives; None for streams.
        lengths: Batches of each stream.
        positions: Where each stream begins.
        turn: The stream whose batch comes first.
    """

    def __init__(
        self,
        cluster: Cluster,
        rank: Rank,
        options: PlanOptions,
        homes: list[str],
        others: list[str],
        *,
        payloads: list[int],
        lengths: list[int],
        positions: list[int],
        turn: int,
    ) -> None:
        self.cluster = cluster
        self.rank = rank
        self.options = options
        self.is_closed = False
        self.workers: dict[int, Worker] = {}
        self.unwanted: set[int] = set()
        self.seeks: dict[str, int] = {}
        self.epoch = 0
        self.engine: Engine[str] = Engine(options, homes, others, turn=turn)
        self.judge = Judge(options, homes, others, turn)
        self.begin(payloads, lengths, positions, turn)
        for name in dict.fromkeys(homes):
            node = cluster.nodes[name]
            if rank.sessions.get(name) == node.incarnation and node.answers:
                self.judge.node_up(name, node.incarnation, 0)
                self.engine.crew.node_up(name, node.incarnation)
            else:
                self.engine.crew.node_missing(name, UNREACHABLE)
        if rank.cluster.scenario.expects_more:
            self.judge.expects_more = True
            self.engine.crew.roster.expects_more = True
        self.acts()

    def begin(self, payloads: list[int], lengths: list[int], positions: list[int], turn: int) -> None:
        """Begin an epoch with these batches."""
        self.payloads = payloads
        self.num_drawn = 0
        self.undelivered = set(payloads)
        self.lengths = lengths
        self.positions = list(positions)  # after the last answer of each stream
        self.delivered = list(positions)
        self.turn = turn
        self.expected_turn = [stream % len(lengths) for stream in range(turn, turn + len(lengths))] if lengths else []

    def begin_epoch(self, payloads: list[int], lengths: list[int]) -> None:
        self.epoch += 1
        self.begin(payloads, lengths, [0] * len(lengths), 0)
        self.judge.begin_epoch(0)
        self.engine.begin_epoch(self.cluster.now, 0)
        actions = self.engine.act(self.cluster.now)
        self.judge.acted(actions, self.cluster.now)
        self.carry_out(actions, self.epoch)  # workers are told of an epoch before they have requests of it

    def close(self) -> None:
        self.is_closed = True
        for worker in list(self.workers.values()):
            self.cluster.die(worker, CLOSED)

    # What is to be done

    def happened(self) -> None:
        """The engine was told something."""
        self.acts()
        rank = self.rank
        if rank.is_waiting:
            rank.wake()

    def acts(self) -> None:
        actions = self.engine.act(self.cluster.now)
        self.judge.acted(actions, self.cluster.now)
        if not actions:
            return
        cluster = self.cluster
        if cluster.random.random() < cluster.noise.thread and (not self.lengths or type(actions[-1]) is not Load):
            # Another thread overtakes this one. The driver sees to it that requests to streams keep their order.
            cluster.counts["thread"] += 1
            delay = cluster.random.random() ** 2 * cluster.scenario.seconds
            cluster.at(delay, self.carry_out, actions, self.epoch)
        else:
            self.carry_out(actions, self.epoch)

    def carry_out(self, actions: list[Action], epoch: int) -> None:
        if self.is_closed:
            return
        for action in actions:
            carry_out = _CARRY_OUT.get(type(action))
            if carry_out is not None and (epoch == self.epoch or type(action) not in _OF_EPOCH):
                carry_out(self, action)

    def load(self, action: Load) -> None:
        worker = self.workers.get(action.worker)
        if worker is not None and worker.is_alive:
            worker.queue.append((action.number, action.payload, self.epoch, frozenset(action.left_out or ())))
            if not worker.is_busy:
                self.work(worker)

    def cancel(self, action: Cancel) -> None:
        worker = self.workers.get(action.worker)
        if worker is not None:
            worker.cancelled.add(action.number)

    def end(self, action: End) -> None:
        worker = self.workers.get(action.worker)
        if worker is not None:
            # A node that does not answer is not waited for.
            delay = 2.5 if worker.node.mute_until > self.cluster.now else 0.0
            self.cluster.at(delay, self.cluster.die, worker, LATE)

    def look_for(self, action: Seek[str]) -> None:
        token = self.seeks[action.node] = self.seeks.get(action.node, 0) + 1
        self.cluster.at(action.delay, self.seek, action.node, token)

    def open(self, action: Open[str]) -> None:
        number, place, name, is_promised = action.worker, action.place, action.node, action.is_promised
        cluster = self.cluster
        node = cluster.nodes[name]
        if number in self.unwanted or self.rank.sessions.get(name) != node.incarnation or not node.answers:
            cluster.at(0.0, self.fail_open, number)
            return
        position = self.positions[place] if self.positions else 0
        worker = self.workers[number] = Worker(self, number, place, node, is_promised, position)
        cluster.at(cluster.latency(), self.connect, worker, cluster.now + cluster.scenario.connect_timeout)

    def fail_open(self, number: int) -> None:
        if not self.is_closed:
            self.judge.open_failed(number)
            self.engine.crew.open_failed(number, GONE)
            self.happened()

    def close_worker(self, action: Close) -> None:
        worker = self.workers.get(action.worker)
        if worker is None:
            self.unwanted.add(action.worker)
        elif worker.is_alive:
            worker.is_closed = True
            self.cluster.die(worker, CLOSED)

    # Workers

    def connect(self, worker: Worker, deadline: float) -> None:
        """A worker asks its node to let it in."""
        if self.is_closed or not worker.is_alive:
            return
        cluster, node, now = self.cluster, worker.node, self.cluster.now
        if node.incarnation != worker.incarnation or not node.answers:
            cluster.die(worker, GONE)
        elif node.mute_until > now:
            cluster.count("mute node")
            cluster.at(node.mute_until - now, self.connect, worker, deadline)
        elif node.full_until > now or node.used >= node.room:
            if now < deadline and (worker.promised or not self.engine.num_workers):
                cluster.at(1.0, self.connect, worker, deadline)
            else:
                cluster.count("refusal")
                worker.was_refused = True
                cluster.die(worker, GONE)
        elif node.flapping_until > now and cluster.random.random() < 0.5:
            cluster.count("flap")
            cluster.die(worker, GONE)
        else:
            cluster.come(worker)
            if node.flapping_until > now:
                cluster.at(self.rank.seconds() * cluster.random.random(), self.flap, worker)
            self.judge.ready(worker.number, now)
            self.engine.worker_ready(worker.number, now)
            is_cold = cluster.random.random() < cluster.scenario.cold_starts
            opening = cluster.random.random() * (10.0 if is_cold else 0.1) * cluster.scenario.seconds
            cluster.at(opening, self.opened, worker)
            self.happened()

    def flap(self, worker: Worker) -> None:
        if worker.is_alive and worker.node.flapping_until > self.cluster.now:
            self.cluster.count("flap")
            self.cluster.die(worker, DIED)

    def restart(self, action: Restart) -> None:
        """A worker is told that another epoch begins."""
        worker = self.workers.get(action.worker)
        if worker is None or not worker.is_alive:
            return
        worker.epoch = self.epoch
        worker.queue.clear()
        worker.cancelled.clear()
        worker.position = 0
        worker.is_starting = True
        if not worker.is_busy:
            worker.is_busy = True
            self.cluster.at(self.cluster.latency(), self.opened, worker)

    def opened(self, worker: Worker) -> None:
        """A worker has done the first request of an epoch."""
        if not worker.is_alive or self.is_closed:
            return
        if worker.hung_until > self.cluster.now:
            self.cluster.at(worker.hung_until - self.cluster.now, self.opened, worker)
            return
        worker.is_busy = False
        if worker.is_starting:
            worker.is_starting = False
            worker.is_busy = True
            self.cluster.at(self.cluster.latency(), self.opened, worker)
        self.judge.at_work(worker.number)
        self.engine.worker_at_work(worker.number)
        if not worker.is_busy:
            self.work(worker)
        self.happened()

    def work(self, worker: Worker) -> None:
        """Begin with the next request."""
        queue = worker.queue
        while queue:
            number, payload, epoch, left_out = queue.popleft()
            if epoch != worker.epoch:
                continue
            worker.is_busy = True
            cluster = self.cluster
            if number in worker.cancelled:
                worker.cancelled.discard(number)
                cluster.at(0.0, self.done, worker, number, CANCELLED, payload, 0.0, epoch)
                return
            kind: int = BATCH
            result: Any = payload
            if self.lengths:
                stream = worker.place
                result = stream, worker.position
                if worker.position >= self.lengths[stream] or cluster.has_ended:
                    kind = END
                else:
                    worker.position += 1
            seconds = self.rank.seconds()
            if cluster.random.random() < cluster.noise.slow:
                cluster.counts["slow"] += 1
                seconds *= 2.0 + 20.0 * cluster.random.random()
            worker.at = number, int(cluster.random.random() * NUM_PLACES)
            place = cluster.deadly_samples.get(result)
            if kind == BATCH and place is not None and place not in left_out:
                worker.at = number, place
                cluster.at(seconds * place / NUM_PLACES, self.kill, worker, "deadly sample")
                return
            if kind == BATCH and result in cluster.deadly:
                cluster.at(cluster.deadly[result] * seconds, self.kill, worker, "deadly batch")
                return
            if kind == BATCH and result in cluster.bad:
                kind = MAY_PASS
            elif left_out:
                result = Reduced(result, left_out)
            cluster.at(seconds, self.done, worker, number, kind, result, seconds, epoch)
            return
        if worker.is_retiring:
            self.cluster.die(worker, CLOSED)

    def kill(self, worker: Worker, kind: str) -> None:
        if worker.is_alive:
            self.cluster.count(kind)
            self.cluster.die(worker, DIED)

    def done(self, worker: Worker, number: int, kind: int, result: Any, seconds: float, epoch: int) -> None:
        """A worker has done what it was at."""
        if not worker.is_alive or self.is_closed:
            return
        cluster = self.cluster
        if worker.hung_until > cluster.now:
            cluster.at(worker.hung_until - cluster.now, self.done, worker, number, kind, result, seconds, epoch)
            return
        worker.is_busy = False
        if worker.is_starting:
            worker.is_starting = False
            worker.is_busy = True
            cluster.at(cluster.latency(), self.opened, worker)
        elif worker.is_draining and not worker.is_retiring:
            worker.is_busy = True  # it takes no more
            cluster.at(cluster.latency(), cluster.die, worker, CLOSED)
        else:
            self.work(worker)
        if epoch != self.epoch:
            return
        if worker.dies_answering:
            cluster.counts["kill while answering"] += 1
            if cluster.random.random() < 0.5:  # the answer is on its way
                worker.wire = max(worker.wire, cluster.now + cluster.random.random() * cluster.scenario.seconds)
                cluster.at_time(worker.wire, self.answer, worker, number, kind, result, seconds, epoch)
            cluster.die(worker, DIED)
            return
        num_again = 0
        if kind == BATCH:
            noise, random = cluster.noise, cluster.random.random
            luck = random()
            if luck < noise.error:
                kind = EXCEPTION
                cluster.counts["error"] += 1
            elif luck < noise.error + noise.may_pass:
                kind = MAY_PASS
                cluster.counts["raise"] += 1
            if random() < noise.again:
                delay = random() * 3 * cluster.scenario.seconds
                cluster.at(delay, self.answer_again, worker, number, kind, result, epoch)
            if random() < noise.late:
                worker.wire = max(worker.wire, cluster.now + random() * 4 * cluster.scenario.seconds)
                cluster.counts["late"] += 1
            while random() < noise.twice:
                num_again += 1
        if worker.wire > cluster.now:
            cluster.at_time(worker.wire, self.answers, worker, number, kind, result, seconds, epoch, num_again)
        else:
            self.answers(worker, number, kind, result, seconds, epoch, num_again)

    def answers(
        self, worker: Worker, number: int, kind: int, result: Any, seconds: float, epoch: int, num_again: int
    ) -> None:
        """An answer is here, perhaps more than once."""
        self.answer(worker, number, kind, result, seconds, epoch)
        for _ in range(num_again):
            self.answer_again(worker, number, kind, result, epoch)

    def answer(self, worker: Worker, number: int, kind: int, result: Any, seconds: float, epoch: int) -> None:
        """An answer is here."""
        if epoch != self.epoch or self.is_closed:
            return
        judge, engine, now = self.judge, self.engine, self.cluster.now
        if kind == END:
            if judge.stream_ended(worker.number, number):
                self.lengths[worker.place] = result[1]
            engine.stream_ended(worker.number, number, now)
            self.happened()
            return
        if kind == MAY_PASS:
            if result in self.cluster.bad:
                self.cluster.count("bad batch")
            expected = judge.failed(worker.number, number, now)
            if engine.failed(worker.number, number, FAILED, now) != expected:
                raise ViolationError(f"an exception of task {number} is {'' if expected else 'not '}to be tried again")
            if expected:
                self.happened()
                return
            kind = EXCEPTION
        size = 0 if kind != BATCH else self.rank.size(result)
        measured = seconds if kind == BATCH else None
        expected = judge.answered(worker.number, number, size, measured, now)
        counts = engine.answered(
            worker.number, number, size_bytes=size, task_seconds=measured, now=now, answer=(kind, result)
        )
        if counts != expected:
            raise ViolationError(f"the answer of worker {worker.number} to task {number} counts: {counts}")
        if counts:
            if kind == CANCELLED:
                raise ViolationError(f"worker {worker.number} was told to drop task {number}, and nobody else has it")
            if self.lengths:
                self.positions[worker.place] = result[1] + 1
            self.happened()
        else:
            self.acts()  # nothing has changed, and the consumer is not told

    def answer_again(self, worker: Worker, number: int, kind: int, result: Any, epoch: int) -> None:
        """The same answer comes again: the engine must not take it for another one."""
        if epoch == self.epoch and not self.is_closed and not self.judge.holds(worker.number, number):
            self.cluster.count("twice")
            self.answer(worker, number, kind, result, 0.0, epoch)

    def payload_of(self, number: int | None) -> Any:
        task = None if number is None else self.judge.tasks.get(number)
        return None if task is None else task.payload

    def answer_after_loss(self, worker: Worker, number: int) -> None:
        """An answer of a worker that is known to be lost."""
        task = self.judge.tasks.get(number)
        if task is not None and not self.is_closed:
            self.cluster.counts["after the loss"] += 1
            result = (worker.place, 0) if self.lengths else task.payload
            self.answer(worker, number, BATCH, result, 0.1, self.epoch)

    def lose(self, worker: Worker) -> None:
        """A worker's end is known here."""
        worker.is_lost = True
        if self.is_closed:
            return
        self.workers.pop(worker.number, None)
        node = worker.node
        node_is_up = node.is_up and node.incarnation == worker.incarnation
        has_retired = worker.is_retiring and node_is_up
        # What it was at when it ended; by chance, nothing is known of that, or it was at none of the samples.
        task, place = worker.at or (None, None)
        if self.payload_of(task) not in self.cluster.deadly_samples:
            task = None if self.cluster.random.random() < 0.1 else task
            place = None if task is None or self.cluster.random.random() < 0.3 else place
        assert worker.error is not None
        loss = Loss(
            worker.error,
            node_is_up=node_is_up,
            came=worker.has_come,
            was_refused=worker.was_refused,
            has_retired=has_retired,
            task=task,
            place=place,
        )
        unanswered = list(self.judge.members[worker.number].in_flight)
        self.judge.lost(worker.number, loss)
        self.engine.worker_lost(worker.number, loss, self.cluster.now)
        self.rank.lost.append(worker)
        self.happened()
        random, likely = self.cluster.random.random, self.cluster.noise.after_loss
        for number in unanswered:
            if random() < likely:
                self.answer_after_loss(worker, number)

    def drain(self, worker: Worker) -> None:
        """A worker says that it takes no more."""
        if self.is_closed or worker.is_lost:
            return
        self.judge.draining(worker.number)
        self.engine.worker_draining(worker.number)
        self.happened()

    # Nodes

    def seek(self, name: str, token: int) -> None:
        """Try to reach a node."""
        if self.is_closed or self.seeks[name] != token:
            return
        cluster = self.cluster
        patience = cluster.latency() if cluster.nodes[name].answers else cluster.random.random()
        cluster.at(patience, self.sought, name, token)

    def sought(self, name: str, token: int) -> None:
        if self.is_closed or self.seeks[name] != token:
            return
        node, now = self.cluster.nodes[name], self.cluster.now
        if node.answers and node.mute_until > now:
            self.cluster.count("mute node")
            self.cluster.at_time(node.mute_until, self.sought, name, token)
            return
        if not node.answers:
            self.judge.node_failed(name, is_foreign=False)
            self.engine.crew.node_failed(name, UNREACHABLE)
        elif node.foreign_until > now:
            self.cluster.count("foreign node")
            self.judge.node_failed(name, is_foreign=True)
            self.engine.crew.node_failed(name, UNREACHABLE, is_foreign=True)
        elif node.broken_until > now:
            self.cluster.count("broken node")
            if name in self.engine.crew.roster.pauses:
                self.judge.node_hopeless(name)
            self.engine.crew.node_hopeless(name, ValueError("no such file"))
        else:
            self.rank.sessions[name] = node.incarnation
            self.judge.node_up(name, node.incarnation, node.offered)
            self.engine.crew.node_up(name, node.incarnation, node.offered)
        self.happened()

    # The consumer

    def draw(self) -> None:
        """Fill the window."""
        engine, judge = self.engine, self.judge
        while True:
            wants = engine.table.wants_input
            if wants != judge.wants_input():
                raise ViolationError(f"{len(judge.tasks)} tasks are not delivered, and more are wanted: {wants}")
            if not wants:
                break
            if not self.lengths and (self.num_drawn == len(self.payloads) or self.cluster.has_ended):
                self.undelivered.difference_update(self.payloads[self.num_drawn :])
                judge.has_input_ended = True
                engine.table.end_of_input()
                continue
            payload = self.num_drawn if self.lengths else self.payloads[self.num_drawn]
            self.num_drawn += 1
            number = engine.table.add_task(payload)
            assert number is not None
            stream = judge.added(number, payload)
            if engine.table.stream_of(number) != stream:
                raise ViolationError(f"task {number} is given to stream {engine.table.stream_of(number)}, not {stream}")
        self.acts()

    def take(self, delivery: Entry) -> None:
        """The consumer gets what comes next."""
        number, answer, condemned = delivery.number, delivery.answer, delivery.condemned
        task = self.judge.delivered(delivery)
        if self.lengths:
            self.take_of_stream(delivery)
            return
        payload = task.payload
        deadly_place = self.cluster.deadly_samples.pop(payload, None)
        if condemned is None:
            kind, result = answer
            left_out: frozenset[int] = frozenset()
            if isinstance(result, Reduced):
                result, left_out = result
            if not left_out <= task.left_out:
                raise ViolationError(f"batch {payload} is delivered without {left_out}, and {task.left_out} are bad")
            if kind == BATCH and deadly_place is not None and deadly_place not in left_out:
                raise ViolationError(f"batch {payload} is delivered with a sample that kills every worker")
            if result != payload:
                raise ViolationError(f"task {number} is batch {payload}, and {result} is delivered")
            if kind == BATCH and payload in self.cluster.bad:
                raise ViolationError(f"batch {payload} cannot be loaded, and is delivered")
        if payload not in self.undelivered:
            raise ViolationError(f"batch {payload} is delivered twice")
        self.undelivered.discard(payload)
        self.cluster.deadly.pop(payload, None)
        self.cluster.bad.discard(payload)

    def take_of_stream(self, delivery: Entry) -> None:
        stream = delivery.stream
        assert stream is not None
        self.turn = stream + 1
        if self.options.in_order:
            turn = self.expected_turn
            while turn and turn[0] != stream and self.delivered[turn[0]] >= self.lengths[turn[0]]:
                del turn[0]
            if not turn or turn[0] != stream:
                raise ViolationError(f"streams {turn} come next, and a batch of {stream} is delivered")
            turn.append(turn.pop(0))
        if delivery.condemned is not None:
            self.cluster.deadly.pop((stream, self.delivered[stream]), None)
            self.delivered[stream] = self.lengths[stream]
            return
        _kind, result = delivery.answer
        if result != (stream, self.delivered[stream]):
            raise ViolationError(
                f"batch {self.delivered[stream]} of stream {stream} comes next, and {result} is delivered"
            )
        self.delivered[stream] += 1

    def check_complete(self) -> None:
        """Everything is delivered."""
        if not self.judge.is_finished:
            raise ViolationError(f"the pass ends, and tasks {list(self.judge.tasks)} are not delivered")
        if self.undelivered or self.delivered != self.lengths:
            raise ViolationError(
                f"the pass ends without {sorted(self.undelivered)}; streams: {self.delivered}, not {self.lengths}"
            )


_CARRY_OUT: dict[type, Callable[[Pass, Any], None]] = {
    Load: Pass.load,
    Cancel: Pass.cancel,
    Open: Pass.open,
    Close: Pass.close_worker,
    Seek: Pass.look_for,
    End: Pass.end,
    Restart: Pass.restart,
}
