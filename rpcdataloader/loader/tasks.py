"""Tasks of a pass: batches from the sampler, numbered, as requests to workers; and their delivery.

A signal handler, as of Ctrl-C, may raise at any call. ``PassIterator.__next__`` ends the pass then, except where the
sampler is asked, and where is counted what was returned: these go on with the next call. So what they take or count is
stored *in one step*, by one call or without any.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import logging
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from rpcdataloader.diagnosis.records import Probe
from rpcdataloader.errors import BadSamplesError, SerializationError
from rpcdataloader.fetch.batch_loader import StreamState
from rpcdataloader.fetch.raw import FailedSample, RawIndices
from rpcdataloader.fetch.samples import ALL, DONE, FIRST_PART, OTHER_PART, Skipped, describe_indices, is_batch
from rpcdataloader.host.signals import is_interrupt, suppress_errors
from rpcdataloader.wire.digests import digest
from rpcdataloader.wire.exceptions import loads_exception
from rpcdataloader.wire.pickling import NO_TENSORS, Encoded, dumps

logger = logging.getLogger("rpcdataloader.loader")

OTHER_ORDER = (
    "the sampler gives other indices now than those that were delivered: if it draws from a generator of its own, seed "
    "that, or keep it as a torch.Generator in the sampler's attribute generator, which is saved; or give the sampler "
    "state_dict() and load_state_dict()"
)

OTHER_NEXT = (
    "the sampler goes on with other batches than those that followed when the state was saved: the state_dict() of a "
    "sampler must tell the position after the batch that it gave last, and all that decides about the rest; without a "
    "state_dict(), the order must be drawn when the pass begins, or from a generator from which nothing else draws in "
    "the pass. To go on in spite of that: del state['digest']"
)

_REMEDY = "begin another pass over the loader, or go on after the last batch with load_state_dict(state_dict())"


@dataclass(slots=True)
class Task:
    """A batch to load: indices from the sampler, and the request for them."""

    indices: Any
    number: int  # number in the whole pass, of which this process may have resumed only the rest
    position: int  # position of its first sample in the epoch
    num_samples: int
    digest: int | None = None  # of the indices; None if only the state of the sampler matters
    sampler_state: Any = None  # state of the sampler after this batch, if it has one
    request: Encoded = None  # type: ignore[assignment]  # to a worker
    # Waits for the stack of the last worker that exceeded the time limit.
    stack: Callable[[], str] | None = None
    is_last: bool = False  # True if it is probably the last batch
    whole: Task | None = None  # the batch that this is a part of
    probe: Probe | None = None  # times of its way so far, if measured; each copy that is sent gets its own


@dataclass(slots=True, eq=False)
class TaskSource:
    """Tasks from a sampler, numbered by batch and by the position of their first sample in the epoch."""

    samples: Iterator[Any]
    auto_collation: bool
    progress: Progress | None = None  # learns where the sampler ends
    # Number of the next batch in the whole pass. The progress counts delivered ones, the engine those of this process.
    number: int = 0
    position: int = 0  # position of its first sample
    # Batches to leave out: the number of each, and its digest, if known.
    leave_out: Mapping[int, int | None] = field(default_factory=dict)
    # Function that gives the sampler's state after each batch; None without a state.
    get_state: Callable[[], Any] | None = None
    makes_requests: bool = False
    num_expected: int | None = None  # number of batches of the sampler, by its length
    # Function that tells whether the sampler gives indices without waiting for a stream; None if it always does.
    is_ready: Callable[[], bool] | None = None
    # Function to call before the first batch is drawn. Its result is called afterwards, with a list of it, empty at the
    # sampler's end; it returns another iterator over the sampler, and its ``get_state``, if the pass must begin again.
    watch: Callable[[], Callable[[list[Any]], tuple[Iterator[Any], Callable[[], Any] | None] | None] | None] | None = (
        None
    )
    drawn: list[Any] = field(default_factory=list)  # the next batch, from when it is drawn until it is a task
    task: Task | None = None  # the next task, from when it is drawn until the consumer takes it
    _is_over: bool = False  # True once the sampler is at its end; one that is its own iterator may begin again
    _kept_error: Exception | None = None  # of the sampler, in place of the next batch
    _error: str = ""  # name of the exception that has ended the sampler

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        self.draw()
        if self.task is None:
            raise StopIteration
        task, self.task = self.task, None
        return task

    def draw(self) -> None:
        """Draw :attr:`task`, unless it is here; None at the sampler's end, and if an exception has ended it before.

        User code runs here: after any exception, this can be called again, and nothing is lost.

        Raises:
            SerializationError: The indices cannot be pickled.
            Exception: The batch that the sampler has given cannot be iterated over; the next one can be drawn.
        """
        while self.task is None:
            self.look_ahead()
            if not self.drawn:
                return
            indices = self.drawn[0]
            has_numbers = self.auto_collation and is_batch(indices)
            if has_numbers or type(indices) is list:
                indices = kept(indices)
            if not self.makes_requests and self.knows_states:
                # Loaded here after the next one is drawn, for which the sampler may use the same objects again.
                with suppress_errors():
                    indices = copy.deepcopy(indices)
            if self.auto_collation and not has_numbers and isinstance(indices, Iterable):
                # torch only iterates over others, such as generators.
                indices, has_numbers = self._read(indices), True
            # Other types become an error where the batch is loaded.
            num_samples = len(indices) if has_numbers else 1
            task = Task(indices, self.number, self.position, num_samples)
            is_wanted = task.number not in self.leave_out
            try:
                if is_wanted and self.get_state is not None:
                    first = self.progress.first if self.progress is not None and task.number == 0 else None
                    task.sampler_state = self.get_state() if first is None else first[1]
                # A resumed pass compares them: not those of a stream, or if a state of the sampler suffices.
                progress = self.progress
                is_compared = progress is None or (
                    not progress.streams and (task.sampler_state is None or progress.sampler is None)
                )
                if is_compared or self.knows_states:
                    task.digest = digest(indices)  # now: the sampler, or the dataset, may change them
                if is_wanted and self.makes_requests:
                    task.request = load_request(task)
            except SerializationError:
                self.drawn = []
                raise
            if is_wanted and self.progress is not None and task.digest is not None:
                self.progress.note_upcoming(task.number, task.digest)
            # In one step: what has raised leaves no gap.
            self.position += num_samples
            self.number += 1
            task.is_last = self.number == self.num_expected
            self.drawn = []
            if is_wanted:
                self.task = task
            elif self.leave_out[task.number] not in (None, task.digest):
                raise ValueError(OTHER_ORDER)

    def _read(self, indices: Iterable[Any]) -> list[Any]:
        """The indices of a batch that can only be iterated over, often once."""
        try:
            self.drawn[:] = map(list, (indices,))  # in one step
        except BaseException as exc:
            if not is_interrupt(exc):
                self.drawn = []
                raise
            # Ctrl-C within the batch: what was read of it is lost, and perhaps the sample after that.
            if isinstance(indices, Iterator) and indices is self.drawn[0]:
                self._error, self._is_over, self.drawn = type(exc).__name__, True, []
            raise
        return self.drawn[0]  # type: ignore[no-any-return]

    def look_ahead(self) -> None:
        """Draw the next batch, or note the end."""
        if self.drawn or self._is_over:
            return
        if (error := self._kept_error) is not None:
            self._kept_error = None
            raise error
        watched = None if self.watch is None else self.watch()
        try:
            # In one step.
            self.drawn.extend(map(next, (self.samples,)))
            while watched is not None and (again := watched(self.drawn)) is not None:
                (self.samples, self.get_state), self.drawn = again, []
                self.drawn.extend(map(next, (self.samples,)))
            self.watch = None
            self._is_over = not self.drawn
        except BaseException as exc:
            # A generator that raises gives nothing more, as at its end. The exception may also come after it has given.
            has_ended = inspect.isgenerator(self.samples) and self.samples.gi_frame is None
            self._error = type(exc).__name__ if has_ended else ""
            raise
        if (progress := self.progress) is None:
            return
        if not self.drawn and not self._error:
            progress.end = self.number
        if self.number == 0 and self.get_state is not None and progress.sampler is None:
            if self._error and not self.drawn:
                return
            if (state := self.get_state()) is None:
                self.get_state = None  # there is none after all
            elif self.drawn:
                progress.first = kept(self.drawn[0]), state
            else:
                progress.sampler = state  # which may count an epoch that has no batch

    def _can_be_digested(self) -> bool:
        """Whether the indices of the next batch can be read more than once."""
        return not self.auto_collation or is_batch(self.drawn[0]) or not isinstance(self.drawn[0], Iterable)

    @property
    def knows_states(self) -> bool:
        """Whether the sampler has a state of its own, and is not the source of a ``transform``."""
        return self.get_state is not None and self.is_ready is None

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Let a function be called, in any thread, each time that the sampler may no longer wait for a stream."""
        if self.is_ready is not None:
            self.samples.when_ready(wake)  # type: ignore[attr-defined]  # the source of a transform

    def find_end(self) -> None:
        """Learn whether the last task was the last: the state of a sampler after it may be that of the next epoch.

        And a state after the last batch is that of an end, which fits more loaders than a middle.
        """
        if self.knows_states or (self.task is not None and self.task.is_last):
            try:
                self.look_ahead()
            except Exception as error:  # which comes in its turn
                if is_interrupt(error):
                    raise
                self._kept_error = error
            self.note_next()

    def note_next(self) -> None:
        """Note for a state that the next batch is drawn, which is no task yet."""
        if self.drawn and self.progress is not None:
            self.progress.note_upcoming(self.number, digest(self.drawn[0]) if self._can_be_digested() else None)

    def check_end(self) -> None:
        """Raise a ``RuntimeError`` if an exception has ended the sampler before its end."""
        if self._error:
            raise RuntimeError(f"{self._error} has ended the sampler before its end; {_REMEDY}")


