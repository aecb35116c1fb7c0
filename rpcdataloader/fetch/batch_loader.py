"""Fetch the samples of a batch and collate them, with seeds independent of worker and order.

Runs in a worker, or in the trainer's own process for ``workers="inline"``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate, default_convert, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import default_collate_fn_map

from rpcdataloader.errors import RPCError
from rpcdataloader.fetch import seeding
from rpcdataloader.fetch.collate import Rows, TensorCollator, kind_of, registered
from rpcdataloader.fetch.raw import FailedSample
from rpcdataloader.fetch.samples import (
    ALL,
    DONE,
    WHOLE,
    Skipped,
    describe_indices,
    loads_batches,
    skipped,
    stopped,
    whereabouts,
)
from rpcdataloader.fetch.seeding import BATCH, SAMPLE
from rpcdataloader.host.locks import Condition, inherited
from rpcdataloader.host.process import ThreadSettings
from rpcdataloader.wire.exceptions import add_note, name_sample
from rpcdataloader.wire.slabs import Allocator

logger = logging.getLogger("rpcdataloader.worker")

# torch's own functions draw no random numbers, so they need no seeded generators: 7 us of a batch of one integer.
# Functions that the user has put into torch's table may draw.
_TORCH_COLLATE = (default_collate, default_convert)

# Seconds until a sample is retried after an exception: first and longest back-off.
RETRY_PAUSE = 0.5
MAX_RETRY_PAUSE = 30.0


class StreamState(NamedTuple):
    """The position in a stream, which is one worker's iterator over an iterable-style dataset."""

    num_samples: int = 0  # number of samples taken from it
    num_batches: int = 0  # number of batches made of them
    # Owner of the ``state_dict()``: ``"iterator"`` or ``"dataset"``, or ``"both"``; empty without one.
    owner: str = ""
    state: Any = None  # result of that ``state_dict()``; for ``"both"``, of each by its name
    ended: bool = False  # True if the last batch met the end, and was incomplete, or another one was asked for
    # Digest of some of the samples taken; None if they cannot be compared, or need not, as ``state`` has the position.
    digest: int | None = None
    at: int = 0  # number of samples taken when ``state`` was; fewer where that was before the end, or before a failure


@dataclass(frozen=True, slots=True)
class LoaderSpec:
    """The loader as a worker needs to know it; sent once."""

    auto_collation: bool  # True if the sampler yields lists of indices; False for single ones
    iterable: bool
    drop_last: bool  # True to leave out an incomplete last batch of an iterable-style dataset
    base_seed: int  # seed from 0 to 2**63 - 1, the same on all workers
    epoch: int  # number of the epoch from 0; see :meth:`BatchLoader.start_epoch`
    rank: int  # rank of the trainer; with ``world_size``, keeps the random numbers of ranks apart
    world_size: int
    worker_id: int
    num_workers: int  # number of workers; 0 means, as in torch, no worker info and no init function
    collate_fn: Callable[[Any], Any] | None = None  # collate function; None for torch's default
    worker_init_fn: Callable[[int], None] | None = None
    first_position: int = 0  # position in the epoch, over all ranks, of the first sample, where the sampler began later
    first_batch: int = 0  # number that is added to those of batches, where another number of ranks has begun the epoch
    stream: StreamState | None = None  # state from which an iterable-style dataset continues; None for its beginning
    resumes: bool = False  # True if that state was saved; False if it is that of a worker that was lost
    # State at the end of the pass before, which another process has read: the dataset may count its epochs. None if the
    # dataset is there, or if nothing is known.
    before: StreamState | None = None
    skips: bool = False  # True to leave out samples whose dataset raises an exception
    retry_on: tuple[type[BaseException], ...] = ()  # exceptions after which a sample is retried
    max_retries: int = 0  # limit on that
    task_timeout: float | None = None  # seconds for a sample that a stream takes again; None for no limit
    thread: ThreadSettings | None = None  # of the thread that has begun the pass; None to keep those of the worker

    @property
    def ended_stream(self) -> StreamState:
        """The state of a stream that cannot be opened."""
        return (self.stream or StreamState())._replace(ended=True)

    def at_epoch(self, epoch: int, first_position: int) -> LoaderSpec:
        """The same loader in another pass, from the beginning."""
        return replace(
            self, epoch=epoch, first_position=first_position, first_batch=0, stream=None, resumes=False, before=None
        )


