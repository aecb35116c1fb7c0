"""The result of ``iter(loader)`` with workers: the consumer's side of a pass.

What all iterators share comes first. That of ``workers="inline"`` is in ``inline``.
"""

from __future__ import annotations

import itertools
import math
import os
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.client.sharing import of_rank
from rpcdataloader.client.worker import RemoteWorker
from rpcdataloader.diagnosis.records import NOTED_WAIT, Probe, Recorder
from rpcdataloader.errors import ConnectionLostError, LocalProtocolError, RemoteTraceback, RPCTimeoutError
from rpcdataloader.host.locks import Lock, inherited
from rpcdataloader.loader.copying import DeviceCopies
from rpcdataloader.loader.driver import Driver, shown
from rpcdataloader.loader.executor import Executor, Here, describe_wait
from rpcdataloader.loader.passes import begin_pass, undone_afterwards
from rpcdataloader.loader.placement import Placement, plan_options, prepare
from rpcdataloader.loader.seat import Answer, BatchDecoder
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.tasks import Progress, Returned, Task, describe, interruption, make_part
from rpcdataloader.loader.waits import WantedWorkers, to_status
from rpcdataloader.plan.actions import ReportWait
from rpcdataloader.plan.engine import Engine
from rpcdataloader.wire.exceptions import copy_to_raise
from rpcdataloader.wire.status import LoopStatus

# The names of the ranges of torch's loaders, which its profiler finds by the beginning.
RANGE = "enumerate(DataLoader)#RPCDataloader.__next__"

REPLACED = (
    "load_state_dict() was called while this iterator was in the middle of its pass, which is not that of the state, "
    "and no longer counted by state_dict(): go on with iter(loader), which begins where the state was saved"
)

NO_OTHER_PASS = "this iterator cannot begin another pass, as its workers were not kept: go on with iter(loader)"

SHUT_DOWN = "_shutdown_workers() has ended the workers in the middle of this pass: begin another one with iter(loader)"

CANNOT_BE_PICKLED = (
    "an iterator over an RPCDataloader belongs to its process, and cannot be pickled: a loader whose dataset iterates "
    "over another loader needs workers='inline'"
)

# Seconds outside of ``next`` after which a loop is not reported: another loop may be running inside it.
_PAUSE = 60.0

# Seconds. It does not matter whether the device's work hid a shorter wait.
_LEAST_HIDDEN = 1e-4


class CannotGoOnError(LocalProtocolError):
    """An iterator cannot begin another pass."""


