"""The progress of a pass over a sampler, from its beginning in this process or in an earlier one.

What a checkpoint keeps is where the random generators stood when the pass began, and how many batches were delivered.
To go on, the sampler is started again in the same state and skips as much; no sample is loaded twice for that. A
sampler with a state of its own, as torchdata's have, is asked for it after each batch and skips nothing.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterDataPipe

from rpcdataloader.client.sharing import Partition, current_partition
from rpcdataloader.loader.memory import default_in_flight_bytes
from rpcdataloader.loader.remote import LoaderSpec, StreamState
from rpcdataloader.loader.sampler import ResumableDistributedSampler
from rpcdataloader.loader.seeding import generators_restored
from rpcdataloader.loader.skipping import skip
from rpcdataloader.loader.tasks import TaskSource
from rpcdataloader.wire.generators import get_states, set_states, states_from_plain, states_to_plain

_VERSION = 1


@dataclass(frozen=True, slots=True)
class PassSettings:
    """What an iterator takes from its loader.

    Attributes:
        dataset: What the loader was given; a function of the user may refer to it, as a bound method does.
        sampler: The batch sampler or, without automatic batching, the sampler.
        iterable: The dataset is iterable-style.
        generator: Where the base seed is drawn; None for torch's default.
        timeout: Seconds to wait for a batch; 0 for no limit.
        max_retries: A batch at which so many workers in a row died is an error.
        reconnect_timeout: Seconds to wait for a worker when none is left.
        task_timeout: Seconds that a worker may take for a batch; None for any time.
        retry_on: Exceptions of the dataset after which a batch is tried again.
        device: Where batches are brought; None for the memory of this process.
        skips: Samples whose dataset raises an exception are left out.
        max_skipped: More of them in a pass are an error.
        partition: This process among the trainers, for the seeds.
    """

    dataset: Any
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
    max_in_flight_bytes: int = field(default_factory=default_in_flight_bytes)
    pin_memory: bool = False
    device: torch.device | None = None
    persistent_workers: bool = False
    max_retries: int = 3
    reconnect_timeout: float = 300.0
    task_timeout: float | None = None
    retry_on: tuple[type[BaseException], ...] = ()
    skips: bool = False
    max_skipped: int = 100
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
        ahead: Later ones that were delivered too, by number: how many samples they have, and the state of the sampler
            after them (``in_order=False``).
        streams: Of an iterable-style dataset, each after the last batch of it that was delivered.
        turn: The stream whose batch comes next.
        num_yielded: Batches delivered in this process, without empty ones.
        num_skipped: Samples that were missing in what was delivered.
        finished: Everything was delivered.
        start: What the pass began with: states of the generators, and of a :class:`ResumableDistributedSampler`.
        sampler: The last state of a sampler that has one, and how many batches and samples it had given then.
    """

    base_seed: int
    epoch: int
    num_batches: int = 0
    num_samples: int = 0
    ahead: dict[int, tuple[int, Any]] = field(default_factory=dict)
    streams: list[StreamState] = field(default_factory=list)
    turn: int = 0
    num_yielded: int = 0
    num_skipped: int = 0
    finished: bool = False
    start: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] | None = None

    def delivered(self, number: int, num_samples: int, sampler_state: Any = None) -> None:
        """Batch ``number`` of the sampler was handed to the consumer, or an exception in its place."""
        self.num_yielded += 1
        self.ahead[number] = num_samples, sampler_state
        while self.num_batches in self.ahead:
            num_samples, sampler_state = self.ahead.pop(self.num_batches)
            self.num_samples += num_samples
            self.num_batches += 1
            if sampler_state is not None:
                self.sampler = {
                    "state": sampler_state, "num_batches": self.num_batches, "num_samples": self.num_samples
                }  # fmt: skip

    def stream_delivered(self, stream: int, state: StreamState | None) -> None:
        """A batch of a stream was handed to the consumer, or an exception, which has no state."""
        self.num_yielded += 1
        self.num_batches += 1
        if state is not None:
            self.streams[stream] = state
        self.turn = stream + 1

    def reduced(self, num_skipped: int, *, is_empty: bool) -> None:
        """The batch that was delivered last lacked some samples; an empty one the consumer does not get."""
        self.num_skipped += num_skipped
        self.num_yielded -= is_empty