# A worker's answer: seconds to fetch and to collate, None if it did not try; the batch; what it lacks; and the state of
# the stream after it, which is None at its end. Plain tuples: a class costs a microsecond on either side.
Loaded = tuple[tuple[float, float] | None, Any, Skipped | None, StreamState | None]


class BatchLoader:
    """Load the batches of one loader from a dataset.

    Unlike torch's fetcher, it seeds the global generators before each sample, from the sample's position in the epoch,
    and collates plain tensors into recycled memory.

    Args:
        dataset: Map-style dataset.
        allocator: Memory for large collated tensors; None for fresh memory.
        inline: True in the trainer's process: its generators, worker info and collate functions are restored after each
            call.
    """

    def __init__(
        self, dataset: Any, spec: LoaderSpec, allocator: Allocator | None = None, *, inline: bool = False
    ) -> None:
        self._dataset = dataset
        self._spec = spec
        self._inline = inline
        # Adds to an exception what was being loaded; the worker's name is added on the way to the trainer.
        self._name: Callable[[BaseException, str], None] = add_note if inline else name_sample
        default = default_collate if spec.auto_collation else default_convert
        self._collate: Callable[[Any], Any] = default if spec.collate_fn is None else spec.collate_fn
        self._collate_tensors = TensorCollator(allocator)
        self._missing: list[tuple[Any, Exception]] = []  # samples of the present batch, and why
        self._worker_info: Any = None
        self._begin()
        if not spec.num_workers:
            return
        # Arguments in all supported versions of torch.
        self._worker_info = torch_worker.WorkerInfo(  # type: ignore[no-untyped-call, unused-ignore]  # before 2.12
            id=spec.worker_id, num_workers=spec.num_workers, seed=spec.base_seed + spec.worker_id, dataset=dataset
        )
        with _trainer_restored() if inline else nullcontext():
            torch_worker._worker_info = self._worker_info
            if get_worker_info() is not self._worker_info:  # a private name, which a new version may read no more
                raise RuntimeError(
                    f"get_worker_info() of torch {torch.__version__} does not give what a worker has set, so all "
                    "workers would read the whole of a stream: this version of rpcdataloader needs an older torch"
                )
            seeding.set_random_seeds(spec.base_seed, spec.worker_id)
            if spec.worker_init_fn is not None:
                try:
                    spec.worker_init_fn(spec.worker_id)
                except StopIteration as stop:
                    raise stopped("worker_init_fn") from stop
                except BaseException as error:
                    self._name(error, f"worker_init_fn({spec.worker_id})")
                    raise

    def start_epoch(self, epoch: int, first_position: int) -> None:
        """Begin another pass: at the beginning of the dataset, with the random numbers of ``epoch``."""
        self._spec = self._spec.at_epoch(epoch, first_position)
        self._begin()

    def _begin(self) -> None:
        """Complete the beginning of a pass."""

    def go_on(self) -> None:
        """Go on where a stream was left, before the first batch, whose time may be limited."""

    def leave(self) -> None:
        """End the pass, perhaps before its end."""

    def load(self, indices: Any, position: int, batch_number: int, part: int = WHOLE) -> Loaded:
        """Load one batch, or a part of one, which others load the rest of.

        In place of a part's batch come the kind of its samples and what they are collated to; None if parts of this
        batch cannot be joined, or if collating them raises an exception: the whole batch then raises its own.

        Args:
            indices: List of indices or, without automatic collation, one index.
            position: Position of the first sample in this epoch of this rank's loader, from 0.
            batch_number: Number of the batch of this rank's loader in this epoch, from 0.
            part: ``WHOLE``, or which part it is.

        Raises:
            Exception: An exception of the dataset or the collate function; a ``RuntimeError`` for ``StopIteration``.
        """
        if self._inline:
            with _trainer_restored():
                return self._load(indices, position, batch_number, part)
        # Without a context manager, which would cost as much as collating a few numbers.
        try:
            return self._load(indices, position, batch_number, part)
        finally:
            seeding.end_sample()

    def _load(self, indices: Any, position: int, batch_number: int, part: int) -> Loaded:
        torch_worker._worker_info = self._worker_info
        if default_collate_fn_map.get(torch.Tensor) is not self._collate_tensors:
            self._collate_tensors.install()
        if part and not self._makes_parts:
            return None, None, None, None
        start = time.perf_counter()
        whereabouts.batch[0] = batch_number + 1
        samples = self._fetch(indices, position, batch_number)
        whereabouts.sample[0] = DONE
        if whereabouts.fetched is not None:
            whereabouts.fetched()
        fetched = time.perf_counter()
        lacks, batch = self._skipped(samples), None
        try:
            if lacks is None or not lacks.is_whole:
                collate = self._collate_part if part else self._collate_samples
                batch = collate(samples, batch_number)
        except BaseException as error:
            self._name(error, f"collating {self._describe(indices, batch_number)}")
            raise
        if self._collate_tensors.rows is not None:
            self._collate_tensors.rows.begin(0)
        return (fetched - start, time.perf_counter() - fetched), batch, lacks, self._state()

    def _skipped(self, samples: Any) -> Skipped | None:
        """Describe what the present batch lacks; None if it is complete."""
        # Cleared before the next batch: exceptions refer to their frames.
        missing, self._missing = self._missing, []
        return skipped(missing, is_whole=not samples) if missing else None

    def _state(self) -> StreamState | None:
        """The state of the stream; None without one."""
        return None

    def _describe(self, indices: Any, batch_number: int) -> str:
        """Name a batch in a message."""
        return f"batch {batch_number} of indices {describe_indices(indices)}"

    def _collate_samples(self, samples: Any, batch_number: int) -> Any:
        """Collate the samples of a batch."""
        if self._collate not in _TORCH_COLLATE or registered():
            self._begin_sample(batch_number, BATCH)
        try:
            return self._collate(samples)
        except StopIteration as stop:
            raise stopped("collate_fn") from stop

    @property
    def _makes_parts(self) -> bool:
        """Whether parts of a batch may be joined: samples are fetched one by one, and collated by torch's function."""
        return self._collate is default_collate and not registered() and not self._loads_at_once(self._getitems)

    def _collate_part(self, samples: Any, batch_number: int) -> Any:
        """Collate the samples of a part; returns None if it cannot be joined with others."""
        try:
            kinds = set(map(kind_of, samples))
            if len(kinds) == 1 and self._makes_parts:
                return kinds.pop(), self._collate_samples(samples, batch_number)
        except Exception:
            logger.debug("batch %d is made as a whole", batch_number, exc_info=True)
        return None

    @property
    def _getitems(self) -> Any:
        """The dataset's method for several samples; None without one. Asked the way torch asks."""
        return (getattr(self._dataset, "__getitems__", None) or None) if self._spec.auto_collation else None

    def _loads_at_once(self, getitems: Any) -> bool:
        """Whether the dataset loads whole batches."""
        return getitems is not None and loads_batches(getitems)

    def _fetch(self, indices: Any, position: int, batch_number: int) -> Any:
        self._missing = []
        dataset, auto_collation = self._dataset, self._spec.auto_collation
        getitems = self._getitems
        at_once = self._loads_at_once(getitems)
        is_one_call = at_once or not auto_collation
        steps: Iterable[tuple[int, Any]] = ((position, indices),) if is_one_call else enumerate(indices, position)
        rows = None if is_one_call or not isinstance(indices, Sized) else self._begin_rows(len(indices))
        samples: list[Any] = []
        for at, wanted in steps:
            whereabouts.sample[0] = ALL if at_once else at
            num_retries = 0
            while True:
                self._begin_sample(at)
                try:
                    try:
                        if getitems is None:
                            sample = dataset[wanted]
                        elif at_once:
                            sample = getitems(wanted)
                        else:
                            (sample,) = getitems([wanted])
                        samples.append(sample if rows is None else rows.place(sample, len(samples)))
                    except StopIteration as stop:
                        method = "__getitems__" if at_once else "__getitem__"
                        raise stopped(f"{type(dataset).__name__}.{method}({describe_indices(wanted)})") from stop
                except BaseException as error:
                    what = f"{'indices' if at_once else 'index'} {describe_indices(wanted)} at position {at}"
                    # The stream itself has raised that, and would have skipped what can be skipped.
                    is_final = isinstance(wanted, FailedSample)
                    can_retry = num_retries < self._spec.max_retries and isinstance(error, self._spec.retry_on)
                    if can_retry and not is_final:
                        _pause(num_retries, what, error)
                        num_retries += 1
                        continue
                    if is_final or not self._skip(wanted if at_once else [wanted], error):
                        self._name(error, f"{what}, batch {batch_number}")
                        raise
                break
        if is_one_call and samples:
            # A list of our own, as the dataset may keep the one that it returns.
            return samples[0].copy() if at_once and type(samples[0]) is list else samples[0]
        return samples

    def _begin_rows(self, num_samples: int) -> Rows | None:
        """The rows of a batch; None where a function of the user collates, which may keep or change samples."""
        rows = self._collate_tensors.rows
        if rows is None or self._collate is not default_collate or registered():
            return None
        rows.begin(num_samples)
        return rows

    def _skip(self, indices: Sequence[Any], error: BaseException) -> bool:
        """Whether samples are left out because of an exception; if so, leave them out."""
        if not self._spec.skips or not isinstance(error, Exception) or isinstance(error, RPCError):
            return False
        self._missing += [(index, error) for index in indices]
        return True

    def _begin_sample(self, number: int, purpose: bytes = SAMPLE) -> None:
        """Seed the generators for the sample at a position or, with ``BATCH``, for collating a batch."""
        spec = self._spec
        # The same number on two ranks is another sample or batch.
        number = number * spec.world_size + spec.rank
        number += spec.first_position if purpose is SAMPLE else spec.first_batch
        seeds = seeding.derive_seeds(purpose, spec.base_seed, spec.epoch, number)
        seeding.begin_sample(seeds, reads_ahead=spec.iterable and purpose is SAMPLE)