@dataclass(eq=False)
class ResumedSource(TaskSource):
    """The tasks of a resumed pass: first those that were drawn, and not delivered, when its state was saved."""

    again: list[Task] = field(default_factory=list)  # in reverse

    def draw_again(self, num_asked: int) -> None:
        """Ask the sampler until it was asked as often as in the saved pass.

        Raises:
            ValueError: It gives other batches in place of delivered ones.
        """
        # Otherwise, a call of ``draw`` goes on past batches that are left out.
        leave_out, self.leave_out = self.leave_out, {}
        tasks = []
        while self.number + self._is_over < num_asked:
            super().draw()
            if self.task is None:
                break
            tasks.append(self.task)
            self.task = None
        self.leave_out = leave_out
        for task in reversed(tasks):
            if task.number not in leave_out:
                self.again.append(task)
            elif leave_out[task.number] not in (None, task.digest):
                raise ValueError(OTHER_ORDER)

    def draw(self) -> None:
        if self.task is None and self.again:
            self.task = self.again.pop()
        super().draw()


def interruption(error: BaseException | None) -> RuntimeError:
    """The failure of a pass after an exception between two steps of the consumer."""
    name = "an exception" if error is None else type(error).__name__
    return RuntimeError(f"{name} has interrupted this pass over the loader; {_REMEDY}")


