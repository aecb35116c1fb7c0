"""One pass over a sampler: how it begins, how far it has come, and how a later process goes on from there.

What a checkpoint keeps is where the random generators stood when the pass began, and how many batches were delivered.
To go on, the sampler is started again in the same state and skips as much; no sample is loaded twice for that.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler

from rpcdataloader.client.sharing import Partition, current_partition
from rpcdataloader.loader.remote import LoaderSpec, StreamState
from rpcdataloader.loader.sampler import ResumableDistributedSampler
from rpcdataloader.wire.generators import get_states, set_states, states_from_plain, states_to_plain

_VERSION = 1

# Bytes of batches that are on their way or wait to be consumed; at least one batch is always allowed.
MAX_IN_FLIGHT_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class PassSettings:
    """What an iterator takes from its loader.

    Attributes:
        sampler: The batch sampler or, without automatic batching, the sampler.
        iterable: The dataset is iterable-style.
        generator: Where the base seed is drawn; None for torch's default.
        timeout: Seconds to wait for a batch; 0 for no limit.
        partition: This process among the trainers, for the seeds.
    """

    sampler: Any
    auto_collation: bool
    iterable: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None
    timeout: float = 0.0
    prefetch_factor: int = 2
    in_order: bool = True
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES
    pin_memory: bool = False
    persistent_workers: bool = False
    partition: Partition = field(default_factory=current_partition)


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of a pass, at the moment and in the way torch's loader does, so that both leave the same state."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


@dataclass(slots=True)
class Progress:
    """How far a pass has come.

    Attributes:
        base_seed: Of the pass, or of all passes of persistent workers.
        epoch: From 0, grows with persistent workers.
        num_batches: So many were delivered without a gap.
        num_samples: In them.
        ahead: Numbers of later ones that were delivered too, and how many samples they have (``in_order=False``).
        streams: Of an iterable-style dataset, each after the last batch of it that was delivered.
        turn: The stream whose batch comes next.
        num_yielded: Batches delivered in this process.
        finished: Everything was delivered.
        start: What the pass began with: states of the generators, and of the sampler.
    """

    base_seed: int
    epoch: int
    num_batches: int = 0
    num_samples: int = 0
    ahead: dict[int, int] = field(default_factory=dict)
    streams: list[StreamState] = field(default_factory=list)
    turn: int = 0
    num_yielded: int = 0
    finished: bool = False
    start: dict[str, Any] = field(default_factory=dict)

    def delivered(self, number: int, num_samples: int) -> None:
        """Batch ``number`` of the sampler was handed to the consumer."""
        self.num_yielded += 1
        self.ahead[number] = num_samples
        while self.num_batches in self.ahead:
            self.num_samples += self.ahead.pop(self.num_batches)
            self.num_batches += 1

    def stream_delivered(self, stream: int, state: StreamState | None) -> None:
        """A batch of a stream was handed to the consumer, or an exception, which has no state."""
        self.num_yielded += 1
        self.num_batches += 1
        if state is not None:
            self.streams[stream] = state
        self.turn = stream + 1


def stateful_sampler(sampler: Any) -> Any:
    """The sampler, or what it draws from, if it has a state of its own; None if not."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict"):
            return candidate
    return None


def _own_generators(settings: PassSettings) -> list[torch.Generator]:
    """Generators that belong to loader and samplers, each once; only those without one draw from the global ones."""
    owners = (settings, settings.sampler, getattr(settings.sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))


class TaskSource:
    """Tasks from a sampler, numbered by batch and by the position of their first sample in the epoch.

    Args:
        samples: Iterator over the sampler.
        number: Of the first batch.
        position: Of its first sample.
        leave_out: Numbers of batches that are not needed.
    """

    def __init__(
        self,
        samples: Iterator[Any],
        *,
        auto_collation: bool,
        number: int = 0,
        position: int = 0,
        leave_out: Iterable[int] = (),
    ) -> None:
        self._samples = samples
        self._auto_collation = auto_collation
        self._number = number
        self._position = position
        self._leave_out = frozenset(leave_out)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        """Indices, position, batch number.

        Raises:
            StopIteration: The sampler is at its end.
        """
        while True:
            indices = next(self._samples)
            if self._auto_collation and not isinstance(indices, (list, tuple)) and isinstance(indices, Iterable):
                # A sampler may yield tensors, arrays or generators; torch only iterates over them.
                indices = list(indices)
            position, number = self._position, self._number
            self._position += self.num_samples(indices)
            self._number += 1
            if number not in self._leave_out:
                return indices, position, number

    def num_samples(self, indices: Any) -> int:
        """How many samples a batch has."""
        # What is no batch at all is an error where the batch is loaded.
        return len(indices) if self._auto_collation and isinstance(indices, (list, tuple)) else 1