def _pause(num_retries: int, what: str, error: BaseException) -> None:
    """Wait before a sample is retried after an exception."""
    delay = min(RETRY_PAUSE * 2**num_retries, MAX_RETRY_PAUSE)
    logger.warning("%s is retried in %g s: %s: %s", what, delay, type(error).__name__, error)
    time.sleep(delay)


# Seconds that a thread which loads in this process lets another one finish first. Longer, and that one may be waiting
# for this one: a thread of its dataset that loops over a loader.
_PATIENCE = 30.0

TOGETHER = (
    "two threads load in this process, of which one may wait for the other, so they go on at the same time, and from "
    "now on share the random generators, as with torch's loader"
)


@dataclass(eq=False)
class _Load:
    """A batch that is loaded in this process, and what restores the state that its thread has found."""

    thread: int
    restore: Callable[[], None]
    process: int = field(default_factory=os.getpid)

    def waits_for(self, loads: list[_Load]) -> bool:
        """Whether others load, and this thread does not; of those that a child of a fork knows of, none does."""
        threads = {other.thread for other in loads if other.process == self.process}
        return bool(threads) and self.thread not in threads


class _Loads:
    """The batches that are loaded in this process: by one thread after the other, as loading changes its state.

    What is restored at the end is right in any order: who ends before a later one leaves that to it.
    """

    def __init__(self) -> None:
        self._condition = inherited(Condition())
        self._loads: list[_Load] = []  # one inside the other, or of several threads
        self._waits = True  # until it was in vain

    def begin(self, load: _Load) -> None:
        """Note the state of the process, when no other thread loads, or has for long."""
        is_told, end = False, time.monotonic() + _PATIENCE
        with self._condition:
            while self._waits and load.waits_for(self._loads):
                if end <= (now := time.monotonic()):
                    self._waits, is_told = False, True
                else:
                    self._condition.wait(end - now)
            load.restore = _present_state()
            self._loads.append(load)
        if is_told:
            logger.warning(TOGETHER)

    def end(self, load: _Load) -> None:
        """Restore that state, unless it was not noted."""
        with self._condition:
            if load in self._loads:
                place = self._loads.index(load)
                del self._loads[place]
                if place < len(self._loads):
                    self._loads[place].restore = load.restore
                else:
                    load.restore()
                self._condition.notify_all()


_loads = _Loads()


def _present_state() -> Callable[[], None]:
    """Return a function that restores what loading changes in the trainer's process."""
    restore_generators = seeding.present_state()
    worker_info = torch_worker._worker_info
    collate_tensors = default_collate_fn_map[torch.Tensor]
    # Of a worker whose dataset has a loader.
    batch, sample, fetched = whereabouts.batch[0], whereabouts.sample[0], whereabouts.fetched

    def restore() -> None:
        whereabouts.batch[0], whereabouts.sample[0], whereabouts.fetched = batch, sample, fetched
        torch_worker._worker_info = worker_info
        default_collate_fn_map[torch.Tensor] = collate_tensors
        restore_generators()

    return restore


@contextmanager
def _trainer_restored() -> Iterator[None]:
    """Undo what loading changes in the trainer's process.

    A worker keeps worker info and collate function between batches, also for threads of the dataset.
    """
    loads, load = _loads, _Load(threading.get_ident(), lambda: None)
    try:
        loads.begin(load)
        whereabouts.fetched = None
        yield
    finally:
        loads.end(load)