def kept(indices: Any) -> Any:
    """Indices that stay as they are when the sampler fills the same list or array again."""
    if type(indices) is list or isinstance(indices, np.ndarray):
        return indices.copy()
    # A method __getitems__ gets arrays and ranges as they are.
    return indices.detach().clone() if isinstance(indices, torch.Tensor) else indices


def make_part(task: Task, first: int, num_samples: int) -> Task | None:
    """A part of a batch: this number of samples; None if its indices are others than plain integers in a list."""
    if type(task.indices) is not list or set(map(type, task.indices)) != {int}:
        return None
    indices = task.indices[first : first + num_samples]
    part = Task(indices, task.number, task.position + first, num_samples, whole=task, probe=task.probe)
    part.request = load_request(part)
    return part


def load_request(task: Task) -> Encoded:
    """Return the content of a request for a batch; of its blocks, which are those of raw samples, it has no digest."""
    content: tuple[Any, ...] = task.indices, task.position, task.number
    if task.whole is not None:
        content += (FIRST_PART if task.position == task.whole.position else OTHER_PART,)
    large: list[pickle.PickleBuffer] = []
    first = next(iter(task.indices), None) if isinstance(task.indices, (list, tuple)) else task.indices
    # torch would pickle all the memory that a tensor is a view of, and Python call the constructor of an exception.
    if isinstance(first, (torch.Tensor, FailedSample)):
        return dumps(content, name="indices", in_band=True)
    try:
        pickled = pickle.dumps(content, protocol=5, buffer_callback=large.append)
        if isinstance(task.indices, RawIndices):
            return Encoded(pickled + NO_TENSORS, [block.raw() for block in large])
        # Not of a class of the training script, which must be sent along.
        if not large and b"_main__" not in pickled:
            return Encoded(pickled + NO_TENSORS, [])
    except Exception as error:
        if is_interrupt(error):
            raise
        logger.debug("too complex for the plain pickler: %r", task.indices, exc_info=True)
    return dumps(content, name="indices", in_band=True)