def _samplers(settings: PassSettings) -> tuple[Any, ...]:
    """The sampler, and what it draws from."""
    return settings.sampler, getattr(settings.sampler, "sampler", None)


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _resumable(settings: PassSettings) -> ResumableDistributedSampler | None:
    """Our own sampler, if it is used: its place is computed."""
    return next((found for found in _samplers(settings) if isinstance(found, ResumableDistributedSampler)), None)


def _stateful(settings: PassSettings, samples: Iterator[Any]) -> dict[str, Any]:
    """The sampler and the iterator over it, if they have states of their own."""
    found: dict[str, Any] = {}
    if not settings.iterable and _resumable(settings) is None:
        for sampler in filter(_is_stateful, _samplers(settings)):
            found.setdefault("sampler", sampler)
        if _is_stateful(samples):
            found["iterator"] = samples
    return found


def sampler_state(settings: PassSettings, samples: Iterator[Any]) -> Callable[[], Any]:
    """What to call after each batch, for the state of the sampler; returns None if it has none."""
    stateful = _stateful(settings, samples)
    if not stateful:
        return lambda: None
    # It may be the object that the sampler goes on changing.
    return lambda: {name: copy.deepcopy(owner.state_dict()) for name, owner in stateful.items()}


def _own_generators(settings: PassSettings) -> list[torch.Generator]:
    """Generators that belong to loader and samplers, each once; only those without one draw from the global ones."""
    owners, owner = [settings], settings.sampler
    while owner is not None:  # other libraries put batch samplers around batch samplers
        owners.append(owner)
        owner = getattr(owner, "sampler", getattr(owner, "batch_sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))


@dataclass(frozen=True, slots=True)
class Order:
    """The samples of this rank in the order of all ranks: ``first + rank``, then every ``world_size``-th.

    Attributes:
        first: Place at which all ranks together begin; above 0 where a sampler goes on in the middle.
        pipe_seed: Of an IterDataPipe: all workers shuffle alike, and then take their parts.
    """

    first: int
    rank: int
    world_size: int
    pipe_seed: int | None = None


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
            "samples have been fetched. For multiprocessing data-loading, this happens when a worker takes more than "
            "its part of the dataset; torch.utils.data.get_worker_info() says which worker it is.",
            stacklevel=3,
        )


def undone_afterwards(saved: Mapping[str, Any] | None) -> contextlib.AbstractContextManager[None]:
    """Around :func:`begin_pass`, and around drawing the first tasks.

    Going on draws from the global generators as they were when the saved pass began. They are the trainer's, who does
    not want to be taken back.
    """
    return contextlib.nullcontext() if saved is None or saved["finished"] else generators_restored()


def begin_pass(settings: PassSettings, saved: Mapping[str, Any] | None = None) -> Pass:
    """Begin a pass: iterate over the sampler and draw the base seed, in torch's order.

    Args:
        saved: What :func:`to_state` made of the pass to go on with; if that is finished, of the one before, of
            persistent workers.

    Raises:
        ValueError: The state does not fit this loader.
    """
    if saved is not None and saved["finished"]:
        return begin_epoch(settings, saved["base_seed"], saved["epoch"] + 1)
    start = capture_start(settings) if saved is None else restore_start(settings, saved)
    order = _order(settings)
    samples = iter(settings.sampler)
    if saved is None:
        progress = Progress(draw_base_seed(settings.generator), 0, start=start)
        return Pass(_new_source(settings, samples), progress, order)
    if saved["epoch"] == 0:
        # For its effect on the generator; persistent workers draw it once.
        draw_base_seed(settings.generator)
    progress = progress_of(saved, start)
    get_state = sampler_state(settings, samples)
    samples, progress.num_samples = skip_delivered(settings, saved, samples)
    source = TaskSource(
        samples,
        auto_collation=settings.auto_collation,
        number=progress.num_batches,
        position=progress.num_samples,
        leave_out=progress.ahead,
        sampler_state=get_state,
    )
    return Pass(source, progress, order)


def _new_source(settings: PassSettings, samples: Iterator[Any]) -> TaskSource:
    get_state = sampler_state(settings, samples)
    return TaskSource(samples, auto_collation=settings.auto_collation, sampler_state=get_state)


def loader_spec(
    settings: PassSettings, begun: Pass, worker_id: int, num_workers: int, stream: StreamState | None
) -> LoaderSpec:
    """What a worker has to know to load for a pass."""
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
        pipe_seed=begun.order.pipe_seed,
        stream=stream,
        skips=settings.skips,
        retry_on=settings.retry_on if settings.skips else (),
    )


