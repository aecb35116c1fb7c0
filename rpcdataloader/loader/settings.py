"""The settings of an iterator, from its loader; the same for all kinds of iterators."""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, default_collate

from rpcdataloader.client.discovery import Inline, Where
from rpcdataloader.client.modules import choose_modules, choose_variables
from rpcdataloader.client.sharing import Partition, current_partition
from rpcdataloader.fetch.collate import registered
from rpcdataloader.fetch.raw import Transformed
from rpcdataloader.host.environment import Module
from rpcdataloader.host.resources import default_in_flight_bytes
from rpcdataloader.loader.copying import find_device
from rpcdataloader.loader.sampler import ResumableDistributedSampler
from rpcdataloader.loader.waits import Auto

_MAX_SAMPLERS = 16


def name_of(dataset: Any) -> str:
    """The name in messages of a dataset of this process: its class."""
    return dataset.name if isinstance(dataset, Transformed) else type(dataset).__name__


@dataclass(frozen=True, slots=True)
class PassSettings:
    """The checked arguments of a loader as its iterators use them; ``RPCDataloader`` documents them.

    The engine, the workers and the diagnosis know nothing of this room: what they need has records of their own,
    ``PlanOptions``, ``LoaderSpec`` and ``Setup``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has a wrong type.
    """

    dataset: Any  # that the loader was given; a user's function may refer to it, as a bound method does
    sampler: Any  # batch sampler or, without automatic batching, the sampler
    auto_collation: bool
    iterable: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None
    timeout: float = 0.0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int = 2
    in_order: bool = True
    # This process's rank, for seeds and messages. Its share of the workers may be that of another (``partition=None``),
    # and its part of the order is the sampler's.
    partition: Partition = field(default_factory=current_partition)
    max_in_flight_bytes: int = None  # type: ignore[assignment]  # a share of the memory
    max_retries: int = 3
    reconnect_timeout: float = 300.0
    task_timeout: float | None = None
    retry_on: tuple[type[BaseException], ...] = ()
    on_error: str = "raise"
    max_skipped: int = 100
    device: torch.device | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    py_modules: tuple[Module, ...] = ()
    forward_output: bool = False

    @classmethod
    def of(cls, loader: Any) -> PassSettings:
        """Read a loader's attributes with the names of its arguments, which users may have changed."""
        values: dict[str, Any] = {each.name: getattr(loader, each.name, None) for each in fields(cls)}
        values |= {
            "sampler": loader._index_sampler,
            "auto_collation": loader._auto_collation,
            "iterable": isinstance(loader.dataset, IterableDataset),
            "prefetch_factor": 2 if loader.prefetch_factor is None else loader.prefetch_factor,
        }
        if loader.transform is not None:
            source = loader._follow_source()
            # In this process, a batch that was left is loaded again.
            may_repeat = bool(loader.retry_on) or isinstance(loader._where, Inline)
            transformed = Transformed(loader.transform, f"{source.name} (transform)", may_repeat=may_repeat)
            values |= {"dataset": transformed, "sampler": source, "iterable": False}
            # Of raw samples as many bytes again: one half waits for this pass, and the other is under way in it.
            limit = values["max_in_flight_bytes"] = _bytes(loader.max_in_flight_bytes)
            source.loader.max_in_flight_bytes = max(1, limit // 2)
        return cls(**values)

    def __post_init__(self) -> None:
        names = "prefetch_factor", "max_retries", "reconnect_timeout", "max_skipped"
        check_numbers(**{name: getattr(self, name) for name in names}, task_timeout=self.task_timeout or 0)
        for name in "timeout", "reconnect_timeout", "task_timeout":
            # Numbers of 32 bits are too coarse for a clock, and locks refuse those of numpy.
            if not isinstance(value := getattr(self, name), int | None):
                object.__setattr__(self, name, float(value))
        if self.prefetch_factor < 0:
            raise ValueError("prefetch_factor option should be non-negative")  # torch's text
        most, limit = threading.TIMEOUT_MAX, self.task_timeout
        for name, is_valid, range_ in (
            ("prefetch_factor", self.prefetch_factor >= 1, "at least 1"),
            ("max_retries", self.max_retries >= 1, "at least 1"),
            ("reconnect_timeout", 0 <= self.reconnect_timeout <= most, "a number of seconds, 0 or more"),
            ("task_timeout", limit is None or 0 < limit <= most, "a number of seconds above 0, or None"),
            ("on_error", self.on_error in ("raise", "skip"), "'raise' or 'skip'"),
            ("max_skipped", self.max_skipped >= 0, "0 or more"),
        ):
            if not is_valid:
                raise ValueError(f"{name} must be {range_}, but is {getattr(self, name)!r}")
        for name, value in {
            "partition": make_partition(self.partition) or current_partition(),
            "max_in_flight_bytes": _bytes(self.max_in_flight_bytes),
            "retry_on": _exceptions(self.retry_on),
            "device": find_device(self.device),
            "env": choose_variables(self.env),
            "py_modules": choose_modules(self.py_modules),
        }.items():
            object.__setattr__(self, name, value)
        if self.retry_on and self.iterable:
            raise ValueError("retry_on is for map-style datasets: a stream cannot be retried after an exception")

    @property
    def skips(self) -> bool:
        """Whether to leave out samples whose dataset raises an exception."""
        return self.on_error == "skip"

    @property
    def may_split(self) -> bool:
        """Whether several workers may make a batch together: only torch's own functions collate it."""
        return self.auto_collation and not self.iterable and self.collate_fn is default_collate and not registered()

    @property
    def samplers(self) -> tuple[Any, ...]:
        """The sampler, and its source."""
        return self.sampler, getattr(self.sampler, "sampler", None)

    @property
    def chain(self) -> list[Any]:
        """The sampler, its source, and so on: other libraries wrap samplers in samplers."""
        found: list[Any] = []
        sampler = self.sampler
        # Each once, as one may lead back to itself; and at most this number: a proxy may have another for any name.
        while sampler is not None and len(found) < _MAX_SAMPLERS and all(sampler is not other for other in found):
            found.append(sampler)
            # Lightning's distributed sampler has the inner one as a dataset. Remote datasets must not be queried.
            inside = vars(sampler).get("dataset") if hasattr(sampler, "__dict__") else None
            inside = vars(inside).get("_sampler") if hasattr(inside, "__dict__") else None
            sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", inside))
        return found

    @property
    def distributed(self) -> DistributedSampler[Any] | None:
        """The sampler whose samples all ranks take in turn, torch's own or ours, if batches keep its order."""
        batches, sampler = self.samplers
        # Without auto-collation, a batch of its indices counts as one sample.
        if not self.auto_collation or type(batches).__iter__ is not BatchSampler.__iter__:
            sampler = batches
        is_known = type(sampler) is DistributedSampler or isinstance(sampler, ResumableDistributedSampler)
        return sampler if is_known else None

    @property
    def resumable(self) -> ResumableDistributedSampler | None:
        """The distributed sampler, if it is ours: its position is computed."""
        sampler = self.distributed
        return sampler if isinstance(sampler, ResumableDistributedSampler) else None

    @property
    def own_generators(self) -> list[torch.Generator]:
        """Generators of the loader and its samplers, each once; samplers without one draw from the global ones."""
        found = [getattr(owner, "generator", None) for owner in (self, *self.chain)]
        return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))


