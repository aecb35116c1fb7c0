"""Executes the engine's decisions other than sending tasks: opens and ends workers, looks for nodes.

It runs in any thread, without the pass's condition, so that no thread waits for another one's send. Results go to the
driver, from the thread that notices them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.client.node import Node
from rpcdataloader.client.worker import dumps_named, reference_of
from rpcdataloader.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    RemoteProtocolError,
    RPCError,
)
from rpcdataloader.fetch import remote
from rpcdataloader.host.environment import set_rank
from rpcdataloader.loader.passes import Pass, loader_spec
from rpcdataloader.loader.seat import Seat
from rpcdataloader.loader.tasks import describe
from rpcdataloader.plan.actions import Action, Cancel, Close, End, Open, ReportWait, Restart, Say, Seek
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.pickling import Encoded, dumps

if TYPE_CHECKING:
    from rpcdataloader.loader.driver import Driver

logger = logging.getLogger("rpcdataloader.loader")


class _Opening(NamedTuple):
    """The first request to a worker, and its epoch."""

    request: Encoded
    begun: Pass
    job: tuple[int, int] | None = None  # RANK and WORLD_SIZE that the worker sets before, for a stream of another rank


class Executor:
    """The workers of a pass, and the actions on them.

    Attributes:
        seats: Requested workers that are not lost, by number.
    """

    def __init__(self, driver: Driver, dataset: RemoteDataset) -> None:
        self.seats: dict[int, Seat] = {}
        # The driver owns this object, and must go with its last reference: no cycle between them.
        self._find_driver = weakref.ref(driver)
        self._client = get_client()
        self._settings, self._condition, self._closed = driver.settings, driver.condition, driver.closed
        self._dataset = dataset  # held while workers exist
        self._openings: dict[int, _Opening] = {}  # ready first requests, by place
        self._unwanted: set[int] = set()  # workers to close before they are requested
        self._sought: set[Node] = set()  # nodes whose waits end with the pass

    @property
    def _driver(self) -> Driver:
        driver = self._find_driver()
        assert driver is not None  # it calls
        return driver

    def close(self) -> None:
        """End all workers, and the waits of threads that look for nodes."""
        with self._condition:
            workers = [seat.worker for seat in self.seats.values()]
        for worker in workers:
            worker.close()
        for node in list(self._sought):
            node.wake()

    def prepare(self, actions: Sequence[Action]) -> None:
        """Make the first requests to the first workers before any is sent, so that pickling errors come early."""
        places = [action.place for action in actions if isinstance(action, Open)]
        self._openings = {place: self._opening(place) for place in places}

    def carry_out(self, actions: Sequence[Action], begun: Pass) -> None:
        """Carry out actions; without the condition."""
        for action in actions:
            match action:
                case Cancel():
                    self._cancel(action, begun)
                case Open():
                    self._open(action)
                case Close():
                    self._close(action.worker)
                case Restart():
                    self._restart(action.worker, begun)
                case Seek():
                    self._sought.add(action.node)
                    seek = functools.partial(self._seek, action.node, action.delay)
                    self._client.start_thread(f"rpcdl-seek {action.node}", seek, self._closed)
                case ReportWait():
                    report = functools.partial(self._report_wait, action)
                    self._client.start_thread("rpcdl-report", report, self._closed)
                case Say():
                    logger.log(logging.WARNING if action.is_warning else logging.INFO, "%s", action.text)
        if ends := [action for action in actions if isinstance(action, End)]:
            self._end(ends, begun)  # at the same time

    def _cancel(self, action: Cancel, begun: Pass) -> None:
        seat = self.seats.get(action.worker)
        if seat is not None and (sent := seat.sent.get(action.number)) is not None and sent.begun is begun:
            seat.worker.connection.cancel(sent.request_id)

    def _close(self, number: int) -> None:
        with self._condition:
            seat = self.seats.get(number)
            if seat is None:
                self._unwanted.add(number)
        if seat is not None:
            seat.worker.close()

    def _restart(self, number: int, begun: Pass) -> None:
        seat = self.seats.get(number)
        if seat is None:
            return
        changed = self._dataset, self._dataset.key, self._driver.changes
        args = *changed, begun.progress.epoch, begun.first, begun.pipe_seed
        # The consumer draws for this epoch when all workers know of it.
        seat.restart(dumps(tuple(Call(remote.start_epoch, args, {}, ordered=True)), persistent_id=reference_of))

    def _open(self, action: Open[Node]) -> None:
        """Request a worker, if its node is still up."""
        opening = self._openings.pop(action.place, None)
        while True:
            try:
                opening = opening or self._opening(action.place)
            except BaseException as exc:
                self._driver.fail(exc)
                return
            with self._condition:
                if self._closed.is_set():
                    return
                if opening.begun is self._driver.begun:
                    error = self._ask(action, opening)
                    break
            opening = None  # another epoch has begun
        if error is not None:
            self._driver.feed(lambda engine, _now: engine.crew.open_failed(action.worker, error))

    def _ask(self, action: Open[Node], opening: _Opening) -> RPCError | None:
        """Request a worker; returns the error of a failure.

        With the condition, so that the worker is ready only after its first request was sent.
        """
        session = action.node.current
        if action.worker in self._unwanted or session is None or not self._dataset.is_on(session):
            self._unwanted.discard(action.worker)
            return ConnectionLostError("it is gone")
        session.import_early(opening.request.modules)
        seat = Seat(self._driver, action.worker)
        keep_waiting = self._driver.is_open if action.is_promised else self._driver.is_alone
        seat.worker = session.open_worker(seat, keep_waiting)
        self.seats[action.worker] = seat
        # Fails if the worker is lost already, which is about to be reported.
        with contextlib.suppress(RPCError):
            if opening.job is not None:  # first, as the other request may build the dataset
                call = dumps(tuple(Call(set_rank, opening.job, {}, ordered=True)))
                seat.worker.submit(call.payload, call.buffers, lambda _reply: None)
            seat.worker.submit(opening.request.payload, opening.request.buffers, seat.started)
        return None

    def _opening(self, place: int) -> _Opening:
        """Make the first request to a worker, which contains the user's pickled objects."""
        settings, driver, begun = self._settings, self._driver, self._driver.begun
        # Workers that join later may have a higher number.
        num_workers = max(driver.num_streams, place + 1)
        spec = loader_spec(settings, begun, place, num_workers, driver.streams[place] if driver.streams else None)
        changes = self._dataset.changes_of_workers()
        call = Call(remote.open_loader, (self._dataset, spec, self._dataset.key, changes), {}, ordered=True)
        parts = {"collate_fn": settings.collate_fn, "worker_init_fn": settings.worker_init_fn}
        return _Opening(dumps_named(tuple(call), parts, persistent_id=self._reference_of), begun, spec.job)

    def _reference_of(self, value: Any) -> tuple[str, int] | None:
        """The persistent id of the dataset, also inside a user's function, such as a bound method."""
        return reference_of(self._dataset if value is self._settings.dataset else value)

    def _end(self, ends: Sequence[End], begun: Pass) -> None:
        """End workers that exceed a task's time limit, and record their stacks in the tasks."""
        with self._condition:
            late = [
                # Not the engine's task: another worker may have answered it, and it may be delivered.
                (seat.worker, sent.task)
                for end in ends
                if (seat := self.seats.get(end.worker)) is not None
                and (sent := seat.sent.get(end.number)) is not None
                and sent.begun is begun
            ]
        limit = self._settings.task_timeout
        endings = [
            worker.session.end_worker(worker.number, f"{describe(task)} took longer than {limit:g} s")
            for worker, task in late
        ]
        for (worker, task), wait in zip(late, endings, strict=True):
            task.stack = wait()
            logger.warning(
                "%s took longer than %g s (task_timeout) on %s, which was here:\n%s",
                describe(task),
                limit,
                worker.name,
                task.stack,
            )

    def _report_wait(self, action: ReportWait) -> None:
        """Report the batch that the consumer waits for, and its worker; in a new thread, as the stack takes time."""
        with self._condition:
            seat = None if action.worker is None else self.seats.get(action.worker)
        where, stack = "which is not assigned", ""
        if seat is not None:
            where, stack = f"which is at {seat.worker.name}", "\n" + seat.worker.session.stack_of(seat.worker.number)
        label = self._settings.partition.label
        task = describe(action.payload)
        waited = f"{label}the loop has waited {action.seconds:.0f} s for {task}, {where} ({action.summary}){stack}"
        logger.warning("%s", waited)

    def _seek(self, node: Node, delay: float) -> None:
        """Connect to a node, and build the dataset there; in a new thread."""
        if self._closed.wait(delay) or (driver := self._find_driver()) is None:
            return
        try:
            session = node.session()
            session.wait(lambda: not self._closed.is_set())
            session.follow()()
            self._dataset.build_on([session])
            num_offered = node.num_workers()
        except (ConnectError, ConnectionLostError, RemoteProtocolError, AuthenticationError) as exc:
            failure, is_foreign = exc.with_traceback(None), isinstance(exc, (RemoteProtocolError, AuthenticationError))
            driver.feed(lambda engine, _now: engine.crew.node_failed(node, failure, is_foreign=is_foreign))
        except BaseException as exc:
            reason = exc.with_traceback(None)
            driver.feed(lambda engine, _now: engine.crew.node_hopeless(node, reason))
        else:
            driver.feed(lambda engine, _now: engine.crew.node_up(node, session, num_offered))