class PassIterator(ABC):
    """The result of ``iter(loader)``.

    Args:
        name: Name of the dataset.
        reported_length: Length that the loader has reported; None if it was not queried.
    """

    def __init__(self, settings: PassSettings, name: str, reported_length: int | None) -> None:
        self._settings = settings
        self._name = name
        self._reported_length = reported_length
        # Held during ``next``: threads that share an iterator each get batches of their own.
        self._turn = inherited(Lock())

    def __iter__(self) -> PassIterator:
        return self

    def __len__(self) -> int:
        return len(self._settings.sampler)

    def __reduce__(self) -> NoReturn:
        raise TypeError(CANNOT_BE_PICKLED)

    # Frameworks use these names of torch's iterators.
    @property
    def _num_yielded(self) -> int:
        """Number of batches of the pass that were delivered, or left out at its beginning."""
        return self.progress.copy().settle().num_batches

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin another pass, as what a subclass of the loader has put around this asks for.

        Raises:
            CannotGoOnError: The workers were not kept.
        """
        if not first_iter:
            loader._iterate(self)

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: The sampler is at its end, and every batch was delivered.
            LocalProtocolError: A state was loaded into the loader since this iterator began.
            RuntimeError: No batch came within the loader's timeout.
            ConnectionLostError: All workers are lost and none came back in time, or a batch has ended too many workers.
            Exception: An exception of the dataset, the collate function or the init function on a worker.
            BadSamplesError: More samples were skipped than the loader allows.
        """
        answer: Answer | None = None
        progress = self.progress
        try:
            with self._turn:
                if progress.is_midway:  # since a call that a second exception has ended while it said so
                    self._fail(interruption(None))
                try:
                    while True:
                        if progress.is_replaced and not progress.finished:
                            raise LocalProtocolError(REPLACED)
                        progress.settle()
                        answer, returned = shown(RANGE, self._next)
                        if (lacks := answer.lacks) is None or answer.error is not None:
                            break
                        answer.error = progress.report_skipped(lacks, answer.where, self._settings.max_skipped)
                        if answer.error is not None or not lacks.is_whole:
                            break
                        progress.returned += (returned,)
                        answer, progress.is_midway = None, False
                    if (reported := self._reported_length) is not None and progress.num_yielded >= reported:
                        warning = self._too_long(reported, progress.num_yielded)
                        answer.error = answer.error or warning
                except BaseException as exc:
                    # Between any two steps: half of a decision may be carried out.
                    if progress.is_midway:
                        self._fail(interruption(exc))
                    raise
                progress.is_midway = False
            # It counts as it is returned. In one step, see ``tasks``: from here on no signal handler can raise.
            progress.returned += (returned,)
        except StopIteration:
            progress.finished = True
            raise
        except BaseException as exc:
            if answer is not None:  # the batch is lost
                self._fail(interruption(exc))
            raise
        error, answer.error = answer.error, None
        if error is None:
            return answer.result
        answer = None
        try:
            raise error
        finally:
            del error  # whose traceback refers to this frame

    def _too_long(self, reported: int, num_yielded: int) -> UserWarning | None:
        """Warn, as torch does, of more batches than the dataset has said; returns a warning that filters make raise."""
        try:
            warnings.warn(
                f"Length of IterableDataset {self._name} was reported to be {reported} (by len of its loader), but "
                f"{num_yielded + 1} samples have been fetched. For multiprocessing data-loading, this happens when a "
                "worker takes more than its part of the dataset; torch.utils.data.get_worker_info() says which worker "
                "it is.",
                stacklevel=3,
            )
        except UserWarning as warning:  # which takes the place of the batch, as with torch
            return warning
        return None

    @abstractmethod
    def _next(self) -> tuple[Answer, Returned]:
        """Take the next batch, and what there is to count of it.

        ``progress.is_midway`` is set where an exception would lose a batch, or leave a decision half carried out: not
        while this waits, or calls the sampler. After an exception there, the next call goes on.
        """

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Raise this at each further ``next``, unless the pass has failed before."""

    @property
    @abstractmethod
    def progress(self) -> Progress:
        """The progress of this pass; changes with it."""

    @abstractmethod
    def reset(self, reported_length: int | None) -> bool:
        """Begin another epoch with the same workers and the same seed; returns False if that is impossible."""


class RemoteIterator(PassIterator):
    """The result of ``iter(loader)`` with workers. Dropping it ends the workers.

    Args:
        placement: Nodes of the workers; for an iterable-style dataset, of the streams.
        wanted: The number of workers that the loader wants.
        here: The place of workers on this machine that are this pass's own.
        num_left_out: Number of batches that a new pass leaves out.

    Attributes:
        driver: State of the pass, to which its workers refer.
    """

    def __init__(
        self,
        settings: PassSettings,
        dataset: RemoteDataset,
        placement: Placement,
        recorder: Recorder,
        saved: Mapping[str, Any] | None = None,
        reported_length: int | None = None,
        wanted: WantedWorkers | None = None,
        here: Here | None = None,
        num_left_out: int = 0,
    ) -> None:
        super().__init__(settings, dataset.name, reported_length)
        self._ready = 0.0  # seconds asleep while a later batch was here
        self._timed: tuple[Probe, DeviceCopies] | None = None  # the last probe
        with undone_afterwards(saved):
            decoder = BatchDecoder(settings, get_client().allocator)
            num_streams = len(placement.homes)
            begun = begin_pass(settings, saved, num_streams, makes_requests=True, num_left_out=num_left_out)
            options, turn = plan_options(settings, placement), begun.progress.turn
            split = make_part if settings.may_split and (wanted is None or wanted.may_split) else None
            engine = Engine(options, placement.homes, placement.others, describe=describe, turn=turn, split=split)
            executor = Executor(settings, dataset, placement, here)
            self.driver = driver = Driver(settings, engine, executor, begun, decoder, recorder)
            begun.source.when_ready(driver.condition.wake_all)  # which does not refer to the driver
            if wanted is not None:
                driver.wanted = wanted
                if wanted.most is not None:
                    engine.crew.use(wanted.most)
            self._end = weakref.finalize(self, get_client().janitor.leave, driver.close)
            self._end.atexit = False
            try:
                # After the sampler has begun, which may change the dataset: workers of this machine see that.
                prepare(dataset, placement.homes[: None if wanted is None else wanted.most], wait=False)
                driver.start(
                    dict.fromkeys(placement.homes), placement.missing, expects_more=placement.followed is not None
                )
                if placement.followed is not None:
                    executor.watch(placement.followed, driver.nodes_changed)
                driver.advance(driver.may_draw(has_batch=True), time.monotonic())
                begun.progress.is_midway = False
            except BaseException:
                driver.close()
                raise
        # Seconds of a sleep from which on it is recorded at once; shorter ones are summed.
        self._noted = NOTED_WAIT if decoder.is_device_busy is None else _LEAST_HIDDEN
        self._rank = settings.partition.rank if settings.partition.world_size > 1 else None
        get_client().reporter.add(self.report)

    def is_ready(self) -> bool:
        """Whether the next call of ``next`` need not wait: there is a batch, or the end, or a failure."""
        engine = self.driver.engine
        with self.driver.condition:
            if engine.failure is not None or engine.table.finished:
                return True
            here = itertools.takewhile(lambda task: task.size_bytes is not None, engine.table.tasks.values())
            # Those of which all samples were skipped are not returned.
            return not all(task.answer and task.answer.lacks and task.answer.lacks.is_whole for task in here)

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Let a function be called, in any thread, each time that :meth:`is_ready` may have become true."""
        self.driver.follower = wake

    def _next(self) -> tuple[Answer, Returned]:
        driver, engine, progress = self.driver, self.driver.engine, self.driver.begun.progress
        if os.getpid() != driver.pid:
            raise LocalProtocolError(f"this iterator belongs to process {driver.pid}, of which this one is a fork")
        progress.is_midway = True
        began = time.monotonic()
        timeout = self._settings.timeout or None
        deadline = None if timeout is None else began + timeout
        blocked = 0.0
        overdue: list[tuple[ReportWait, RemoteWorker | None]] | None = None
        while True:
            with driver.condition:
                delivery = driver.take()
                if delivery is None:
                    if engine.failure is None and engine.table.finished:
                        break
                    if (slept := self._wait(deadline)) is None:
                        overdue = self._present_wait()
                        break
                    blocked += slept
                    delivery = driver.take()  # as a rule, the wait was for it
                wants_input = engine.table.wants_input and driver.may_draw(has_batch=delivery is not None)
            if delivery is not None:
                break
            driver.advance(wants_input, began)
        if overdue is not None:
            # torch's exception and text, which scripts may match; without the condition, as the stack takes time.
            progress.is_midway = False
            text = f"{self._settings.partition.label}DataLoader timed out after {self._settings.timeout} seconds"
            raise RuntimeError(" ".join([text, *(describe_wait(*each) for each in overdue)]))
        if delivery is None:
            progress.is_midway = False
            driver.begun.source.check_end()
            driver.is_complete = True
            # Without the condition: why the loop has waited goes to handlers of the user.
            driver.tell() if self._settings.persistent_workers else driver.close()
            raise StopIteration
        task: Task = delivery.payload
        answer: Answer = delivery.answer
        if delivery.condemned is not None:
            answer = Answer(error=ConnectionLostError(delivery.condemned))
            if delivery.stream is not None:  # it ends here
                # Not where the next pass begins.
                stream = progress.streams[delivery.stream]
                answer.stream = stream._replace(owner="", state=None, at=0, ended=True)
        driver.advance(wants_input, began)
        driver.taken = None
        now = time.monotonic()
        if answer.probe is not None or blocked >= self._noted:
            self._note(answer, now, now - began, blocked)
        else:
            driver.recorder.took(now, began, blocked)
        if answer.copies is not None:
            shown("RPCDataloader.copy", answer.copies.wait)
        if answer.error is not None:
            answer.error = self._explained(answer.error, task)
        counted = task.number, task.num_samples, task.digest, task.sampler_state
        return answer, Returned(*counted, delivery.stream, answer.stream, answer.lacks)

    def _fail(self, error: Exception) -> None:
        if self.driver.engine.failure is None:
            self.driver.engine.failure = error

    def _note(self, answer: Answer, now: float, waited: float, blocked: float) -> None:
        """Record a long sleep for a batch, before its stream waits for the copies, and the times of a probe.

        Args:
            waited: Seconds in ``next``.
            blocked: Seconds of it asleep.
        """
        driver, recorder = self.driver, self.driver.recorder
        if not recorder.batches:
            recorder.start.num_workers = answer.num_workers
        if blocked >= self._noted and (is_busy := driver.decoder.is_device_busy) is not None and is_busy():
            waited = blocked = 0.0  # hidden by the device's work
        ready, self._ready = self._ready if blocked else 0.0, 0.0
        if (probe := answer.probe) is None:
            recorder.delivered(now, waited, blocked, ready=ready, worker=answer.worker)
            return
        # The copies of this batch are unfinished; those of the previous probe are done.
        if (timed := self._timed) is not None and (times := timed[1].times()) is not None:
            timed[0].copy, timed[0].stalled = times
        self._timed = None if answer.copies is None else (probe, answer.copies)
        if driver.has_changed:
            driver.note_setup()
        recorder.delivered(now, waited, blocked, ready=ready, worker=answer.worker, probe=probe)
        driver.decide()

    def _present_wait(self) -> list[tuple[ReportWait, RemoteWorker | None]]:
        """The batch that is waited for, and its worker, with the condition; empty for no batch."""
        report = self.driver.engine.present_wait(time.monotonic())
        if report is None:
            return []
        seat = None if report.worker is None else self.driver.seats.get(report.worker)
        return [(report, None if seat is None else seat.worker)]

    def _wait(self, deadline: float | None) -> float | None:
        """Wait, with the condition, until the next batch or another action is due.

        Returns:
            Seconds asleep; None if the deadline has passed.

        Raises:
            BaseException: The pass cannot go on.
        """
        driver, engine = self.driver, self.driver.engine
        if engine.failure is not None:
            driver.close()
            # An exception of which there is no copy refers to the loop, whose variables would live as long as that.
            self._end.detach()
            raise of_rank(copy_to_raise(engine.failure), self._settings.partition)
        if engine.table.wants_input and driver.may_draw():
            return 0.0  # a stream has ended, which makes room for others
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            return None
        until = driver.falls_asleep(now, deadline)
        seconds = None if until == math.inf else until - now
        progress = driver.begun.progress
        progress.is_midway = False
        try:
            shown("RPCDataloader.wait", driver.condition.wait, seconds)
        finally:
            driver.sleeps_until = -math.inf
        progress.is_midway = True
        woken = time.monotonic()
        self._ready += driver.wakes_up(woken)
        return woken - now

    def _explained(self, error: BaseException, task: Task) -> BaseException:
        """Add to an error the rank and, after a timeout, the last stack of the task."""
        if task.stack is not None and isinstance(error, ConnectionLostError):
            error = RPCTimeoutError(f"{error}\n{task.stack()}")
        if isinstance(error.__cause__, RemoteTraceback):
            error = error.with_traceback(None)  # the relevant frames are the worker's
        return of_rank(error, self._settings.partition)

    @property
    def progress(self) -> Progress:
        return self.driver.begun.progress

    def report(self) -> LoopStatus | None:
        """The diagnosis for node servers; None if the pass is over, or the loop has been elsewhere for a while."""
        if self.progress.finished or self.driver.is_closed:
            return None
        driver, now = self.driver, time.monotonic()
        if driver.sleeps_until == -math.inf and now - driver.recorder.last >= _PAUSE:
            return None
        diagnosis = driver.diagnosis()
        with driver.condition:
            wait, present = driver.engine.long_wait(now), driver.engine.num_workers
        more = 0 if diagnosis.more_workers is None else diagnosis.more_workers[1]
        wanted = present if driver.wanted is None else driver.wanted.number(present, more)
        # A stream's workers cannot be fewer.
        wanted = max(wanted, present) if self._settings.iterable else wanted
        return to_status(diagnosis, self._name, self._rank, wait, wanted)

    def _shutdown_workers(self) -> None:
        """End the workers, for scripts that know torch's method."""
        if not self.progress.finished:
            self._fail(LocalProtocolError(SHUT_DOWN))
        self._end()

    def reset(self, reported_length: int | None) -> bool:
        driver = self.driver
        if not self._end.alive or os.getpid() != driver.pid or driver.engine.failure is not None or driver.is_closed:
            return False
        driver.tell()
        before = self.progress.base_seed, self.progress.epoch
        num_streams = len(driver.streams)
        streams = self.progress.last_streams()
        begun = begin_pass(
            self._settings, None, num_streams, before=before, streams_before=streams, makes_requests=True
        )
        # Only now: what has raised so far has left the last pass as it was.
        self._reported_length, self._ready = reported_length, 0.0
        try:
            begun.source.when_ready(driver.condition.wake_all)
            driver.begin_epoch(begun)
            driver.advance(driver.may_draw(has_batch=True), time.monotonic())
        except BaseException as exc:
            if begun.progress.is_midway:
                self._fail(interruption(exc))
            raise
        begun.progress.is_midway = False
        return True