def check_numbers(**values: Any) -> None:
    """Raise a ``TypeError`` if one of the values is not a number; those that count something are whole ones."""
    for name, value in values.items():
        is_count = name.endswith(("workers", "prefetch_factor", "max_retries"))
        if not isinstance(value, numbers.Integral if is_count else numbers.Real):
            or_auto = " or 'auto'" * (name == "num_workers")
            raise TypeError(f"{name} must be a {'whole ' * is_count}number{or_auto}, but is {value!r}")


def check_transform(loader: Any, where: Where | None) -> None:
    """Check that a loader can have its ``transform``, which may have changed since the loader was made.

    Raises:
        ValueError: It has no workers, or its dataset is no stream.
        TypeError: The ``transform`` is no function.
    """
    if loader.transform is None:
        if loader.source_workers != 1:
            raise ValueError("source_workers iterate over a dataset with a transform: give one")
        return
    if not callable(loader.transform):
        raise TypeError(f"transform must be a function of a sample, but is {loader.transform!r}")
    if where is None:
        raise ValueError("transform needs workers: give workers or num_workers")
    if not isinstance(loader.dataset, IterableDataset):
        raise ValueError("transform is for iterable-style datasets; a map-style one transforms in __getitem__")
    check_numbers(source_workers=loader.source_workers)
    if loader.source_workers < 1:
        raise ValueError(f"source_workers must be at least 1, but is {loader.source_workers}")


def check_num_workers(num_workers: int | str, dataset: object, transform: object) -> int:
    """Check the user's choice, which may have changed since the loader was made."""
    chosen = Auto() if num_workers == "auto" else num_workers
    check_numbers(num_workers=chosen)
    assert not isinstance(chosen, str)
    if chosen < 0:
        raise ValueError("num_workers option should be non-negative; use num_workers=0 to disable multiprocessing.")
    if isinstance(chosen, Auto) and transform is None and isinstance(dataset, IterableDataset):
        raise ValueError(
            "num_workers='auto' cannot be used with an iterable-style dataset: the number of workers decides which "
            "shards each of them reads, and so the batches; give a number"
        )
    return chosen


def make_partition(partition: Any) -> Partition | None:
    """Check the user's ``partition``; None for the result of :func:`current_partition`.

    Raises:
        ValueError: It is malformed.
    """
    if partition is None or partition == "auto" or isinstance(partition, Partition):
        return partition if isinstance(partition, Partition) else None
    is_pair = isinstance(partition, Sequence) and len(partition) == 2
    if not is_pair or not all(isinstance(number, numbers.Integral) for number in partition):
        raise ValueError(f"partition must be 'auto', None or (rank, world size), but is {partition!r}")
    return Partition(*map(int, partition))


def _bytes(limit: Any) -> int:
    if limit is None:
        return default_in_flight_bytes()
    check_numbers(max_in_flight_bytes=limit)
    if not 1 <= limit < math.inf:
        raise ValueError(f"max_in_flight_bytes must be at least 1, and finite, but is {limit}")
    return int(limit)


def _exceptions(types: type[BaseException] | Iterable[type[BaseException]]) -> tuple[type[BaseException], ...]:
    if isinstance(types, str) or not isinstance(types, (type, Iterable)):
        raise TypeError(f"retry_on must be exception classes, but is {types!r}")
    kinds = (types,) if isinstance(types, type) else tuple(types)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"retry_on must be exception classes, but one is {kind!r}")
        if issubclass(kind, StopIteration):
            raise ValueError("retry_on: a StopIteration of the dataset is raised as a RuntimeError; name that instead")
    return kinds


def check_starts_processes(context: Any) -> None:
    """Raise a ``ValueError`` for a context of multiprocessing that starts threads."""
    kind = getattr(context, "Process", None)
    if isinstance(kind, type) and not issubclass(kind, BaseProcess):
        raise ValueError(
            f"multiprocessing_context starts objects of {kind.__qualname__} in place of processes, but workers are "
            "processes: leave it out (in MONAI, use_thread_workers), or load in this process by workers='inline'"
        )