@dataclass(frozen=True, slots=True)
class Order:
    """The samples of this rank in the order of all ranks: ``first + rank``, then every ``world_size``-th.

    Attributes:
        first: Place at which all ranks together begin; above 0 where a sampler goes on in the middle.
    """

    first: int
    rank: int
    world_size: int


@dataclass(slots=True)
class Pass:
    """A pass that has begun.

    Attributes:
        order: Where the samples are in the order of all ranks.
    """

    source: TaskSource
    progress: Progress
    order: Order


def warn_if_longer(num_yielded: int, reported: int | None, name: str) -> None:
    """Warn, as torch does, when an iterable-style dataset gives more than ``len(loader)`` has said.

    To be called by ``__next__`` of an iterator, so that the warning shows the line of the user's loop.

    Args:
        reported: What it said; None if nobody asked.
        name: Of the dataset.
    """
    if reported is not None and num_yielded > reported:
        warnings.warn(
            f"Length of IterableDataset {name} was reported to be {reported} (by len of its loader), but {num_yielded} "
            "samples have been fetched. Does each worker take only its part of the dataset? "
            "torch.utils.data.get_worker_info() says which one it is.",
            stacklevel=3,
        )


def begin_pass(settings: PassSettings, saved: Mapping[str, Any] | None = None) -> Pass:
    """Begin a pass: iterate over the sampler and draw the base seed, in torch's order.

    Args:
        saved: What :func:`to_state` made of the pass to go on with. This changes the global generators; the caller
            puts them back, once the first tasks are drawn.

    Raises:
        ValueError: The state does not fit this loader.
    """
    start = capture_start(settings) if saved is None else restore_start(settings, saved)
    order = _order(settings)
    samples = iter(settings.sampler)
    if saved is None:
        progress = Progress(draw_base_seed(settings.generator), 0, start=start)
        return Pass(TaskSource(samples, auto_collation=settings.auto_collation), progress, order)
    if saved["epoch"] == 0:
        # For its effect on the generator; persistent workers draw it once.
        draw_base_seed(settings.generator)
    progress = progress_of(saved, start)
    samples, progress.num_samples = skip_delivered(settings, saved, samples)
    source = TaskSource(
        samples,
        auto_collation=settings.auto_collation,
        number=progress.num_batches,
        position=progress.num_samples,
        leave_out=progress.ahead,
    )
    return Pass(source, progress, order)


def loader_spec(settings: PassSettings, begun: Pass, worker_id: int, num_workers: int) -> LoaderSpec:
    """What a worker has to know to load for a pass."""
    streams = begun.progress.streams
    return LoaderSpec(
        collate_fn=settings.collate_fn,
        worker_init_fn=settings.worker_init_fn,
        auto_collation=settings.auto_collation,
        iterable=settings.iterable,
        drop_last=settings.drop_last,
        base_seed=begun.progress.base_seed,
        epoch=begun.progress.epoch,
        rank=begun.order.rank,
        world_size=begun.order.world_size,
        worker_id=worker_id,
        num_workers=num_workers,
        first_place=begun.order.first,
        stream=streams[worker_id] if streams else None,
    )


def begin_epoch(settings: PassSettings, base_seed: int, epoch: int) -> Pass:
    """Begin another pass of persistent workers, which keep their base seed as torch's do."""
    start = capture_start(settings)
    order = _order(settings)
    samples = iter(settings.sampler)
    source = TaskSource(samples, auto_collation=settings.auto_collation)
    return Pass(source, Progress(base_seed, epoch, start=start), order)


def to_state(settings: PassSettings, progress: Progress) -> dict[str, Any]:
    """What to keep of a pass: plain containers, numbers and strings, apart from states that are not ours."""
    start = progress.start
    sampler = stateful_sampler(settings.sampler)
    if isinstance(sampler, ResumableDistributedSampler) and start["sampler"] is not None:
        if progress.ahead:
            raise ValueError("a ResumableDistributedSampler cannot be saved with in_order=False: batches are missing")
        consumed = start["sampler"]["start"] + progress.num_samples * sampler.num_replicas
        start = {**start, "sampler": {**start["sampler"], "start": min(consumed, start["sampler"]["length"])}}
    return {
        "version": _VERSION,
        "base_seed": progress.base_seed,
        "epoch": progress.epoch,
        "num_batches": progress.num_batches,
        "num_samples": progress.num_samples,
        "ahead": {str(number): size for number, size in progress.ahead.items()},
        "streams": [list(stream) for stream in progress.streams],
        "turn": progress.turn,
        "finished": progress.finished,
        "generators": [_to_hex(generator.get_state()) for generator in _own_generators(settings)],
        "start": start,
    }


