"""A pass over a loader that does not exist: the product's driver and seats, and the world behind their executor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from rpcdataloader.diagnosis.records import Recorder
from rpcdataloader.errors import ConnectError, ConnectionLostError
from rpcdataloader.loader.driver import Driver, ToDo
from rpcdataloader.loader.executor import Opening
from rpcdataloader.loader.seat import Answer
from rpcdataloader.loader.tasks import Task
from rpcdataloader.plan.actions import End, PlanOptions
from rpcdataloader.plan.table import Entry
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.messages import Exited
from rpcdataloader.wire.pickling import Encoded
from tests.simulation.cluster import CLOSED, LOST, Cluster, Session, Worker
from tests.simulation.judge import Judge
from tests.simulation.judged import JudgedEngine

if TYPE_CHECKING:
    from tests.simulation.ranks import Rank

GONE = ConnectionLostError("it is gone")
REFUSED = ConnectError("it has no room")
LATE = ConnectionLostError("it took too long")
DIED = ConnectionLostError("it was killed by its batch")
EXITED = ConnectionLostError("it exited with status 1")
ERROR = ValueError("it does not work")
UNREACHABLE = ConnectionLostError("it cannot be reached")

MOST_SAMPLES = 7  # of a batch
BETWEEN = -2  # no place of a sample
END_LIMIT = 2.5  # seconds after which a worker that was ended is closed, whatever its session says

BATCH, EXCEPTION, LAST, CANCELLED, FAILED = range(5)


class Reply(Message):
    """The reply to a request."""

    __slots__ = ("kind", "result", "seconds")

    def __init__(self, kind: int, result: Any, seconds: float) -> None:
        super().__init__(0)
        self.kind = kind
        self.result = result
        self.seconds = seconds


class Start(NamedTuple):
    """The first request of an epoch."""

    epoch: Any
    place: int  # stream; -1 for the same one
    position: int  # in the stream


def num_samples(payload: Any) -> int:
    """The samples of a batch: some have one alone."""
    return 1 + hash(payload) % MOST_SAMPLES


def make_part(task: Task, first: int, size: int) -> Task | None:
    """A part of a batch; some cannot have any."""
    if task.number % 10 == 9:
        return None
    return Task(None, task.number, first, size, whole=task, request=encoded((task.number, first, size)))


def encoded(payload: Any) -> Encoded:
    """A request to send, which is not pickled."""
    return Encoded(payload, [])


class Epoch:
    """What the driver knows of an epoch."""

    def __init__(self, positions: list[int], turn: int) -> None:
        self.progress = SimpleNamespace(streams=positions, ends={}, turn=turn, finished=False)
        self.source = SimpleNamespace(is_ready=None, task=None)


class Condition:
    """The lock of a pass, and its consumer, which wakes up when a thread that has notified it lets go."""

    def __init__(self, crew: Pass) -> None:
        self.crew = crew
        self.depth = 0
        self.is_notified = False

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.depth -= 1
        if self.depth or kind is not None:
            return
        rank, is_notified = self.crew.rank, self.is_notified
        self.is_notified = False
        if rank.crew is not self.crew or self.crew.is_closed:
            return
        if is_notified:
            rank.wake()
        elif rank.is_waiting and (number := self.crew.judge.deliverable()) is not None:
            raise AssertionError(f"task {number} is answered, and the consumer sleeps on")

    def notify(self) -> None:
        self.is_notified = True

    notify_all = notify


class SimulatedDriver(Driver):
    """The driver, whose threads overtake each other."""

    executor: Any

    def fail(self, error: BaseException) -> None:
        """Show what an event has raised: in a pass, it ends it, as an exception of the judge would, unseen."""
        raise error

    def carry_out(self, todo: ToDo) -> None:
        cluster = self.executor.cluster
        if not self.executor.is_beginning and cluster.random.random() < cluster.noise.thread:
            delay = cluster.random.random() ** 2 * cluster.scenario.seconds
            cluster.after(delay, super().carry_out, todo)
        else:
            super().carry_out(todo)

    def joined(self, batch: Entry, begun: Any, answer: Answer | None) -> None:
        cluster = self.executor.cluster
        if cluster.random.random() < cluster.noise.thread:
            cluster.after(cluster.random.random() ** 2 * cluster.scenario.seconds, super().joined, batch, begun, answer)
        else:
            super().joined(batch, begun, answer)

    def _draw(self, _began: float) -> None:
        self.executor.draw(self.begun.source)


class Pass:
    """What stands behind an iterator, and what its driver takes for the outside."""

    is_over = False  # the client
    name = "dataset"
    ask_ranks = None  # a rank that logs nothing

    def __init__(
        self,
        cluster: Cluster,
        rank: Rank,
        options: PlanOptions,
        homes: list[str],  # the node of each worker
        others: list[str],  # nodes that may help
        *,
        payloads: list[int],  # what the sampler gives; empty for streams
        lengths: list[int],  # batches of each stream
        positions: list[int] | None = None,  # where each stream begins
        turn: int = 0,  # the stream whose batch comes first
    ) -> None:
        self.cluster = cluster
        self.rank = rank
        self.options = options
        self.homes = set(homes)
        self.condition = Condition(self)
        self.is_beginning = False
        self.judge = Judge(options, homes, others, turn)
        self.judge.expects_more = cluster.scenario.expects_more
        self.engine = JudgedEngine(self.judge, options, homes, others, turn, make_part)
        self.engine.at_end = self.at_end
        settings: Any = SimpleNamespace(
            iterable=options.is_iterable,
            prefetch_factor=options.prefetch_factor,
            max_in_flight_bytes=options.max_in_flight_bytes,
            persistent_workers=False,
            drop_last=False,
            sampler=None,
            partition=SimpleNamespace(rank=1, label=""),  # which logs no diagnosis
        )
        self.begin(payloads, lengths, positions or [0] * len(lengths), turn)
        recorder = Recorder(contextlib.nullcontext(), cluster.now)
        # The seam: an executor, and a way of replies into this process; nodes are their names.
        outside: Any = self
        engine: Any = self.engine
        names: Any = dict.fromkeys(homes)
        epoch: Any = Epoch(self.delivered, turn)
        self.driver: Any = SimulatedDriver(settings, engine, outside, epoch, outside, recorder)
        ready = [name for name in homes if self.session(name) is not None]
        self.must_not_seek = bool(ready)
        self.driver.start(names, [], expects_more=cluster.scenario.expects_more)
        self.must_not_seek = False

    @property
    def is_closed(self) -> bool:
        return self.driver.is_closed

    @property
    def positions(self) -> list[Any]:
        """The place in each stream after its last answer."""
        return self.driver.streams

    def begin(self, payloads: list[int], lengths: list[int], positions: list[int], turn: int) -> None:
        """Begin an epoch with these batches."""
        self.payloads = payloads
        self.num_drawn = 0
        self.undelivered = set(payloads)
        self.lengths = lengths
        self.delivered = list(positions)
        self.turn = turn
        self.expected_turn = [stream % len(lengths) for stream in range(turn, turn + len(lengths))] if lengths else []

    def begin_epoch(self, payloads: list[int], lengths: list[int]) -> None:
        self.begin(payloads, lengths, [0] * len(lengths), 0)
        epoch: Any = Epoch(self.delivered, 0)
        self.is_beginning = True  # workers are told of an epoch before they have requests of it
        self.driver.begin_epoch(epoch)
        self.is_beginning = False

    def leave(self) -> None:
        """End the pass."""
        self.driver.close()

    # The outside: nodes

    def now(self) -> float:
        return self.cluster.now

    def _is_free(self, what: str) -> None:
        assert not self.condition.depth, f"{what}, which may take long, and all threads of the pass wait for it"

    def session(self, name: str) -> Session | None:
        session: Session | None = self.rank.sessions.get(name)
        return session if session is not None and session.is_ready else None

    def seek(self, name: str, delay: float, feed: Callable[[Any], None]) -> None:
        assert not self.must_not_seek or name in self.homes, f"the dataset is built on {name}, which is not needed"
        self.cluster.after(delay, self._seek, name, feed)

    def _seek(self, name: str, feed: Callable[[Any], None]) -> None:
        if self.is_closed:
            return
        cluster = self.cluster
        node = cluster.nodes[name]
        patience = cluster.latency() if node.answers else cluster.random.random()
        if node.mute_until > cluster.now and node.answers:
            if self.session(name) is None:
                patience = cluster.scenario.options.connect_timeout
            elif node.has_mute_sessions:
                # It builds, for as long as that takes.
                cluster.after(node.mute_until - cluster.now, self._seek, name, feed)
                return
        cluster.after(patience, self._sought, name, feed)

    def _sought(self, name: str, feed: Callable[[Any], None]) -> None:
        if self.is_closed:
            return
        node, now = self.cluster.nodes[name], self.cluster.now
        if not node.answers or (node.mute_until > now and (node.has_mute_sessions or self.session(name) is None)):
            feed(lambda engine, _now: engine.crew.node_failed(name, UNREACHABLE))
        elif node.has("foreign node", now):
            feed(lambda engine, _now: engine.crew.node_failed(name, UNREACHABLE, is_foreign=True))
        elif node.has("broken node", now):
            feed(lambda engine, _now: engine.crew.node_hopeless(name, ValueError("no such file")))
        else:
            session = self.rank.sessions.get(name)
            if session is None or not session.is_ready:
                session = self.rank.sessions[name] = Session(node)
            feed(lambda engine, _now: engine.crew.node_up(name, session, node.offered))

    # The outside: workers

    def reason(self, node: Any) -> ConnectionLostError:  # noqa: ARG002
        return ConnectionLostError("it is not reachable")

    def opening(self, begun: Any, place: int, stream: int | None, node: Any) -> Any:  # noqa: ARG002
        self._is_free("a request is pickled")
        return Opening(begun, encoded(Start(begun, place, stream or 0)))

    def restarting(self, begun: Epoch, _worker: object) -> Encoded:
        return encoded(Start(begun, -1, 0))

    def settle(self, _workers: Sequence[Worker]) -> None:
        self._is_free("the dataset is changed")

    def settled(self) -> None:
        """Nothing is changed here."""

    def open(self, session: Session, _opening: Any, owner: Any, keep_waiting: Callable[[], bool]) -> Worker:
        cluster = self.cluster
        worker = Worker(self, session, owner, keep_waiting)
        if self.judge.members[owner.number].closed:
            # By a thread that this one has overtaken.
            cluster.after(cluster.scenario.seconds, self.check_closed, worker)
        cluster.after(cluster.latency(), self.connect, worker, cluster.now + cluster.scenario.options.connect_timeout)
        return worker

    def check_closed(self, worker: Worker) -> None:
        assert not worker.is_alive or self.is_closed, f"worker {worker.number} was closed, and stays"

    def at_end(self, action: End) -> None:
        latest = END_LIMIT + self.cluster.scenario.seconds + 0.1
        self.cluster.after(latest, self.must_end, action.worker, action.number, self.driver.begun)

    def must_begin(self, epoch: Any) -> None:
        assert epoch is self.driver.begun, "a worker is told of an epoch that is over"

    def must_end(self, number: int, task: int, epoch: Any) -> None:
        """The engine has decided to end a worker."""
        seat = self.driver.seats.get(number)
        is_held = seat is not None and seat.worker.is_alive and self.judge.holds(number, task)
        assert not (is_held and epoch is self.driver.begun and not self.is_closed), f"worker {number} was to be ended"

    def end(self, late: Sequence[tuple[Worker, Task]]) -> None:
        for worker, _task in late:
            is_mute = worker.node.has_mute_sessions_at(self.cluster.now)
            delay = END_LIMIT if is_mute else self.cluster.latency()
            self.cluster.after(delay, self.cluster.die, worker, LATE)

    def close(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.close()

    def say(self, *_told: object) -> None:
        """Nobody reads it."""

    report_wait = say

    # The outside: replies

    allocator = carrier = None

    def check(self, reply: Reply) -> None:
        if reply.kind == FAILED:
            raise ERROR

    def join(self, answers: Sequence[Answer]) -> Answer | None:
        """The batch of its parts: the exception of one, or all samples in their order; some do not fit."""
        results = [answer.result for answer in answers]
        assert all(kind in (BATCH, EXCEPTION) for kind, _result in results), f"{results} is joined"
        batches = {result[0] for _kind, result in results}
        assert len(batches) == 1, f"parts of {batches} are joined"
        at, batch = 0, batches.pop()
        for _kind, (_batch, first, size) in results:
            assert first == at, f"{results} is joined"
            at += size
        assert at == num_samples(batch), f"{results} is joined"
        if self.cluster.random.random() < 0.02:
            return None
        if any(kind == EXCEPTION for kind, _result in results):
            return Answer((EXCEPTION, batch), error=ERROR)
        return Answer((BATCH, batch), size_bytes=self.rank.size(batch))

    def decode(self, reply: Reply) -> Answer:
        kind, result = reply.kind, reply.result
        if self.lengths and kind == LAST:
            stream, position = result
            self.lengths[stream] = min(self.lengths[stream], position)
            return Answer()
        state: Any = result[1] + 1 if self.lengths and kind not in (CANCELLED, FAILED) else None
        if kind == BATCH:
            return Answer((kind, result), size_bytes=self.rank.size(result), timings=(reply.seconds, 0.0), stream=state)
        return Answer((kind, result), error=ERROR, stream=state)

    # Workers

    def connect(self, worker: Worker, deadline: float) -> None:
        """A worker asks its node to let it in."""
        if not worker.is_alive:
            return
        cluster, node, now = self.cluster, worker.node, self.cluster.now
        if not worker.session.is_ready:
            cluster.die(worker, GONE)
        elif node.mute_until > now:
            deadline = math.inf if node.is_building else deadline
            if now < deadline:
                cluster.at(min(deadline, node.mute_until), self.connect, worker, deadline)
            else:
                cluster.die(worker, REFUSED)
        elif node.has("late answers", now) and now < deadline and cluster.random.random() < 0.7:
            delay = cluster.random.random() * cluster.scenario.options.connect_timeout
            cluster.at(min(deadline, now + delay), self.connect, worker, deadline)
        elif now >= deadline:
            cluster.die(worker, REFUSED)
        elif node.has("refused forks", now) and cluster.random.random() < 0.7:
            worker.refusal = "it has no room"
            cluster.die(worker, REFUSED)
        elif node.has("full node", now) or node.used >= node.room:
            if now < deadline and worker.keep_waiting():
                cluster.after(1.0, self.connect, worker, deadline)
            else:
                worker.refusal = "it has no room"
                cluster.die(worker, REFUSED)
        elif node.has("flapping node", now) and cluster.random.random() < 0.5:
            cluster.die(worker, REFUSED)
        else:
            cluster.come(worker)
            if node.has("flapping node", now):
                cluster.after(self.rank.seconds() * cluster.random.random(), self.flap, worker)
            is_cold = cluster.random.random() < cluster.scenario.cold_starts
            opening = cluster.random.random() * (10.0 if is_cold else 0.1) * cluster.scenario.seconds
            cluster.after(opening, self.begin_work, worker)
            worker.owner.worker_ready(worker)

    def begin_work(self, worker: Worker) -> None:
        worker.is_busy = False
        self.work(worker)

    def started(self, worker: Worker, complete: Callable[[Any], None]) -> None:
        """A worker has done the first request of an epoch."""
        if not worker.is_alive:
            return
        if (until := worker.hung_until) > self.cluster.now:
            self.cluster.after(until - self.cluster.now, self.started, worker, complete)
            return
        for kind, error in ("exiting node", EXITED), ("killing node", DIED):
            if worker.node.has(kind, self.cluster.now) and self.cluster.random.random() < 0.7:
                self.cluster.die(worker, error)
                return
        worker.is_busy = False
        if worker.node.has("raising node", self.cluster.now) and self.cluster.random.random() < 0.7:
            worker.has_failed = True
        complete(Reply(FAILED if worker.has_failed else BATCH, None, 0.0))
        if not worker.is_busy:
            self.work(worker)

    def work(self, worker: Worker) -> None:
        """Begin with the next request."""
        cluster = self.cluster
        if worker.is_draining and worker.is_lost:
            return
        if not worker.queue:
            if worker.will_retire and worker.is_alive:
                cluster.die(worker, CLOSED)
            return
        request_id, payload, complete = worker.queue.popleft()
        worker.is_busy = True
        if type(payload) is Start:
            worker.position = payload.position
            is_first = payload.place >= 0
            worker.place = payload.place if is_first else worker.place
            cluster.after(0.0 if is_first else cluster.latency(), self.started, worker, complete)
            return
        batch, first, size = payload
        if request_id in worker.cancelled:
            worker.cancelled.discard(request_id)
            cluster.after(0.0, self.done, worker, complete, Reply(CANCELLED, batch, 0.0))
            return
        kind = FAILED if worker.has_failed else BATCH
        is_part = not self.lengths and size < num_samples(batch)
        result: Any = payload if is_part else batch
        if self.lengths and not worker.has_failed:
            stream = worker.place
            result = stream, worker.position
            if worker.position >= self.lengths[stream] or cluster.has_ended:
                kind = LAST
            else:
                worker.position += 1
        seconds = self.rank.seconds() * (size / num_samples(batch))
        if cluster.random.random() < cluster.noise.slow:
            seconds *= 2.0 + 20.0 * cluster.random.random()
        worker.at = batch, first + int(cluster.random.random() * size)
        # One sample of a batch kills, or raises.
        found = result if self.lengths else batch if first <= batch % num_samples(batch) < first + size else None
        if kind == BATCH and found in cluster.deadly:
            cluster.after(cluster.deadly[found] * seconds, cluster.die, worker, DIED)
            return
        if kind == BATCH and found in cluster.bad:
            kind = EXCEPTION
        cluster.after(seconds, self.done, worker, complete, Reply(kind, result, seconds))

    def flap(self, worker: Worker) -> None:
        if worker.node.has("flapping node", self.cluster.now):
            self.cluster.die(worker, DIED)

    def done(self, worker: Worker, complete: Any, reply: Reply) -> None:
        """A worker has done what it was at."""
        if not worker.is_alive:
            return
        cluster = self.cluster
        if (until := worker.hung_until) > cluster.now:
            cluster.after(until - cluster.now, self.done, worker, complete, reply)
            return
        worker.is_busy = False
        if worker.is_draining and not worker.will_retire:
            worker.is_busy = True  # it takes no more
            cluster.after(cluster.latency(), cluster.die, worker, LOST)
        else:
            self.work(worker)
        if worker.dies_answering:
            if cluster.random.random() < 0.5:  # the answer is on its way
                worker.wire = max(worker.wire, cluster.now + cluster.random.random() * cluster.scenario.seconds)
                cluster.at(worker.wire, complete, reply)
            cluster.die(worker, DIED)
            return
        if reply.kind == BATCH:
            noise, random = cluster.noise, cluster.random.random
            if random() < noise.error:
                reply.kind = EXCEPTION
            if random() < noise.again:
                delay = random() * 3 * cluster.scenario.seconds
                cluster.after(delay, self.answer_again, worker, complete, reply)
            if random() < noise.late:
                worker.wire = max(worker.wire, cluster.now + random() * 4 * cluster.scenario.seconds)
        if worker.wire > cluster.now:
            cluster.at(worker.wire, complete, reply)
        else:
            complete(reply)

    def answer_again(self, worker: Worker, complete: Any, reply: Reply) -> None:
        """The same answer comes again: it must not be taken for another one."""
        (sent,) = complete.args
        if sent.begun is self.driver.begun and not self.is_closed and not self.judge.holds(worker.number, sent.number):
            complete(reply)

    def lose(self, worker: Worker) -> None:
        """A worker's end is known here."""
        worker.is_lost = True
        if self.is_closed:
            return
        error = worker.error
        assert error is not None
        is_told = worker.session.is_ready and not worker.node.has_mute_sessions_at(self.cluster.now)
        if worker.has_come and worker.at is not None and is_told:
            # What it was at when it ended; by chance, nothing is known of that, or it was at none of the samples.
            batch, place = worker.at
            if self.cluster.random.random() >= 0.1:
                place = BETWEEN if self.cluster.random.random() < 0.3 else place
                worker.exited = Exited(worker.number, 0, "", batch, place)
        if is_told and error is EXITED:
            worker.exited = Exited(worker.number, 0, "exited with status 1", *(worker.at or ()))
        worker.owner.worker_lost(worker, error)
        assert worker.number not in self.driver.seats, f"worker {worker.number} is lost, and is kept"

    def drain(self, worker: Worker) -> None:
        """A worker says that it takes no more."""
        if not worker.is_lost:
            worker.retired = worker.will_retire
            worker.owner.worker_draining(worker)

    # The consumer

    def draw(self, source: Any) -> None:
        """The sampler."""
        if source.task is not None:
            return
        if not self.lengths and (self.num_drawn == len(self.payloads) or self.cluster.has_ended):
            self.undelivered.difference_update(self.payloads[self.num_drawn :])
            return
        payload = self.num_drawn if self.lengths else self.payloads[self.num_drawn]
        self.num_drawn += 1
        size = num_samples(payload)
        # A sampler may be shorter than its length.
        is_last = not self.lengths and self.num_drawn + (payload % 5 == 0) >= len(self.payloads)
        source.task = Task(None, payload, 0, size, request=encoded((payload, 0, size)), is_last=is_last)

    def take(self, delivery: Entry) -> None:
        """The consumer gets what comes next."""
        condemned = delivery.condemned
        assert condemned is not None or delivery.answer.result[0] not in (CANCELLED, FAILED), (
            f"task {delivery.number} was to be dropped, or not begun, and is delivered"
        )
        if self.lengths:
            self.take_of_stream(delivery)
            return
        payload = delivery.payload.number
        if condemned is None:
            kind, result = delivery.answer.result
            assert result == payload, f"task {delivery.number} is batch {payload}, and {result} is delivered"
            assert kind != BATCH or payload not in self.cluster.bad, f"batch {payload} is bad, and is delivered"
        assert payload in self.undelivered, f"batch {payload} is delivered twice"
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
            assert turn and turn[0] == stream, f"streams {turn} come next, and a batch of {stream} is delivered"
            turn.append(turn.pop(0))
        if delivery.condemned is not None:
            self.cluster.deadly.pop((stream, self.delivered[stream]), None)
            self.delivered[stream] = self.lengths[stream]
            return
        _kind, result = delivery.answer.result
        assert result == (stream, self.delivered[stream]), f"{result} of stream {stream} is delivered"
        self.delivered[stream] += 1

    def check_complete(self) -> None:
        """Everything is delivered."""
        assert not self.undelivered and self.delivered == self.lengths, (
            f"the pass ends without {sorted(self.undelivered)}; streams: {self.delivered}, not {self.lengths}"
        )