def describe(task: Task) -> str:
    """Name a batch in an error message; batches of a stream have no indices."""
    indices = task.indices[0] if isinstance(task.indices, list) and task.indices else task.indices
    return f"batch {task.number}" + ("" if indices is None else f" (indices {describe_indices(task.indices)})")


def describe_end(task: Task, sample: int) -> str:
    """Describe the end of a worker's last task; ``sample`` is a number of its whereabouts."""
    if sample in (ALL, DONE):
        return f"{'while it' if sample == ALL else 'after it had'} loaded batch {task.number}"
    index, offset = task.indices, sample - task.position
    if is_batch(index) and len(index) == task.num_samples:
        index = index[offset] if 0 <= offset < task.num_samples else None
    # Batches of a stream have no indices.
    where = f"{sample} of its stream" if index is None else describe_indices(index)
    return f"while it loaded sample {where}"


class Returned(NamedTuple):
    """A batch, or an exception in its place, as ``next`` returns it to the consumer."""

    number: int
    num_samples: int
    digest: int | None
    sampler_state: Any
    stream: int | None  # stream of the batch; None for a map-style dataset
    state: StreamState | None  # progress of the stream; None where an exception has left it unknown
    lacks: Skipped | None


@dataclass(slots=True)
class Progress:
    """Progress of a pass."""

    base_seed: int  # seed of the pass, or of all passes of persistent workers
    epoch: int  # number from 0, which grows with persistent workers
    num_batches: int = 0  # number of batches delivered without a gap
    num_samples: int = 0
    # Later delivered batches by number: their number of samples, their digest, and the state of the sampler after them
    # (``in_order=False``).
    ahead: dict[int, tuple[int, int | None, Any]] = field(default_factory=dict)
    # Digest of the indices delivered without a gap; None for a sampler with a state of its own, and if resumed from a
    # state of an earlier version without it.
    digest: int | None = 0
    # States of an iterable-style dataset's streams, each after its last delivered batch.
    streams: list[StreamState] = field(default_factory=list)
    # The last state of each stream whose end was answered, which may be before its last batch is delivered.
    ends: dict[int, StreamState] = field(default_factory=dict)
    before: list[StreamState] = field(default_factory=list)  # those of the pass before, see :meth:`last_streams`
    is_elsewhere: bool = False  # True while the dataset of this process is not yet where the only stream is
    turn: int = 0  # stream whose batch comes next
    num_settled: int = 0  # number of batches delivered in this process, without empty ones and ``returned``
    # Delivered batches that are not in these numbers yet. The consumer adds one in one step, as the last thing before
    # it returns it: so no state lacks a batch that was returned, or has one that was lost.
    returned: tuple[Returned, ...] = ()
    is_midway: bool = False  # True while the consumer takes the next batch: an exception ends the pass then
    leg: int = 0  # number of times that the pass has gone on with another number of ranks
    num_skipped: int = 0  # number of samples missing in the delivered batches
    # True while no batch was left out as a whole, so that other ranks have delivered batches of the same numbers.
    in_step: bool = True
    finished: bool = False
    is_replaced: bool = False  # True while the loader has a state from which another pass is to go on
    # State at the beginning of the pass: generators, rank and samplers.
    start: dict[str, Any] = field(default_factory=dict)
    end: int | None = None  # number of batches of the sampler, once it is at its end
    sampler: dict[str, Any] | None = None  # state of a sampler that has one, after the batches without a gap
    # Digest of the last batch delivered without a gap; None if others were returned before it that come after it.
    last: int | None = field(default=None, compare=False)
    # The first batch of such a sampler, once it is drawn, and the state after it: some samplers do not know before it
    # which epoch they are in.
    first: tuple[Any, dict[str, Any]] | None = None
    # Digests, if known, of the batches drawn and not delivered, by number: they must be found again.
    upcoming: dict[int, int | None] = field(default_factory=dict)

    def note_upcoming(self, number: int, batch_digest: int | None) -> None:
        """Note the digest of a batch that was drawn, and forget those delivered."""
        upcoming = self.upcoming
        while (first := next(iter(upcoming), number)) < self.num_batches:
            upcoming.pop(first, None)
        upcoming[number] = batch_digest

    def drawn(self, most: float = math.inf) -> tuple[int, int | None]:
        """How often the sampler was asked, its end included; and a digest of the batches drawn and not delivered.

        Args:
            most: Number of the first batch that the digest leaves out.
        """
        num_drawn, found = max([self.num_batches - 1, *self.upcoming, *self.ahead]) + 1, 0
        for number in range(self.num_batches, int(min(num_drawn, most))):
            if number not in self.ahead:
                if (batch := self.upcoming.get(number)) is None:
                    return num_drawn + (self.end is not None), None
                found = join_digests(found, batch)
        return num_drawn + (self.end is not None), found

    def last_streams(self) -> list[StreamState]:
        """The last state known of each stream: ``ended`` where it was read to its end, and not left before."""
        if not self.streams:
            return []
        streams = self.copy().settle().known_streams()
        if self.finished:
            return [stream._replace(ended=True) for stream in streams]
        before = self.before or streams
        return [each if each.num_samples or each.ended else last for each, last in zip(streams, before, strict=True)]

    def known_streams(self) -> list[StreamState]:
        """The states of the streams, where it is known that one has ended with a full batch: nothing else tells that.

        The state of its end may be that of its next beginning, as of a loader of torchdata's nodes.
        """
        ends = self.ends
        return [
            stream._replace(ended=True)
            if stream.owner and number in ends and ends[number].num_batches == stream.num_batches
            else stream
            for number, stream in enumerate(self.streams)
        ]

    @property
    def num_yielded(self) -> int:
        """Number of batches delivered in this process, without empty ones."""
        return self.num_settled + len(self.returned)

    def copy(self) -> Progress:
        """Return a copy that does not change with this."""
        # What changes is read before the call: another thread may be in ``next``.
        return dataclasses.replace(
            self,
            num_settled=self.num_settled,
            returned=self.returned,
            num_batches=self.num_batches,
            num_samples=self.num_samples,
            ahead={**self.ahead},
            digest=self.digest,
            streams=[*self.streams],
            turn=self.turn,
            num_skipped=self.num_skipped,
            in_step=self.in_step,
            sampler=self.sampler,
            upcoming={**self.upcoming},
        )

    def settle(self) -> Progress:
        """Count what was returned; returns this object."""
        while self.returned:
            self._count(self.returned[0])
        return self

    def _count(self, first: Returned) -> None:
        """Count the first of those returned, in one step."""
        number, num_samples, batch_digest, sampler_state, stream, state, lacks = first
        num_settled, num_skipped, in_step = self.num_settled + 1, self.num_skipped, self.in_step
        if lacks is not None:
            num_skipped += lacks.num_samples
            num_settled -= lacks.is_whole
            in_step &= not lacks.is_whole
        num_batches, total, found = self.num_batches, self.num_samples, self.digest
        sampler, ahead, turn, last = self.sampler, self.ahead, self.turn, self.last
        # A sampler with a state of its own need not be compared, once there is one to go on from.
        is_ahead = stream is None and number != num_batches
        is_compared = sampler_state is None or (is_ahead and sampler is None)
        batch: tuple[int, int | None, Any] = num_samples, batch_digest if is_compared else None, sampler_state
        if stream is not None:
            # Threads that share an iterator may return batches in another order.
            if state is not None and state.num_batches >= self.streams[stream].num_batches:
                self.streams[stream] = state
            num_batches += 1
            turn = stream + 1
        elif is_ahead:
            # In place: there may be thousands past a slow one.
            ahead[number] = batch
        else:
            while True:
                num_samples, batch_digest, sampler_state = batch
                num_batches += 1
                total += num_samples
                if found is not None:
                    found = None if batch_digest is None else join_digests(found, batch_digest)
                sampler = sampler_state
                if num_batches not in ahead:
                    last = first.digest if num_batches == number + 1 else None
                    break
                batch = ahead[num_batches]
            if ahead:
                ahead = {number: batch for number, batch in ahead.items() if number > num_batches}
        # In one step. Other threads may have returned more.
        self.returned = self.returned[1:]
        self.num_settled, self.num_skipped, self.in_step = num_settled, num_skipped, in_step
        self.num_batches, self.num_samples, self.digest = num_batches, total, found
        self.sampler, self.ahead, self.turn, self.last = sampler, ahead, turn, last

    def report_skipped(self, skipped: Skipped, where: str, max_skipped: int) -> BadSamplesError | None:
        """Report what the next batch lacks.

        Args:
            where: Process that loaded the batch, in words.

        Returns:
            The error in place of the batch, if then more than ``max_skipped`` samples are missing in this pass.
        """
        num_skipped = self.num_skipped + skipped.num_samples
        if skipped.num_samples and num_skipped > max_skipped:
            number = "1 sample was" if num_skipped == 1 else f"{num_skipped} samples were"
            error = BadSamplesError(
                f"{number} skipped in this pass, more than max_skipped={max_skipped}; at last "
                f"{where} skipped {skipped.text}"
            )
            error.__cause__ = loads_exception(skipped.error)
            return error
        logger.warning("%s skipped %s" if skipped.num_samples else "%s: %s", where, skipped.text)
        return None


def skip(samples: Iterator[Any], num_batches: int, *, auto_collation: bool) -> tuple[int, int]:
    """Skip batches; returns their number of samples, and their digest.

    Args:
        samples: Iterator over the sampler, at its beginning or at its own saved position.
        num_batches: Number of batches to skip; without ``auto_collation``, of samples.

    Raises:
        ValueError: The sampler has fewer batches.
    """
    source, found = TaskSource(samples, auto_collation), 0
    for task in itertools.islice(source, num_batches):
        found = join_digests(found, task.digest or 0)
    if source.number < num_batches:
        raise ValueError(
            f"the saved pass had delivered {num_batches} batches, but the sampler has only {source.number} now: have "
            "dataset, batch size or sampler changed?"
        )
    return source.position, found


def join_digests(before: int, batch: int) -> int:
    """The digest of delivered batches and of the next one: of their digests, which were taken when they were drawn."""
    return (before * 0x100000001B3 + batch) & 0xFFFF_FFFF_FFFF_FFFF