def begin_epoch(settings: PassSettings, base_seed: int, epoch: int) -> Pass:
    """Begin another pass of persistent workers, which keep their base seed as torch's do."""
    start = capture_start(settings)
    order = _order(settings)
    source = _new_source(settings, iter(settings.sampler))
    return Pass(source, Progress(base_seed, epoch, start=start), order)


def to_state(settings: PassSettings, progress: Progress) -> dict[str, Any]:
    """What to keep of a pass: plain containers, numbers and strings, apart from states that are not ours."""
    start = progress.start
    resumable = _resumable(settings)
    if resumable is not None:
        if progress.ahead:
            raise ValueError("a ResumableDistributedSampler cannot be saved with in_order=False: batches are missing")
        consumed = start["sampler"]["start"] + progress.num_samples * resumable.num_replicas
        start = {**start, "sampler": {**start["sampler"], "start": min(consumed, start["sampler"]["length"])}}
    return {
        "version": _VERSION,
        "base_seed": progress.base_seed,
        "epoch": progress.epoch,
        "num_batches": progress.num_batches,
        "num_samples": progress.num_samples,
        "ahead": {str(number): num_samples for number, (num_samples, _state) in progress.ahead.items()},
        "streams": [list(stream) for stream in progress.streams],
        "turn": progress.turn,
        "num_skipped": progress.num_skipped,
        "finished": progress.finished,
        "generators": [_to_hex(generator.get_state()) for generator in _own_generators(settings)],
        "start": start,
        "sampler": progress.sampler,
    }


_KEYS = {"base_seed", "epoch", "num_batches", "num_samples", "ahead", "streams", "turn", "num_skipped", "finished"}
_KEYS |= {"generators", "start", "sampler"}


def check_state(settings: PassSettings, state: Mapping[str, Any]) -> None:
    """Check that this loader can go on from a state.

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
    if state.keys() <= {"version"}:
        return
    if missing := _KEYS - state.keys():
        raise ValueError(f"this state of an RPCDataloader is not whole: {', '.join(sorted(missing))} is missing")
    kinds = ("a map-style dataset", "an iterable-style dataset")
    _check_same("dataset", kinds[bool(state["streams"])], kinds[settings.iterable])
    kinds = ("another sampler", "a ResumableDistributedSampler")
    _check_same("sampler", kinds[state["start"]["sampler"] is not None], kinds[_resumable(settings) is not None])
    if state["sampler"] is not None and "sampler" in state["sampler"]["state"]:
        kinds = ("one without load_state_dict", "one with a state of its own")
        _check_same("sampler", kinds[1], kinds[any(map(_is_stateful, _samplers(settings)))])
    num_saved, num_here = len(state["generators"]), len(_own_generators(settings))
    if num_saved != num_here:
        raise ValueError(
            f"the state is of a loader whose samplers draw from {num_saved} generators of their own, but here there "
            f"are {num_here}: give it generator= as before"
        )


def _check_same(what: str, saved: str, here: str) -> None:
    if saved != here:
        raise ValueError(f"the state is of a loader with {saved}, but the {what} here is {here}")


def check_one_stream(saved: Mapping[str, Any], workers: str) -> None:
    """Check that a single iterator over the dataset can go on from a state.

    Raises:
        ValueError: It is of several.
    """
    if len(saved["streams"]) > 1 and not saved["finished"]:
        raise ValueError(
            f"the state is of {len(saved['streams'])} workers, and an iterable-style dataset goes on with as many as "
            f"it began with; {workers} is one"
        )


def end_pass(settings: PassSettings, saved: Mapping[str, Any]) -> None:
    """Bring the loader's own generators and its sampler to where they were when a finished pass was saved."""
    anchor = saved["sampler"]
    if anchor is not None:
        with generators_restored():
            restore_start(settings, saved)
            samples, _num_samples = skip_delivered(settings, saved, iter(settings.sampler))
            collections.deque(samples, maxlen=0)
    _restore_generators(settings, saved["generators"])


