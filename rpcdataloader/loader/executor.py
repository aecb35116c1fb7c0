"""Carries out what the engine wants done beside sending tasks: opens and ends workers, looks for nodes.

Any thread, and never with the pass's condition, so that no thread waits for another one's send. What comes of it is
told to the driver, in whichever thread notices.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset, dumps_named
from rpcdataloader.client.exchange import reference_of
from rpcdataloader.client.node import Node
from rpcdataloader.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    LocalProtocolError,
    RemoteProtocolError,
    RPCError,
)
from rpcdataloader.fetch import remote
from rpcdataloader.host.environment import set_rank
from rpcdataloader.loader.passes import Pass, loader_spec
from rpcdataloader.loader.seat import Answer, Seat
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.tasks import describe
from rpcdataloader.plan.actions import Action, Cancel, Close, End, Open, ReportWait, Restart, Say, Seek
from rpcdataloader.wire.buffers import BlockBytes
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.pickling import dumps
from rpcdataloader.wire.slabs import Allocator

if TYPE_CHECKING:
    from rpcdataloader.loader.driver import Driver

logger = logging.getLogger("rpcdataloader.loader")


@dataclass(frozen=True, slots=True)
class _Opening:
    """The first request to a worker, and the epoch that it was made for.

    Attributes:
        job: RANK and WORLD_SIZE that the worker has to see before, if they are those of another rank's stream.
    """

    payload: bytes
    buffers: Sequence[BlockBytes]
    begun: Pass
    job: tuple[int, int] | None = None


class Executor:
    """The workers of a pass, and what is done with them.

    Attributes:
        seats: The workers that were asked for and are not lost, by number.
    """

    def __init__(
        self,
        driver: Driver,
        settings: PassSettings,
        dataset: RemoteDataset,
        allocator: Allocator,
        decode: Callable[[Message], Answer],
        condition: threading.Condition,
        closed: threading.Event,
    ) -> None:
        self.seats: dict[int, Seat] = {}
        # The driver has this object, and must go with its last reference: the two make no circle.
        self._find_driver = weakref.ref(driver)
        self._client = get_client()
        self._settings = settings
        self._dataset = dataset  # held for as long as there are workers
        self._allocator = allocator
        self._decode = decode
        self._condition = condition
        self._closed = closed
        self._unwanted: set[int] = set()  # workers that were to be closed before they were asked for
        self._sought: set[Node] = set()  # whose waits are ended at the end

    @property
    def _driver(self) -> Driver:
        driver = self._find_driver()
        if driver is None:
            raise LocalProtocolError("the pass is over")
        return driver

    def close(self) -> None:
        """End all workers, and the waits of threads that look for nodes."""
        with self._condition:
            workers = [seat.worker for seat in self.seats.values()]
        for worker in workers:
            worker.close()
        for node in list(self._sought):
            node.wake()

    def carry_out(self, actions: Sequence[Action], begun: Pass, openings: Mapping[int, _Opening] | None = None) -> None:
        """Do what the engine wants; without the condition.

        Args:
            openings: First requests that are made already, by place.
        """
        ends: list[End] = []
        for action in actions:
            if isinstance(action, Cancel):
                self._cancel(action, begun)
            elif isinstance(action, Open):
                self._open(action, None if openings is None else openings[action.place])
            elif isinstance(action, Close):
                self._close(action.worker)
            elif isinstance(action, Restart):
                self._restart(action.worker, begun)
            elif isinstance(action, Seek):
                self._sought.add(action.node)
                seek = functools.partial(self._seek, action.node, action.delay)
                self._client.start_thread(f"rpcdl-seek {action.node}", seek, self._closed)
            elif isinstance(action, End):
                ends.append(action)
            elif isinstance(action, ReportWait):
                self._client.start_thread("rpcdl-report", functools.partial(self._report_wait, action), self._closed)
            elif isinstance(action, Say):
                logger.log(logging.WARNING if action.is_warning else logging.INFO, "%s", action.text)
        if ends:
            self._end(ends, begun)

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
        args = begun.progress.epoch, begun.order.first, begun.order.pipe_seed
        # The consumer draws for this epoch when all workers know of it.
        seat.restart(dumps(Call(remote.start_epoch, args, {}, ordered=True).fields()))

    def _open(self, action: Open[Node], opening: _Opening | None) -> None:
        """Ask for a worker, if its node is still there."""
        while True:
            if opening is None:
                try:
                    opening = self.opening(action.place)
                except BaseException as exc:
                    self._driver.fail(exc)
                    return
            with self._condition:
                if self._closed.is_set():
                    return
                if opening.begun is self._driver.begun:
                    error = self._ask(action, opening)
                    break
            opening = None  # another epoch has begun meanwhile
        if error is not None:
            self._driver.feed(lambda engine, _now: engine.open_failed(action.worker, error))

    def _ask(self, action: Open[Node], opening: _Opening) -> RPCError | None:
        """Ask for a worker; returns why it cannot be had.

        With the condition, so that it is ready only after its first request is on the way.
        """
        try:
            session = action.node.session()
        except RPCError as exc:  # an embedded pool that does not start again
            return exc
        if action.worker in self._unwanted or not session.is_ready or not self._dataset.is_on(session):
            self._unwanted.discard(action.worker)
            return ConnectionLostError("it is not there any more")
        seat = Seat(self._driver, action.worker, self._allocator, self._decode)
        keep_waiting = self._driver.is_open if action.is_promised else self._driver.is_alone
        seat.worker = self._dataset.open_worker(session, seat, keep_waiting)
        self.seats[action.worker] = seat
        # Fails where it is lost already, which is about to be reported.
        with contextlib.suppress(RPCError):
            if opening.job is not None:  # first, as the dataset may be built with the other request
                call = dumps(Call(set_rank, opening.job, {}, ordered=True).fields())
                seat.worker.submit(call.payload, call.buffers, lambda _reply: None)
            seat.worker.submit(opening.payload, opening.buffers, seat.started)
        return None

    def opening(self, place: int) -> _Opening:
        """The first request to a worker, in which there is what is the user's to pickle."""
        settings, begun = self._settings, self._driver.begun
        # Of a worker that has joined later, the number may be a higher one.
        num_workers = max(self._driver.num_streams, place + 1)
        spec = loader_spec(settings, begun, place, num_workers, self._driver.stream_at(place))
        call = Call(remote.open_loader, (self._dataset.ref, spec), {}, ordered=True)
        parts = {"collate_fn": settings.collate_fn, "worker_init_fn": settings.worker_init_fn}
        encoded = dumps_named(call.fields(), parts, persistent_id=self._reference_of)
        return _Opening(encoded.payload, encoded.buffers, begun, spec.job)

    def _reference_of(self, value: Any) -> tuple[str, int] | None:
        """The persistent id of the dataset, also where a function of the user holds it, as a bound method does."""
        return reference_of(self._dataset.ref if value is self._settings.dataset else value)

    def _end(self, ends: Sequence[End], begun: Pass) -> None:
        """End workers that are at a task for too long, and note in the tasks where they were."""
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
        """Say what the consumer has waited for, and where that is; in a thread of its own, as the stack takes time."""
        with self._condition:
            seat = None if action.worker is None else self.seats.get(action.worker)
        where, stack = "which no worker has", ""
        if seat is not None:
            where, stack = f"which is at {seat.worker.name}", "\n" + seat.worker.session.stack_of(seat.worker.number)
        label = self._settings.partition.label
        task = describe(action.payload)
        logger.warning("%sthe loop has waited %.0f s for %s, %s%s", label, action.seconds, task, where, stack)

    def _seek(self, node: Node, delay: float) -> None:
        """Connect to a node, and build the dataset there; in a thread of its own."""
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
            driver.feed(lambda engine, _now: engine.node_failed(node, failure, is_foreign=is_foreign))
        except BaseException as exc:
            reason = exc.with_traceback(None)
            driver.feed(lambda engine, _now: engine.node_hopeless(node, reason))
        else:
            driver.feed(lambda engine, _now: engine.node_up(node, session, num_offered))