def check_state(state: Mapping[str, Any], *, iterable: bool) -> None:
    """Check that a loader of this kind can go on from a state.

    Raises:
        TypeError: It is no mapping.
        ValueError: It is from something else.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict must be what state_dict() returned, but is a {type(state).__name__}")
    if state.get("version") != _VERSION:
        raise ValueError(
            f"this is no state of an RPCDataloader of this version: its version is {state.get('version')!r}, not "
            f"{_VERSION}"
        )
    if "start" in state and bool(state["streams"]) != iterable:
        kinds = ("iterable-style", "map-style")
        saved, here = kinds if state["streams"] else reversed(kinds)
        raise ValueError(f"the state is of a loader with an {saved} dataset, but the dataset here is {here}")


def check_one_stream(saved: Mapping[str, Any], workers: str) -> None:
    """Check that a single iterator over the dataset can go on from a state.

    Raises:
        ValueError: It is of several.
    """
    if len(saved["streams"]) > 1:
        raise ValueError(
            f"the state is of {len(saved['streams'])} workers, and an iterable-style dataset goes on with as many as "
            f"it began with; {workers} is one"
        )


def start_after(settings: PassSettings, saved: Mapping[str, Any]) -> None:
    """Bring the loader's own generators to where they were when a finished pass was saved."""
    for generator, state in zip(_own_generators(settings), saved["generators"], strict=False):
        generator.set_state(_from_hex(state))


def _order(settings: PassSettings) -> Order:
    """The order of the samples that the sampler will give when it is iterated over next."""
    for sampler in (settings.sampler, getattr(settings.sampler, "sampler", None)):
        if isinstance(sampler, ResumableDistributedSampler):
            return Order(sampler.start, sampler.rank, sampler.num_replicas)
    return Order(0, settings.partition.rank, settings.partition.world_size)


def capture_start(settings: PassSettings) -> dict[str, Any]:
    """What a pass that begins now begins with."""
    sampler = stateful_sampler(settings.sampler)
    return {
        "global": states_to_plain(get_states()),
        "generators": [_to_hex(generator.get_state()) for generator in _own_generators(settings)],
        "sampler": None if sampler is None else sampler.state_dict(),
    }


def restore_start(settings: PassSettings, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Bring generators, also the global ones, and sampler to where the saved pass began; returns the new start."""
    start = saved["start"]
    set_states(states_from_plain(start["global"]))
    for generator, state in zip(_own_generators(settings), start["generators"], strict=False):
        generator.set_state(_from_hex(state))
    sampler = stateful_sampler(settings.sampler)
    if sampler is not None and start["sampler"] is not None:
        sampler.load_state_dict(start["sampler"])
    return dict(start)


def progress_of(saved: Mapping[str, Any], start: dict[str, Any]) -> Progress:
    """The progress of a saved pass, but for the number of samples."""
    return Progress(
        saved["base_seed"],
        saved["epoch"],
        num_batches=saved["num_batches"],
        ahead={int(number): size for number, size in saved["ahead"].items()},
        streams=[StreamState(*stream) for stream in saved["streams"]],
        turn=saved["turn"],
        start=start,
    )


def skip_delivered(
    settings: PassSettings, saved: Mapping[str, Any], samples: Iterator[Any]
) -> tuple[Iterator[Any], int]:
    """What is left of a sampler that has just begun, and how many samples were in what was delivered.

    Raises:
        ValueError: The sampler is shorter than that.
    """
    sampler = stateful_sampler(settings.sampler)
    if saved["streams"] or isinstance(sampler, ResumableDistributedSampler):
        # It begins there by itself.
        return samples, 0
    return _skip(settings, samples, saved["num_batches"])


def _skip(settings: PassSettings, samples: Iterator[Any], num_batches: int) -> tuple[Iterator[Any], int]:
    """The iterator after so many batches, and how many samples were in them.

    Raises:
        ValueError: There are not so many.
    """
    if num_batches == 0:
        return samples, 0
    sampler = settings.sampler
    if not settings.auto_collation:
        num_skipped = num_samples = _consume(samples, num_batches)
    elif type(sampler) is BatchSampler:
        # Batches need not be made to be thrown away: 30 ns for a sample, where making them takes 100.
        batch_size = sampler.batch_size
        indices = iter(sampler.sampler)
        num_samples = _consume(indices, num_batches * batch_size)
        num_skipped = num_samples // batch_size if sampler.drop_last else -(-num_samples // batch_size)
        samples = iter(BatchSampler(indices, batch_size, sampler.drop_last))
    else:
        source = TaskSource(samples, auto_collation=True)
        num_samples = num_skipped = 0
        for batch, _position, _number in itertools.islice(source, num_batches):
            num_samples += source.num_samples(batch)
            num_skipped += 1
    if num_skipped < num_batches:
        raise ValueError(
            f"the saved pass had delivered {num_batches} batches, but the sampler has only {num_skipped} now: have "
            "dataset, batch size or sampler changed?"
        )
    return samples, num_samples


def _consume(iterator: Iterator[Any], count: int) -> int:
    """Throw away ``count`` elements; returns how many there were."""
    counter = itertools.count()
    collections.deque(zip(itertools.islice(iterator, count), counter, strict=False), maxlen=0)
    return next(counter)


def _to_hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
