"""What must hold after every event of a pass: a model of its own, which never asks the engine what is right.

The judge is told each event before the engine is, and predicts what the engine has to answer. It then looks at each
action, and at last whether anything was forgotten.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.plan import actions
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.engine import MOST_UNTOLD, REPORT_AFTER, REPORT_AGAIN
from rpcdataloader.plan.table import Entry

SOONEST, LATEST = 1.0, 30.0  # seconds until a node that had no room is asked again

MAX_RAISED = 3  # first requests that raise in a row, after which a node is no longer used

_TINY = 1e-9
_SHORTEST = 1e-6  # shorter times of tasks count as this


@dataclass(slots=True)
class Task:
    """A task that is not delivered, or a part of one."""

    payload: Any
    stream: int | None
    num_samples: int = 1
    holders: list[int] = field(default_factory=list)  # workers with a copy
    is_answered: bool = False
    is_condemned: bool = False
    size: int = 0
    deaths: int = 0
    batch: int | None = None  # the number of the batch that it is a part of
    parts: list[float] = field(default_factory=list)  # numbers of its parts
    num_cut: int = 0  # samples of these

    @property
    def waits(self) -> bool:
        return not (self.holders or self.is_answered)

    @property
    def has_rest(self) -> bool:
        """Whether it waits, or what is left of it, for one more part."""
        return self.num_cut < self.num_samples if self.parts else self.waits


@dataclass(slots=True)
class Member:
    """A worker that the engine has asked for, and that is not lost."""

    place: int
    node: str
    incarnation: Hashable
    late_at: float  # when others are asked as well, unless it has come
    is_late: bool
    joined: bool = False
    at_work: bool = False
    began: float = math.inf  # when it answered the first request; -inf in later epochs, until it does again
    was_idle: bool = False  # True if it was idle as this epoch began, until it has answered its first request
    draining: bool = False
    sent_away: bool = False
    closed: bool = False
    is_measured: bool = False  # True if it has told the time of a task of this epoch
    has_failed: bool = False  # in its last task of this epoch
    rests: tuple[float, float] = (0.0, 0.0)  # earliest and latest time until which it then gets no other
    is_over: bool = False  # True if it drains since an earlier epoch, and has no part in this one
    # Tasks in the order in which they were sent, and the share of a batch that each is.
    in_flight: dict[float, float] = field(default_factory=dict)
    since: float = 0.0  # when the first of them began
    ended: float | None = None  # the task for which its end was asked for

    @property
    def timed_from(self) -> float:
        """When its time for tasks begins."""
        return math.inf if self.was_idle else self.began

    @property
    def is_usable(self) -> bool:
        return self.joined and not (self.draining or self.sent_away or self.closed)


@dataclass(slots=True)
class Place:
    """Where a worker should be."""

    home: str
    closed: bool = False
    is_full: bool = False  # closed until its home is asked again
    refused: set[str] = field(default_factory=set)
    worker: int = 0  # the last one that was opened here; 0 when that is lost


class Judge:
    """Watch one engine."""

    def __init__(self, options: actions.PlanOptions, homes: list[str], others: list[str], turn: int) -> None:
        self.options = options
        self.is_iterable = options.is_iterable
        self.places = [Place(home) for home in homes]
        self.known = list(dict.fromkeys([*homes, *others]))
        self.has_begun = False  # a worker has answered its first request
        self.has_raised = False  # user code, before any of them has
        self.num_raised: dict[str, int] = {}  # on each node since one has
        self.num_killed: dict[str, int] = {}  # before they began
        self.members: dict[int, Member] = {}
        self.num_opened = 0
        self.num_deaths = 0
        self.max_deaths = options.max_retries * len(homes)
        self.num_offered = options.num_offered
        # Nodes
        self.up: set[str] = set()
        self.hopeless: set[str] = set()
        self.seeking: dict[str, float] = {}  # with the pause before the try
        self.tried: set[str] = set()  # sought, and failed once
        self.seek_late_at: dict[str, float] = {}  # when the present try has taken too long
        self.joining: set[str] = set()
        self.full: dict[str, float] = {}  # nodes that had no room; since when
        self.short: set[str] = set()  # nodes that have refused a worker since one has come
        self.asked_again: set[str] = set()  # at this moment
        self.is_larger = False  # True if places were opened since the last actions
        self.silent: set[str] = set()  # where a worker has not come in time, until one comes
        self.incarnations: dict[str, Hashable] = {}
        self.told: set[tuple[str, int | None]] = set()  # nodes whose loss the user knows of
        self.expects_more = False
        self.is_changed = True
        self.stuck_since: float | None = 0.0
        self.asked_since: float | None = None
        self.num_wanted = len(homes)
        self.most: int | None = None  # workers that the loop wants
        self.estimate = 0.0
        self.splits, self.has_measured = True, False
        self.begin_table(turn)

    def begin_table(self, turn: int) -> None:
        """Nothing is added yet."""
        options = self.options
        self.tasks: dict[int, Task] = {}
        self.parts: dict[float, Task] = {}
        self.num_answers = 0
        self.gathers = not self.is_iterable  # until as many workers as are wanted have been there
        for member in self.members.values():
            member.is_measured = member.has_failed = False
        self.ramp_end = 0
        self.nears_end = False
        self.waiting_since: float | None = None  # the consumer
        self.reported_at = -math.inf
        self.untold_seconds = REPORT_AFTER
        self.told_seconds: float | None = None  # of the present wait
        self.num_added = 0
        self.answered_order: deque[int] = deque()
        self.has_input_ended = False
        self.answered_bytes = 0
        self.window = self.wanted_window = max(1, self.num_wanted) * options.prefetch_factor
        self.num_seen = self.num_measured = 0
        self.max_seen = self.max_seconds = 0.0
        # Least and most seconds: of tasks, and of answers as seen from here but for the first of each worker.
        self.task_range: tuple[float, float] | None = None
        self.seen_range: tuple[float, float] | None = None
        self.to_cancel: set[tuple[int, float]] = set()  # copies that nobody waits for any more
        self.turn: deque[int] = deque()
        self.owners: dict[int, int] = {}
        if self.is_iterable:
            self.turn.extend(range(options.num_workers))
            self.turn.rotate(-turn)
        self.num_of_stream = [0] * options.num_workers

    # The input and the consumer

    def wants_input(self) -> bool:
        if self.is_iterable:
            return len(self.tasks) < len(self.turn) * self.options.prefetch_factor
        return not self.has_input_ended and len(self.tasks) < self.window

    def added(self, number: int, payload: Any, num_samples: int) -> int | None:
        """A task was added; returns its stream."""
        assert number == self.num_added, f"task {number} was added as number {self.num_added}"
        stream = None
        if self.is_iterable:
            prefetch = self.options.prefetch_factor
            candidates = (s for s in self.turn if self.options.in_order or self.num_of_stream[s] < prefetch)
            stream = next(candidates)
            self.turn.remove(stream)
            self.turn.append(stream)
            self.num_of_stream[stream] += 1
        self.num_added += 1
        self.tasks[number] = Task(payload, stream, num_samples)
        return stream

    def deliverable(self) -> int | None:
        """The task that has to be delivered now."""
        if not self.options.in_order:
            return self.answered_order[0] if self.answered_order else None
        for number, task in self.tasks.items():
            return number if task.is_answered else None
        return None

    def delivered(self, delivery: Entry) -> None:
        number, payload, stream = delivery.number, delivery.payload, delivery.stream
        condemned = delivery.condemned
        assert number == self.deliverable(), f"task {number} is delivered, and {self.deliverable()} should be"
        self.waiting_since, self.reported_at = None, -math.inf
        if self.told_seconds is not None:  # as long as that, and longer, is ordinary
            self.untold_seconds, self.told_seconds = min(2 * self.told_seconds, MOST_UNTOLD), None
        task = self.tasks.pop(int(number))
        if not self.options.in_order:
            self.answered_order.popleft()
        assert (condemned is not None) == task.is_condemned, f"task {number} is delivered as {condemned}"
        assert (payload, stream) == (task.payload, task.stream), f"task {number} is {payload} of stream {stream}"
        if condemned is not None:
            assert f"has ended {task.deaths} workers" in condemned, f"task {number} is delivered as {condemned}"
        self.answered_bytes -= task.size
        self.window = self.wanted_window
        if task.stream is not None:
            self.num_of_stream[task.stream] -= 1

    @property
    def is_finished(self) -> bool:
        return not self.tasks and (not self.turn if self.is_iterable else self.has_input_ended)

    def begin_epoch(self, now: float, turn: int = 0) -> None:
        self.begin_table(turn)
        has_other_homes = not self.is_iterable and any(place.home not in self.hopeless for place in self.places)
        for place in self.places:
            place.closed = has_other_homes and place.home in self.hopeless
            place.is_full = False
            place.refused.clear()
        self.full.clear()
        self.short.clear()
        for number, member in self.members.items():
            # It may hang in no task of the last epoch, so that what comes before the first task has no limit.
            member.was_idle = member.at_work and not member.in_flight
            member.at_work = False
            member.began = math.inf if member.began == math.inf else -math.inf
            member.joined = member.joined and not member.draining
            member.is_over = member.draining
            member.in_flight.clear()
            member.ended = None
            if member.joined and not member.sent_away:
                self._join(number, member)
        self._note_gathered()
        self.is_changed = True

    # Answers

    def find(self, number: float) -> Task | None:
        """A batch that is not delivered, or a part of one."""
        return self.parts.get(number) or self.tasks.get(int(number) if number == int(number) else -1)

    def holds(self, worker: int, number: float) -> bool:
        member = self.members.get(worker)
        return member is not None and number in member.in_flight

    def answered(
        self, worker: int, number: float, size_bytes: int, task_seconds: float | None, now: float, has_failed: bool
    ) -> bool:
        """A worker answers; returns whether the engine has to take it."""
        self.num_deaths = 0
        if not self.holds(worker, number):
            return False
        member, share = self.members[worker], self.members[worker].in_flight[number]
        member.has_failed = has_failed
        least, most = self.seen_range or self.task_range or (1.0, 1.0)
        member.rests = member.since + share * least, member.since + share * max(most, _SHORTEST)
        self._drop_copy(worker, number, None if has_failed else task_seconds, now)
        task = self.find(number)
        if task is None or task.is_answered:
            return False
        self.to_cancel.update((other, number) for other in task.holders)
        if task.batch is not None:
            task.is_answered = True
            return True
        self._note_batch(int(number), task, size_bytes)
        return True

    def joined(self, number: int, *, size_bytes: int, answer: Any) -> None:
        """The parts of a batch were joined."""
        task = self.tasks[number]
        assert task.num_cut == task.num_samples, f"task {number} is joined, and has {task.num_cut} samples"
        assert all(self.parts[part].is_answered for part in task.parts), f"task {number} is joined too early"
        self._drop_parts(task)
        self._note_batch(number, task, size_bytes)

    def unfit(self) -> None:
        """The parts of a batch do not fit together."""
        self.splits = False
        for task in self.tasks.values():
            self._drop_parts(task)

    def _drop_parts(self, task: Task) -> None:
        for number in task.parts:
            part = self.parts.pop(number)
            if not part.is_answered:
                self.to_cancel.update((holder, number) for holder in part.holders)
        task.parts, task.num_cut = [], 0

    def _note_batch(self, number: int, task: Task, size_bytes: int) -> None:
        self.estimate = max(float(size_bytes), self.estimate + (size_bytes - self.estimate) / 16)
        self._note_answer(number, task, size_bytes)

    def stream_ended(self, worker: int, number: int, now: float) -> None:
        """A worker answers that its stream has ended."""
        self.num_deaths = 0
        if self.holds(worker, number):
            stream = self.tasks[number].stream
            assert stream is not None
            self._drop_from(stream, number)

    # Workers

    def worker_ready(self, number: int, now: float) -> None:
        member = self.members[number]
        if member.closed:
            return
        if member.node not in self.full and not self.is_deadly(member.node):
            self.short.discard(member.node)
        member.joined = True
        self._note_gathered()
        member.late_at = math.inf
        self.silent.discard(member.node)
        place = self.places[member.place]
        place.worker = number
        for other in self.members.values():
            if other.node == member.node:  # which answers
                other.is_late = False
                if not other.joined and other.late_at < math.inf:
                    other.late_at = now + self.options.connect_timeout
            if (
                other.place == member.place
                and other.node != member.node
                and (self.is_iterable or other.node != place.home)  # the worker at home still comes
            ):
                other.sent_away = True
                other.draining = other.draining or other.joined
        self._join(number, member)
        self.is_changed = True

    def _join(self, number: int, member: Member) -> None:
        if self.is_iterable:
            assert member.place not in self.owners, f"two workers take stream {member.place}"
            self.owners[member.place] = number

    def worker_at_work(self, number: int, now: float) -> None:
        member = self.members[number]
        member.began, member.was_idle = now, False
        member.at_work = self.has_begun = True
        self.num_raised[member.node] = self.num_killed[member.node] = 0
        if member.node not in self.full:
            self.short.discard(member.node)

    def could_not_begin(self, number: int) -> bool:
        """User code raises in a worker's first request; returns whether that ends the pass."""
        member = self.members.get(number)
        if member is None:
            return False
        if member.joined:
            self._leave(number, member)
            member.joined = False
        if member.sent_away:
            return False
        member.sent_away = True
        self.is_changed = True
        self.has_raised = self.has_raised or not self.has_begun
        if self.has_begun:
            self._note_raised(member.node)
        return not self.has_begun

    def _note_raised(self, node: str) -> None:
        self.num_raised[node] = self.num_raised.get(node, 0) + 1
        if self.num_raised[node] >= MAX_RAISED and node not in self.hopeless:
            self.node_hopeless(node)

    def worker_draining(self, number: int) -> None:
        member = self.members[number]
        member.draining = member.draining or member.joined

    def open_failed(self, number: int, error: BaseException) -> None:
        member = self.members.pop(number)
        if not member.closed:
            self.up.discard(member.node)
        self._vacate(number, member)

    def worker_lost(self, number: int, loss: Loss) -> None:
        node_is_up, came, was_refused = loss.node_is_up, loss.came, loss.was_refused
        member = self.members.pop(number)
        place = self.places[member.place]
        died = node_is_up and came and not member.draining
        was_in_table = member.joined and (not self.is_iterable or self.owners.get(member.place) == number)
        running = next(iter(member.in_flight), -1)
        if loss.task in member.in_flight and not self.is_iterable:
            running = loss.task
        task = self.find(running)
        is_blamed = died and member.joined and member.at_work and task is not None and not task.is_answered
        if was_in_table:
            self._leave(number, member)
        if is_blamed:
            self._blame(running)
        self._vacate(number, member)
        if was_refused:
            self.silent.discard(member.node)
        if was_refused and not member.sent_away:
            self._had_no_room(member)
        is_current = self.incarnations.get(member.node) == member.incarnation
        if is_current and (not node_is_up or (not came and not was_refused)):
            self.up.discard(member.node)
        if self.is_iterable and member.place not in self.turn:
            place.closed = True
        elif member.sent_away or (loss.has_retired and node_is_up):
            pass
        elif not is_blamed and (died or (not came and node_is_up and not was_refused)):
            self.num_deaths += 1
            is_early = died and member.began == math.inf
            if is_early and not loss.by_itself:
                self.num_killed[member.node] = self.num_killed.get(member.node, 0) + 1
            if died and self.has_begun and not loss.by_itself and self.is_deadly(member.node):
                self._had_no_room(member)
            elif self.are_dying:
                place.closed = True
                place.is_full = False
                place.refused.clear()
            if is_early and loss.by_itself and self.has_begun:
                self._note_raised(member.node)

    @property
    def are_dying(self) -> bool:
        """Whether so many workers have died since the last answer that others wait, or are not asked for."""
        return self.num_deaths > self.max_deaths

    def is_deadly(self, node: str) -> bool:
        """Whether that is so, or many on a node have died in a row before they began."""
        return self.are_dying or self.num_killed.get(node, 0) >= MAX_RAISED

    def _had_no_room(self, lost: Member) -> None:
        """The node of a lost worker is asked for another one some time later."""
        place = self.places[lost.place]
        place.refused.add(lost.node)
        self.full.setdefault(lost.node, math.inf)
        self.short.add(lost.node)
        others = [other for other in self.members.values() if other.place == lost.place and not other.sent_away]
        if not self.is_iterable and not others and lost.node == place.home:
            place.closed = place.is_full = True

    def _leave(self, number: int, member: Member) -> None:
        if self.is_iterable:
            del self.owners[member.place]
        for lost in member.in_flight:
            if (task := self.find(lost)) is not None:
                task.holders.remove(number)
        member.in_flight.clear()

    def _blame(self, number: float) -> None:
        task = self.find(number)
        assert task is not None
        task.deaths += 1
        if task.batch is not None and not task.holders:  # the batch is made again
            number, deaths = task.batch, task.deaths
            task = self.tasks[number]
            task.deaths += deaths
            self._drop_parts(task)
        if task.deaths < self.options.max_retries or task.holders:
            return
        task.is_condemned = True
        if task.stream is not None:
            self._drop_from(task.stream, int(number) + 1)
        self._note_answer(int(number), task, 0)

    def _vacate(self, number: int, member: Member) -> None:
        place = self.places[member.place]
        if place.worker == number:  # another one may have stood in for it
            others = (n for n, other in self.members.items() if other.place == member.place and not other.sent_away)
            place.worker = next(others, 0)
        self.is_changed = True

    # Nodes

    def node_up(self, node: str, incarnation: Hashable, num_offered: int = 0) -> None:
        self.seeking.pop(node, None)
        if node in self.hopeless or not (node in self.known or node in self.joining):
            return
        self.is_changed = True
        self.tried.discard(node)
        if node in self.joining:
            self.joining.discard(node)
            self._add_places(node, num_offered)
        if self.incarnations.get(node) != incarnation:
            self.silent.discard(node)
        self.incarnations[node] = incarnation
        self.up.add(node)
        for place in self.places:
            place.refused.discard(node)

    def _add_places(self, node: str, num_offered: int) -> None:
        options = self.options
        numbers = range(self.num_offered, self.num_offered + num_offered)
        self.num_offered += num_offered
        share = len([number for number in numbers if number % options.world_size == options.rank])
        if options.max_workers:
            share = min(share, max(0, options.max_workers - sum(not place.closed for place in self.places)))
        self.known.append(node)
        self.hopeless.discard(node)
        if not self.is_iterable:
            self.places += [Place(node) for _ in range(share)]
        self._resize()

    def node_failed(self, node: str, error: BaseException, *, is_foreign: bool = False) -> None:
        pause = self.seeking.pop(node, None)
        if pause is None:
            return
        self.is_changed = True
        if is_foreign and node in self.joining:
            self.node_hopeless(node)
            return
        self.tried.add(node)
        self.seeking[node] = -min(2 * pause, 5.0)  # to be sought again at once, after so long

    def node_hopeless(self, node: str) -> None:
        self.seeking.pop(node, None)
        self.joining.discard(node)
        self.tried.discard(node)
        self.up.discard(node)
        self.hopeless.add(node)
        self.is_changed = True

    def add_nodes(self, nodes: list[str]) -> None:
        for node in nodes:
            if node in self.known:
                self.hopeless.discard(node)
                for number, place in enumerate(self.places):
                    if place.home == node and (not self.is_iterable or number in self.turn):
                        place.closed = place.is_full = False
            else:
                self.hopeless.discard(node)
                self.joining.add(node)
        self._resize()
        self.is_changed = True

    def remove_nodes(self, nodes: list[str]) -> None:
        for node in nodes:
            self.joining.discard(node)
            self.seeking.pop(node, None)
            self.tried.discard(node)
            if node not in self.known:
                continue
            self.up.discard(node)
            self.hopeless.add(node)
            if not self.is_iterable and any(place.home != node and not place.closed for place in self.places):
                for place in self.places:
                    place.closed = place.closed or place.home == node
        for number, member in self.members.items():
            if member.node in nodes:
                member.sent_away = True
                if self.is_iterable and member.joined:
                    self._leave(number, member)
                    member.joined = False
                member.draining = member.draining or member.joined
        self._resize()
        self.is_changed = True

    def use(self, most: int | None) -> None:
        """The loop wants no more workers than these: those of the first places."""
        self.most = most
        if most is not None and most > len(self._used()) and not self.is_iterable:
            for home in {place.home for place in self.places if place.is_full}:  # it may have room by now
                self._reopen(home)
        self._resize()
        self.is_changed = True

    def ask_again(self, node: str) -> None:
        """A node that had no room is asked for the workers that it has refused."""
        assert node in self.full, f"{node} is asked again, and has refused nothing"
        self.asked_again.add(node)
        self._reopen(node)
        self.is_larger = self.is_changed = True

    def _reopen(self, node: str) -> None:
        for place in self.places:
            place.refused.discard(node)
            if place.is_full and place.home == node and node not in self.hopeless:
                place.closed = place.is_full = False

    def _used(self) -> list[int]:
        return [number for number, place in enumerate(self.places) if not place.closed][: self.most]

    def _send_superfluous_away(self) -> None:
        used = self._used()
        for member in self.members.values():
            if not (self.places[member.place].closed or member.place in used or member.sent_away):
                member.sent_away = True
                member.draining = member.draining or member.joined

    def _resize(self) -> None:
        self.num_wanted = len(self._used())
        if not self.is_iterable:
            self.wanted_window = max(1, self.num_wanted) * self.options.prefetch_factor
            self.window = max(self.window, self.wanted_window)
            self._note_gathered()

    # What is to be done

    def acts(self) -> None:
        """The engine is about to decide what is to be done."""
        if self.is_larger:
            self.is_larger = False
            self._resize()

    def acted(self, actions: list[actions.Action], now: float) -> None:
        """Look at what the engine wants done, and at what it has forgotten."""
        if self.is_changed and self.most is not None:
            self._send_superfluous_away()
        self.full = {node: min(since, now) for node, since in self.full.items()}
        for action in actions:
            getattr(self, f"_see_{type(action).__name__.lower()}")(action, now)
        assert not self.to_cancel, f"copies that nobody waits for are not cancelled: {self.to_cancel}"
        self._check_sending(now)
        if self.is_changed:
            self.is_changed = False
            self._check_places()
            self._check_nodes()
            self._check_sent_away()
            self._check_stuck(now)

    def _see_reportwait(self, action: actions.ReportWait, now: float) -> None:
        """The consumer is told what it has waited for, and that is the oldest task which is not answered."""
        number, task = next((number, task) for number, task in self.tasks.items() if not task.is_answered)
        assert self.waiting_since is not None, f"{action}: nobody waits"
        assert abs(now - self.waiting_since - action.seconds) <= _TINY, (
            f"{action}: the wait began at {self.waiting_since}"
        )
        assert action.seconds >= self.untold_seconds - _TINY, f"{action}: it is too early"
        assert now >= self.reported_at + REPORT_AGAIN - _TINY, f"{action}: it was told at {self.reported_at}"
        task = next((part for part in map(self.parts.get, task.parts) if part and not part.is_answered), task)
        assert action.payload is task.payload, f"{action}: task {number} is waited for"
        assert action.worker == (task.holders[0] if task.holders else None), f"{action}: it is at {task.holders}"
        self.reported_at = now
        self.told_seconds = action.seconds

    def _check_report(self, due: float) -> None:
        """The engine asks to be asked again in time to tell the user of a long wait."""
        if self.waiting_since is None or not self.tasks:
            return
        deadline = max(self.waiting_since + self.untold_seconds, self.reported_at + REPORT_AGAIN)
        assert due <= deadline + _TINY, f"the consumer is to be told, and the engine waits until {due}"

    def _see_load(self, action: actions.Load, now: float) -> None:
        worker, number, payload = action
        member = self.members.get(worker)
        self._note_ramp(number)
        lowest = self._lowest
        if self.find(number) is None and (batch := self.tasks.get(int(number))) is not None:
            assert lowest == int(number), f"{action}: task {lowest} waits for longer"
            self._see_cut(action, batch)
            lowest = number
        task = self.find(number)
        assert member is not None and member.joined, f"{action}: the worker is gone, or not there yet"
        assert task is not None and not task.is_answered, f"{action}: the task is answered, or delivered"
        assert payload is task.payload, f"{action}: the task is {task.payload}"
        if self.is_iterable:
            assert task.stream == member.place and not member.closed, f"{action}: it belongs to stream {task.stream}"
        else:
            assert member.is_usable, f"{action}: the worker is to take no more"
        assert number not in member.in_flight, f"{action}: the worker has it already"
        if task.holders:
            self._see_backup(action, task, now)
        else:
            self._see_first(action, task, member, lowest, now)
        if not member.in_flight:
            member.since = now
        whole = task if task.batch is None else self.tasks[task.batch]
        others = [number for number in whole.parts if worker in self.parts[number].holders]
        assert task.holders or not others, f"{action}: the worker has {others}, and others may come for it"
        member.in_flight[number] = task.num_samples / whole.num_samples
        task.holders.append(worker)

    def _note_gathered(self) -> None:
        """Workers get second tasks once as many as are wanted have been there together."""
        num_joined = sum(member.joined and not member.is_over for member in self.members.values())
        self.gathers &= num_joined < self._num_usual

    def _note_ramp(self, number: float) -> None:
        """Batches are made in parts from when nothing is under way until there were so many."""
        if not self._num_copies:
            self.ramp_end = int(number) + 3 * self._num_usual

    @property
    def _num_usual(self) -> int:
        """The workers that the window is for."""
        return self.wanted_window // self.options.prefetch_factor

    def _see_cut(self, action: actions.Load, batch: Task) -> None:
        """A batch is made in parts: one more of them."""
        number, part = action.number, action.payload
        first, size = part.position - batch.payload.position, part.num_samples
        assert self.splits and not self.is_iterable, f"{action}: parts of a batch did not fit together"
        assert part.whole is batch.payload, f"{action}: it is of batch {part.whole}"
        assert first == batch.num_cut, f"{action}: it is not the part from {batch.num_cut} on"
        assert 0 < size < batch.num_samples >= first + size, f"{action}: it has too many samples"
        assert not (batch.deaths or batch.holders or batch.is_answered), f"{action}: it is to be a whole"
        if not batch.parts:
            ahead = sum(bool(task.holders or task.parts or task.is_answered) for task in self.tasks.values())
            num_ready = sum(task.is_answered for task in self.tasks.values())
            is_end = self.nears_end and max(len(self.tasks) - ahead, num_ready) < self._num_usual
            assert is_end or ahead < self._num_usual, f"{action}: {ahead} batches are ready or under way"
            assert is_end or int(number) < self.ramp_end, f"{action}: that is the steady state"
            needed = self.answered_bytes + (self._num_copies + 2) * self.estimate
            limit = self.options.max_in_flight_bytes
            assert needed <= limit, f"{action}: parts and batch are too much for {limit} bytes"
        self.parts[number] = Task(part, None, size, batch=int(number))
        batch.parts.append(number)
        batch.num_cut += size

    def _see_backup(self, action: actions.Load, task: Task, now: float) -> None:
        assert not self.is_iterable and len(task.holders) <= 1, f"{action}: workers {task.holders} have a copy already"
        assert not task.deaths, f"{action}: a backup task of a task that has killed {task.deaths} workers"
        assert not self._has_backup, f"{action}: another task has a backup task"
        first = self.members[task.holders[0]]
        assert now - first.since >= 1.0 - _TINY, f"{action}: a backup task after {now - first.since} s"
        assert self.num_seen, f"{action}: a backup task before anything was answered"
        awaited = self._awaited()
        assert awaited is task, f"{action}: a backup task, though the consumer waits for another one, or need not wait"
        assert not awaited.deaths, f"{action}: a backup task, while a deadly task is waited for"
        is_idle = self.options.in_order or not self.members[action.worker].in_flight
        assert is_idle, f"{action}: a backup task, though another answer of its worker would do"

    def _awaited(self) -> Task | None:
        """The task that the consumer waits for, if it is under way."""
        if self.options.in_order:
            task = self._piece(next(iter(self.tasks.values()), None))
            return None if task is None or task.is_answered or not task.holders else task
        lowest = self._lowest
        if self.answered_order or self.wants_input() or (lowest is not None and self._may_send(lowest)):
            return None  # others come
        task = self._piece(next((task for task in self.tasks.values() if task.holders or task.parts), None))
        return task if task is not None and task.holders else None

    def _piece(self, task: Task | None) -> Task | None:
        """The part of a batch that is waited for, if it is in parts and has one."""
        parts = () if task is None else (self.parts[number] for number in task.parts)
        return next((part for part in parts if not part.is_answered), task)

    def _see_first(self, action: actions.Load, task: Task, member: Member, lowest: float | None, now: float) -> None:
        number = action.number
        assert len(member.in_flight) < self.options.prefetch_factor or self.is_iterable, f"{action}: the worker is full"
        assert self._may_send(number), f"{action}: it is too much for {self.options.max_in_flight_bytes} bytes"
        assert self.is_iterable or lowest == number, f"{action}: task {lowest} waits for longer"
        is_second = member.in_flight and not member.is_measured
        assert not (self.gathers and is_second), f"{action}: it is not the worker's first, and others have none yet"
        rests = not self.is_iterable and member.has_failed and now < member.rests[0] - _TINY
        assert not (rests and self._is_another_at_work()), f"{action}: it has failed at once, and others are at work"

    def _see_cancel(self, action: actions.Cancel, now: float) -> None:
        assert self.holds(action.worker, action.number), f"{action}: the worker does not have it"
        assert (action.worker, action.number) in self.to_cancel, f"{action}: it is waited for, or was cancelled before"
        self.to_cancel.discard((action.worker, action.number))

    def _see_open(self, action: actions.Open, now: float) -> None:
        number, place_number, node = action.worker, action.place, action.node
        self.num_opened += 1
        assert number == self.num_opened, f"{action}: its number was used before"
        assert node in self.up and node not in self.hopeless, f"{action}: the node is not there"
        place = self.places[place_number]
        mute = self._mute()
        assert place_number in self._used(), f"{action}: the place is closed, or not wanted"
        assert node not in place.refused, f"{action}: the node has refused it"
        assert not self._is_at(place_number, node), f"{action}: the place has a worker there"
        is_home = not self.is_iterable and node == place.home
        if not is_home:
            has_others = place.worker or self.up - mute - place.refused
            assert node not in mute or not has_others, f"{action}: the node does not answer"
            assert not self._is_filled(place_number, or_leaving=False), (
                f"{action}: worker {place.worker} is there already"
            )
        if node != place.home:
            assert place.home not in self.up - mute - place.refused, f"{action}: its home is there"
            assert self.is_iterable or self._is_deserted(), f"{action}: other homes are there"
        place.worker = number
        late_at = now + self.options.connect_timeout
        self.members[number] = Member(place_number, node, self.incarnations.get(node), late_at, node in mute)

    def _see_close(self, action: actions.Close, now: float) -> None:
        member = self.members.get(action.worker)
        assert member is not None and not member.closed, f"{action}: it is gone"
        assert member.sent_away or member.is_over, f"{action}: it is needed"
        assert not member.in_flight or self.is_iterable, f"{action}: it has not answered {list(member.in_flight)}"
        member.closed = True

    def _see_end(self, action: actions.End, now: float) -> None:
        member = self.members.get(action.worker)
        limit = self.options.task_timeout
        assert member is not None and limit is not None, f"{action}: it is gone, or there is no limit"
        assert action.number == next(iter(member.in_flight), None), f"{action}: it is at another one"
        taken = now - max(member.since, member.timed_from)
        assert taken >= limit - _TINY, f"{action}: after {taken} s of {limit} s"
        assert member.ended != action.number, f"{action}: it was ended already"
        member.ended = action.number

    def _see_restart(self, action: actions.Restart, now: float) -> None:
        assert action.worker in self.members, f"{action}: it is gone"

    def _see_seek(self, action: actions.Seek, now: float) -> None:
        node, delay = action.node, action.delay
        assert node not in self.hopeless, f"{action}: the node is not to be used"
        assert self.seeking.get(node, -0.1) == -delay, f"{action}: that is too early, or too late"
        self.seeking[node] = delay
        self.seek_late_at[node] = now + delay + self.options.connect_timeout

    def _see_say(self, action: actions.Say, now: float) -> None:
        assert action.text.startswith(self.options.label), f"{action}: whose is it?"

    # What was forgotten

    def _check_sending(self, now: float) -> None:
        if self.is_iterable:
            self._check_streams()
            return
        usable = {number: member for number, member in self.members.items() if member.is_usable}
        roomy = [number for number, member in usable.items() if len(member.in_flight) < self.options.prefetch_factor]
        number = self._lowest if roomy else None
        if number is not None and self._may_send(number) and not self._may_hold(number, roomy, now):
            is_any_at_work = any(member.in_flight for member in self.members.values())
            assert self.num_measured and is_any_at_work, f"task {number} waits, and {roomy[:9]} have room"
            assert self._may_keep(now), f"task {number} is kept, {roomy[:9]} have room, others are overdue"
        idle = {number for number in roomy if not usable[number].in_flight}
        if idle and self.num_seen >= 8 and not self._has_backup:
            self._check_backup(idle, now)

    def _is_another_at_work(self) -> bool:
        """Whether a worker is at work that has not failed in its last task."""
        return any(member.in_flight and not member.has_failed for member in self.members.values())

    def _may_hold(self, number: float, roomy: list[int], now: float) -> bool:
        """Whether a task may wait though workers have room.

        For the first answer, as they have parts of it, or as their first task runs while others are yet to come. Or as
        they have failed sooner than they could have finished.
        """
        if self.gathers:
            roomy = [each for each in roomy if self.members[each].is_measured or not self.members[each].in_flight]
            if not roomy:
                return True
        if self._is_another_at_work():
            members = ((each, self.members[each]) for each in roomy)
            roomy = [each for each, member in members if not member.has_failed or now > member.rests[1] + _TINY]
            if not roomy:
                return True
        batch = self.tasks[int(number)]
        if not batch.parts:
            is_unknown = not (self.num_answers or self.has_measured) and any(
                part.holders for part in self.parts.values()
            )
            return is_unknown and all(self.members[each].in_flight for each in roomy)
        busy = {worker for part in batch.parts for worker in self.parts[part].holders}
        return bool(batch.parts) and busy.issuperset(roomy)

    def _may_keep(self, now: float) -> bool:
        """Whether a task may be kept for a worker that has no room yet: one that cannot be overdue."""
        latest = 4.0 * max(self.max_seconds, _SHORTEST) + _TINY
        return any(
            member.is_usable and len(member.in_flight) >= self.options.prefetch_factor and now < member.since + latest
            for member in self.members.values()
        )

    def _check_backup(self, idle: set[int], now: float) -> None:
        task = self._awaited()
        if task is None or len(task.holders) != 1 or task.deaths:
            return
        (holder,) = task.holders
        late = max(1.0, 5 * self.max_seen)
        if idle - {holder}:
            assert now <= self.members[holder].since + late + _TINY, f"{task.payload} is late, and has no backup task"

    def _check_streams(self) -> None:
        for number, task in self.tasks.items():
            owner = self.members.get(self.owners.get(task.stream or 0, 0)) if task.waits else None
            if owner is not None and not owner.closed and (owner.is_usable or owner.draining):
                assert not self._may_send(number), f"task {number} waits, and {owner} is there"
                return

    def _check_places(self) -> None:
        is_deserted, mute = self._is_deserted(), self._mute()
        for number in self._used():
            place = self.places[number]
            member = self.members.get(place.worker)
            is_filled = self._is_filled(number)
            there = self.up - place.refused
            if place.home in there - mute:
                is_home = self.is_iterable or self._is_at(number, place.home)
                is_home = is_home or (member is not None and member.node == place.home)
                assert is_filled and is_home, f"place {number} is empty, and nothing is opened at home, {place.home}"
                continue
            if place.home in there:
                assert self.is_iterable or self._is_at(number, place.home), f"{place.home} is not asked again"
            if not is_filled and (self.is_iterable or is_deserted):
                may_wait = not there or (not there - mute and member is not None)
                assert may_wait, (
                    f"place {number} is empty, and nothing is opened at {sorted(there)}; mute: {sorted(mute)}"
                )

    def _check_nodes(self) -> None:
        wanted = {self.places[number].home for number in self._used()}
        for node in wanted | self.joining:
            assert node in self.up or node in self.hopeless or node in self.seeking, f"{node} is wanted, and not sought"
        assert not any(pause < 0 for pause in self.seeking.values()), f"a node is not looked for again: {self.seeking}"
        if self._is_deserted():
            others = [node for node in self.known if node not in wanted and node not in self.hopeless]
            asked = [node for node in others if node in self.up or (node in self.seeking and node not in self.tried)]
            asked = [node for node in asked if node not in self._mute()]
            if len(asked) < len(self._used()):
                for node in others:
                    assert node in self.up or node in self.seeking, f"{node} could help, and is not sought: {asked} are"

    def _check_sent_away(self) -> None:
        for number, member in self.members.items():
            is_at_work = member.joined and (member.in_flight or not member.at_work)
            if (member.sent_away or member.is_over) and not is_at_work:
                assert member.closed, f"worker {number} leaves, has nothing to do, and is not closed"

    def _check_stuck(self, now: float) -> None:
        """Look whether no worker is left that can go on, or, of streams, one is missing."""
        sure = {
            number
            for number, each in self.members.items()
            if self._has_come(each) or each.sent_away or each.node not in self.short
        }
        is_stuck = not sure
        if self.is_iterable:
            there = {self.members[number].place for number in sure if not self.members[number].sent_away}
            there |= {place for place, other in enumerate(self.places) if other.worker in sure}
            is_stuck = any(stream not in there for stream in self.turn)
        if not is_stuck:
            self.stuck_since = self.asked_since = None
        elif self.stuck_since is None:
            self.stuck_since = now

    def _has_come(self, member: Member) -> bool:
        return member.joined and (member.began < math.inf or not self.is_deadly(member.node))

    def check_due(self, due: float, now: float) -> None:
        """The consumer waits until then."""
        limit = math.inf if self.options.task_timeout is None else self.options.task_timeout + _TINY
        for number, member in self.members.items():
            running = next(iter(member.in_flight), None)
            in_time = running is None or member.ended == running or due <= max(member.since, member.timed_from) + limit
            assert in_time, f"worker {number} is late, and the engine waits until {due}"
        self._check_report(due)
        self._check_stuck(now)
        late_at = min((member.late_at for member in self.members.values() if not member.sent_away), default=math.inf)
        late_at = min(late_at, *(self.seek_late_at[node] for node in self.seeking), math.inf)
        assert due <= late_at + _TINY, f"a node is late at {late_at}, and the engine waits until {due}"
        ask_at = min(self.full.values(), default=math.inf) + LATEST
        assert due <= ask_at + _TINY, f"a node is to be asked again at {ask_at}, and the engine waits until {due}"
        if self.stuck_since is None:
            return
        if self.asked_since is None:
            self.asked_since = now  # the time without workers counts while the consumer waits
        deadline = self.asked_since + self.options.reconnect_timeout if self.is_hopeful else now
        assert due <= deadline + _TINY, f"there are no workers, and the engine waits until {due}"

    @property
    def is_hopeful(self) -> bool:
        return bool(self.seeking or self.short - self.hopeless) or self.expects_more

    def ticked(self, failure: BaseException | None, now: float) -> None:
        """The engine was told the time."""
        for node in self.asked_again:
            since = self.full.pop(node)
            assert now >= since + SOONEST - _TINY, f"{node} is asked again after {now - since} s"
        self.asked_again.clear()
        self._check_stuck(now)
        for node in self.seeking:
            if self.seek_late_at[node] <= now:
                self.seek_late_at[node] = math.inf
                self.is_changed = True
        for member in self.members.values():
            if member.late_at <= now and not member.sent_away:
                member.is_late, member.late_at = True, now + self.options.connect_timeout
                self.silent.add(member.node)
                self.places[member.place].refused.clear()
                self.is_changed = True
        if self.has_raised:
            return
        if failure is None:
            assert self.stuck_since is None or self.is_hopeful, "there are no workers and no hope, and the pass goes on"
        else:
            assert self.stuck_since is not None, (
                f"the pass ends, though {len(self.members)} workers are there: {failure}"
            )
            seconds = now - self.stuck_since
            is_over = not self.is_hopeful or seconds >= self.options.reconnect_timeout - _TINY
            assert is_over, f"the pass ends after {seconds} s without workers: {failure}"

    # Helpers

    def _is_deserted(self) -> bool:
        mute = self._mute()
        return not any(
            place.home in self.up and (place.home not in mute or self._is_at(number, place.home, late=False))
            for number, place in ((number, self.places[number]) for number in self._used())
        )

    def _mute(self) -> set[str]:
        """Nodes that were asked for something, and have not answered in time."""
        unreached = {node for node in self.seeking if self.seek_late_at.get(node) == math.inf}
        late = {member.node for member in self.members.values() if member.is_late and not member.sent_away}
        return unreached | late | self.silent

    def _is_filled(self, number: int, *, or_leaving: bool = True) -> bool:
        """Whether a place has a worker that is not late; perhaps one that leaves, whose end may be waited for."""
        last = self.members.get(self.places[number].worker)
        if or_leaving and last is not None and not last.is_late:
            return True
        members = [member for member in self.members.values() if member.place == number]
        return any(or_leaving and member.closed if member.sent_away else not member.is_late for member in members)

    def _is_at(self, place: int, node: str, late: bool = True) -> bool:
        """Whether a place has a worker at a node, or has asked for one."""
        members = [other for other in self.members.values() if not other.sent_away and (late or not other.is_late)]
        return any((other.place, other.node) == (place, node) for other in members)

    @property
    def _lowest(self) -> float | None:
        """The first task that no worker has."""
        for number, task in self.tasks.items():
            if task.has_rest:
                return number
            for part in task.parts:
                if self.parts[part].waits:
                    return part
        return None

    @property
    def _num_copies(self) -> int:
        """Unanswered copies of batches; one in parts counts twice."""
        copies = sum(share == 1 for member in self.members.values() for share in member.in_flight.values())
        return copies + 2 * sum(bool(task.parts) for task in self.tasks.values())

    @property
    def _has_backup(self) -> bool:
        return any(len(task.holders) > 1 for task in (*self.tasks.values(), *self.parts.values()))

    def _may_send(self, number: float) -> bool:
        if number in self.parts or self.tasks[int(number)].parts:
            return True
        if self.options.in_order:
            if number == next(iter(self.tasks)):
                return True
        elif self.is_iterable:
            if not self._num_copies and not self.answered_order:
                return True
        elif all(task.waits for task in self.tasks.values()) and not any(each.holders for each in self.parts.values()):
            return True
        return self.answered_bytes + (self._num_copies + 1) * self.estimate <= self.options.max_in_flight_bytes

    def _drop_copy(self, worker: int, number: float, seconds: float | None, now: float) -> None:
        """A worker has answered, and has one task less."""
        member = self.members[worker]
        was_running = next(iter(member.in_flight)) == number
        share = member.in_flight[number]
        self.num_answers += 1
        if seconds is not None:
            was_measured, member.is_measured = member.is_measured, True
            self.num_measured += 1
            self.has_measured = True
            self.max_seconds = max(self.max_seconds, seconds / share)
            self.task_range = _widened(self.task_range, seconds / share)
            if was_running:
                self.num_seen += 1
                seen = (now - member.since) / share
                self.max_seen = max(self.max_seen, seen)
                if was_measured:
                    self.seen_range = _widened(self.seen_range, seen)
        if was_running:
            member.since = now
            member.ended = None
        del member.in_flight[number]
        self.is_changed = self.is_changed or member.sent_away
        if (task := self.find(number)) is not None:
            task.holders.remove(worker)

    def _note_answer(self, number: int, task: Task, size: int) -> None:
        task.is_answered = True
        task.size = size
        self.answered_bytes += size
        if not self.options.in_order:
            self.answered_order.append(number)

    def _drop_from(self, stream: int, first: int) -> None:
        """A stream has ended before task ``first``."""
        owner = self.members.get(self.owners.get(stream, 0))
        for number in [number for number, task in self.tasks.items() if task.stream == stream and number >= first]:
            del self.tasks[number]
            self.num_of_stream[stream] -= 1
            if owner is not None:
                owner.in_flight.pop(number, None)
        self.turn.remove(stream)


def _widened(known: tuple[float, float] | None, value: float) -> tuple[float, float]:
    """A range that has this value, too."""
    return (value, value) if known is None else (min(known[0], value), max(known[1], value))