def _restore_generators(settings: PassSettings, states: Iterable[str]) -> None:
    for generator, state in zip(_own_generators(settings), states, strict=True):
        generator.set_state(_from_hex(state))


def _order(settings: PassSettings) -> Order:
    """The order of the samples that the sampler will give when it is iterated over next.

    For a pipe of torch, this draws its seed, which torch's loader does for each pass before it does anything else.
    """
    sampler = _resumable(settings)
    if sampler is not None:
        return Order(sampler.start, sampler.rank, sampler.num_replicas)
    pipe_seed = draw_base_seed(settings.generator) if isinstance(settings.dataset, IterDataPipe) else None
    return Order(0, settings.partition.rank, settings.partition.world_size, pipe_seed)


def capture_start(settings: PassSettings) -> dict[str, Any]:
    """What a pass that begins now begins with."""
    resumable = _resumable(settings)
    return {
        "global": states_to_plain(get_states()),
        "generators": [_to_hex(generator.get_state()) for generator in _own_generators(settings)],
        "sampler": None if resumable is None else resumable.state_dict(),
    }


def restore_start(settings: PassSettings, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Bring generators, also the global ones, and sampler to where the saved pass began; returns the new start."""
    start = saved["start"]
    set_states(states_from_plain(start["global"]))
    _restore_generators(settings, start["generators"])
    resumable = _resumable(settings)
    if resumable is not None:
        resumable.load_state_dict(start["sampler"])
    elif saved["sampler"] is not None and "sampler" in saved["sampler"]["state"]:
        sampler = next(filter(_is_stateful, _samplers(settings)))
        sampler.load_state_dict(copy.deepcopy(saved["sampler"]["state"]["sampler"]))
    return dict(start)


def progress_of(saved: Mapping[str, Any], start: dict[str, Any]) -> Progress:
    """The progress of a saved pass, but for the number of samples."""
    return Progress(
        saved["base_seed"],
        saved["epoch"],
        num_batches=saved["num_batches"],
        ahead={int(number): (num_samples, None) for number, num_samples in saved["ahead"].items()},
        streams=[StreamState(*stream) for stream in saved["streams"]],
        turn=saved["turn"],
        num_skipped=saved.get("num_skipped", 0),
        start=start,
        sampler=saved["sampler"],
    )


def skip_delivered(
    settings: PassSettings, saved: Mapping[str, Any], samples: Iterator[Any]
) -> tuple[Iterator[Any], int]:
    """What is left of a sampler that has just begun, and how many samples were in what was delivered.

    Raises:
        ValueError: The sampler is shorter than that, or its batches have another size.
    """
    if saved["streams"] or _resumable(settings) is not None:
        # It begins there by itself.
        return samples, 0
    anchor = saved["sampler"]
    if anchor is None:
        samples, num_samples = skip(
            samples, settings.sampler, saved["num_batches"], auto_collation=settings.auto_collation
        )
        # Other batch samplers may give generators, whose samples torch's own iterator does not count.
        if type(settings.sampler) is BatchSampler and num_samples != saved["num_samples"]:
            raise ValueError(
                f"the saved pass had delivered {saved['num_samples']} samples in {saved['num_batches']} batches, but "
                f"the sampler gives {num_samples} in as many now: have dataset, batch size or sampler changed?"
            )
        return samples, num_samples
    if "iterator" in anchor["state"]:
        if not _is_stateful(samples):
            raise ValueError("the state is of a sampler whose iterator has load_state_dict, but here it has none")
        samples.load_state_dict(copy.deepcopy(anchor["state"]["iterator"]))  # type: ignore[attr-defined]
    if saved["num_batches"] == anchor["num_batches"]:
        return samples, anchor["num_samples"]
    samples, num_samples = skip(
        samples,
        settings.sampler,
        saved["num_batches"] - anchor["num_batches"],
        auto_collation=settings.auto_collation,
    )
    return samples, anchor["num_samples"] + num_samples


def _to_hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
