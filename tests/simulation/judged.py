"""An engine that tells its judge what it is told, and what it decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rpcdataloader.plan.actions import Action, End, PlanOptions
from rpcdataloader.plan.crew import Crew
from rpcdataloader.plan.engine import Engine
from rpcdataloader.plan.table import Entry, Split, Table
from tests.simulation.judge import Judge


def _tell(kind: type, *names: str) -> None:
    """Let the judge be told first of calls of these methods."""

    def told(method: Any, tell: Any) -> Any:
        return lambda self, *args, **options: (tell(self.judge, *args, **options), method(self, *args, **options))[1]

    for name in names:
        setattr(kind, name, told(getattr(kind, name), getattr(Judge, name)))


class JudgedEngine(Engine[str]):
    """An engine with a judge beside it."""

    at_end: Callable[[End], None]  # takes each decision to end a worker

    def __init__(
        self,
        judge: Judge,
        options: PlanOptions,
        homes: Sequence[str],
        others: Sequence[str],
        turn: int,
        split: Split | None = None,
    ) -> None:
        self.judge = judge
        self._ticks = False
        super().__init__(options, homes, others, turn=turn, split=split)
        self.crew = JudgedCrew(judge, options, homes, others, self._out)

    def _begin(self, *before: Any) -> None:
        super()._begin(*before)
        table: Any = self.table
        table.judge = self.judge
        table.__class__ = JudgedTable

    # The consumer

    def deliver(self) -> Entry | None:
        has_deliverable = self.table.has_deliverable
        delivery = super().deliver()
        assert (delivery is not None) == has_deliverable, f"{delivery} is delivered"
        if delivery is not None:
            self.judge.delivered(delivery)
        elif self.judge.deliverable() is not None:
            raise AssertionError(f"task {self.judge.deliverable()} is answered, and is not delivered")
        elif self.table.finished != self.judge.is_finished:
            raise AssertionError(f"the pass ends: {self.table.finished}; {len(self.judge.tasks)} tasks are left")
        return delivery

    def consumer_waits(self, now: float) -> None:
        super().consumer_waits(now)
        self.judge.waiting_since = now if self.judge.waiting_since is None else self.judge.waiting_since

    def due(self, now: float) -> float:
        due = super().due(now)
        if self.judge.waiting_since is not None and not self._ticks:  # the judge does not know this tick's decisions
            self.judge.check_due(due, now)
        return due

    def tick(self, now: float) -> None:
        self._ticks = True
        super().tick(now)
        self._ticks = False
        self.judge.ticked(self.failure, now)
        for action in self._out:
            if type(action) is End:
                self.at_end(action)

    def act(self, now: float) -> list[Action]:
        self.judge.acts()
        actions = super().act(now)
        self.judge.acted(actions, now)
        return actions

    # Answers

    def answered(self, worker: int, number: float, *, answer: Any = None, **told: Any) -> Entry | None:
        expected = self.judge.answered(worker, number, **told)
        task = super().answered(worker, number, answer=answer, **told)
        assert (task is not None) == expected, f"the answer of worker {worker} to task {number} counts: {not expected}"
        return task

    # Workers and nodes

    def worker_failed(self, number: int, error: BaseException) -> None:
        has_failed = self.failure is not None
        ends_pass = self.judge.could_not_begin(number)
        super().worker_failed(number, error)
        assert has_failed or (self.failure is not None) == ends_pass, (
            f"the exception of worker {number}, which cannot begin, ends the pass: {not ends_pass}"
        )


_tell(JudgedEngine, "begin_epoch", "stream_ended", "worker_ready", "worker_at_work", "worker_draining", "worker_lost")
_tell(JudgedEngine, "remove_nodes", "joined", "unfit")


class JudgedCrew(Crew[str]):
    """The crew of a judged engine."""

    def __init__(self, judge: Judge, *args: Any) -> None:
        super().__init__(*args)
        self.judge = judge

    def node_hopeless(self, node: str, error: BaseException) -> None:
        if node in self.roster.pauses:
            self.judge.node_hopeless(node)
        super().node_hopeless(node, error)


_tell(JudgedCrew, "use", "node_up", "node_failed", "open_failed", "add_nodes", "ask_again")


class JudgedTable(Table):
    judge: Judge

    def add_task(self, payload: Any, num_samples: int = 1, is_last: bool = False) -> int | None:
        if not self.judge.wants_input():
            return super().add_task(payload, num_samples, is_last)
        number = super().add_task(payload, num_samples, is_last)
        self.judge.nears_end = is_last
        assert number is not None, f"{len(self.judge.tasks)} tasks are not delivered, and there is no room for another"
        stream = self.judge.added(number, payload, num_samples)
        assert self.tasks[number].stream == stream, f"task {number} is not given to stream {stream}"
        return number

    @property
    def wants_input(self) -> bool:
        wants = super().wants_input
        assert wants == self.judge.wants_input(), f"more tasks than {len(self.judge.tasks)} are wanted: {wants}"
        return wants

    def end_of_input(self) -> None:
        super().end_of_input()
        self.judge.has_input_ended = True
