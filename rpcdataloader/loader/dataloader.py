"""``RPCDataloader``: torch's ``DataLoader``, whose workers may be on other machines."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from rpcdataloader.client.discovery import Local, Where, find_workers
from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.fetch.raw import RawBatch, pack
from rpcdataloader.loader.dataset import IS_HERE, RPCDataset
from rpcdataloader.loader.iterating import LoaderIteration
from rpcdataloader.loader.placement import check_min_workers
from rpcdataloader.loader.sampler import Source
from rpcdataloader.loader.settings import (
    PassSettings,
    check_num_workers,
    check_numbers,
    check_starts_processes,
    check_transform,
    name_of,
)
from rpcdataloader.loader.waits import Auto

_T_co = TypeVar("_T_co", covariant=True)

# Asked once: frameworks wrap the constructors of loaders while their hooks run.
_ARGUMENTS_OF_TORCH = tuple(inspect.signature(DataLoader).parameters)

# Arguments that a loader with a transform shares with the loader of its stream, also if they change.
_ALSO_OF_SOURCE = (
    "multiprocessing_context",
    "worker_init_fn",
    "timeout",
    "partition",
    "max_retries",
    "reconnect_timeout",
    "task_timeout",
    "on_error",
    "max_skipped",
    "env",
    "py_modules",
    "forward_output",
)


class RPCDataloader(LoaderIteration[_T_co]):
    """A ``torch.utils.data.DataLoader`` that loads and collates its batches in workers on any machine.

    Arguments, batches, their order, and exceptions are torch's; see its documentation. Differences:

    Args:
        dataset: An :class:`~rpcdataloader.RPCDataset`, whose workers are used; or any dataset. Workers of this machine
            get it as torch's do; for node servers, it is pickled at the beginning of an epoch, and sent if it has
            changed.
        num_workers: Number of workers: with an ``RPCDataset`` or ``workers``, out of this process's share, 0 for all.
            Otherwise as in torch: worker processes on this machine, 0 to load in this process. ``"auto"`` uses as many
            of the share (without ``workers``, of one per CPU) as the loop needs, and gives the others back. An
            iterable-style dataset needs a number.
        multiprocessing_context: As in torch, for workers of this machine; node servers fork theirs. An ``RPCDataset``
            uses the default one.
        prefetch_factor: Batches in flight per worker; 2 if left out.
        workers: Places of the workers, as for :class:`~rpcdataloader.RPCDataset`; by default those in the environment
            variable ``RPCDATALOADER_WORKERS``.
        partition: ``(rank, world size)`` of this process among those that share the workers; None to use all workers of
            a list that the caller has split. ``"auto"`` asks torch.distributed, or else the environment variables RANK
            and WORLD_SIZE.
        max_in_flight_bytes: Limit on the bytes of batches that are on their way or wait to be consumed. None for an
            eighth of the memory of this machine or job at the beginning of the epoch, divided by the ranks on the node.
        max_retries: Limit on deaths in a row. A dead worker's batch goes to another worker; after this many deaths it
            is an error, raised when the batch's turn comes.
        reconnect_timeout: Seconds to wait for a worker after the loss of all, as when all nodes restart; 0 to raise at
            once.
        task_timeout: Seconds that a worker may take for a batch, or for its part of one. After that the worker is
            ended, and the batch goes to another worker; after ``max_retries`` in a row it is an error, with the stack
            of the last worker. None for no limit: a straggler still gets a backup task on a second worker.
        retry_on: Exceptions of the dataset that may pass, such as ``OSError``: the worker retries the sample after a
            back-off, up to ``max_retries`` times, with the same random numbers. Only for map-style datasets, as streams
            cannot repeat samples. ``StopIteration`` is a ``RuntimeError`` here.
        on_error: ``"raise"`` raises an exception of the dataset in place of the batch, as torch does. ``"skip"`` leaves
            the sample out of its batch, after ``retry_on``, and names it in a warning; empty batches are not delivered.
            A dataset with a ``__getitems__`` of its own loads whole batches, so these are left out.
        max_skipped: Number of skipped samples in one pass above which a :class:`~rpcdataloader.errors.BadSamplesError`
            is raised; with a ``transform``, of those that it has refused, and of those that the stream has.
        device: Device of a delivered batch's tensors, such as ``"cuda:0"``; ``"cuda"`` is the current one of the thread
            that begins a pass. The next batch is copied while this one is used, in few large pieces, out of pinned
            memory. Arrays, and tensors that are more than a dtype, a shape and strides (sparse and nested ones,
            subclasses), stay where they are. None or ``"cpu"`` for no device.
        env: Environment variables for the workers' sessions: names and patterns of variables of this process, such as
            ``["HF_*", "AWS_PROFILE"]``, which are read now; or their values, ``{"TZ": "UTC"}``. An ``RPCDataset`` has
            its own.
        py_modules: Modules and packages for the workers' sessions, as for :class:`~rpcdataloader.RPCDataset`; they are
            read now. An ``RPCDataset`` has its own.
        forward_output: Print the output of node servers' workers on this process's standard error, each line with its
            origin.
        min_workers: Number of workers that a pass waits for, at most for the connect timeout: until the node servers
            have this many for this process. 0 to begin with the present ones. ``num_workers="auto"`` never uses fewer.
        transform: Function of a sample, called in all workers, while ``source_workers`` iterate over the iterable-style
            dataset, which yields raw samples. :doc:`datasets` explains it.
        source_workers: Number of workers that iterate over a dataset with a ``transform``.
        snapshot_every_n_steps: Accepted from scripts for torchdata's ``StatefulDataLoader``, without effect: a state is
            exact after every batch.

    Raises:
        ValueError: Arguments contradict each other or are out of range, or the ``device`` does not exist.
        TypeError: The dataset is neither iterable-style nor has a ``__getitem__``; or an argument has a wrong type.
    """

    device: Any
    env: Any
    min_workers: int
    partition: Any
    py_modules: Any
    snapshot_every_n_steps: int
    source_workers: int
    transform: Callable[[Any], Any] | None
    workers: Any

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers: str | Iterable[str] | None = None,
        partition: tuple[int, int] | Literal["auto"] | None = "auto",
        max_in_flight_bytes: int | None = None,
        max_retries: int = 3,
        reconnect_timeout: float = 300.0,
        task_timeout: float | None = None,
        retry_on: type[BaseException] | Iterable[type[BaseException]] = (),
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int = 100,
        device: torch.device | str | int | None = None,
        env: Mapping[str, str] | Iterable[str] | None = None,
        py_modules: Iterable[str | os.PathLike[str] | ModuleType] | None = None,
        forward_output: bool = False,
        min_workers: int = 0,
        transform: Callable[[Any], Any] | None = None,
        source_workers: int = 1,
        snapshot_every_n_steps: int = 1,
    ) -> None:
        # A list: in Python 3.12, a debugger that looks here adds the names of this comprehension to them.
        arguments = {name: value for name, value in [*locals().items()] if name not in ("self", "__class__")}
        for name in ("workers", "retry_on", "env", "py_modules"):
            if isinstance(arguments[name], Iterator):  # which gives its elements once, and each pass reads them
                arguments[name] = list(arguments[name])
        if isinstance(dataset, type):
            raise TypeError(f"dataset is a class: give an object, or RPCDataset(workers, {dataset.__qualname__}, ...)")
        arguments["num_workers"] = num_workers = check_num_workers(num_workers, dataset, transform)
        check_numbers(min_workers=min_workers)
        where = _where(dataset, arguments["workers"], num_workers)
        for name in ("env", "py_modules"):
            if arguments[name] is not None and isinstance(dataset, RPCDataset):
                raise ValueError(f"{name} is too late for an RPCDataset, which is built: give it to the RPCDataset")
        check_min_workers(min_workers, num_workers, where)
        if where is not None and not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset of type {type(dataset).__name__} has no __getitem__, which a map-style dataset needs, and is "
                "not an IterableDataset"
            )
        own = where is not None
        torchs = {name: value for name, value in arguments.items() if name in _ARGUMENTS_OF_TORCH} | {"num_workers": 0}
        if own:
            # torch refuses these three without workers of its own; it does not know ours.
            torchs |= {"multiprocessing_context": None, "prefetch_factor": None, "persistent_workers": False}
        super().__init__(**torchs)
        self._where = where
        # Public attributes have the names of arguments: frameworks recreate the loader from them.
        for name in arguments.keys() - torchs.keys():
            setattr(self, name, arguments[name])
        if own:
            self.num_workers = num_workers or 1  # torch refuses a context without workers
            self.multiprocessing_context = multiprocessing_context
            if isinstance(where, Local):
                check_starts_processes(self.multiprocessing_context)
            self.num_workers = num_workers
            self.prefetch_factor = 2 if prefetch_factor is None else prefetch_factor
            # torch forbids changes of this after its own __init__.
            self.__dict__["persistent_workers"] = persistent_workers
            if isinstance(where, Local) and num_workers:
                self.check_worker_number_rationality()
        check_transform(self, where)
        settings = PassSettings.of(self)
        if not own and (settings.task_timeout is not None or settings.retry_on):
            raise ValueError("task_timeout and retry_on need workers: give workers or num_workers")
        if not own and settings.skips:
            raise ValueError("on_error='skip' needs workers: give workers or num_workers")
        if not own and settings.env:
            raise ValueError("env needs workers: give workers or num_workers, or set os.environ")
        for name in ("env", "py_modules"):
            if arguments[name] is not None:
                setattr(self, name, getattr(settings, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "workers" and name in self.__dict__:  # as torch says it of its own
            raise ValueError(f"{name} attribute should not be set after {type(self).__name__} is initialized")
        super().__setattr__(name, value)

    def _follow_source(self) -> Source:
        """The raw samples of a loader with a ``transform``, by a loader with the present arguments."""
        if self._kept_source is None:
            where = "local" if isinstance(self._where, Local) else self.workers
            loader: RPCDataloader[RawBatch] = RPCDataloader(
                self.dataset,  # type: ignore[arg-type]  # whose samples are packed
                self.batch_size or 1,
                collate_fn=pack,
                num_workers=self.source_workers,
                drop_last=self.drop_last,
                generator=torch.Generator(),
                persistent_workers=self.persistent_workers,
                workers=None if isinstance(self.dataset, RPCDataset) else where,
            )
            dataset = self.dataset
            name = dataset._access.name if isinstance(dataset, RPCDataset) else name_of(dataset)
            self._kept_source = Source(loader, name, auto_collation=self.batch_size is not None)
        self._kept_source.generator = self.generator
        self._kept_source.loader.num_workers = self.source_workers
        for name in _ALSO_OF_SOURCE:
            setattr(self._kept_source.loader, name, getattr(self, name))
        return self._kept_source

    @property
    def num_skipped(self) -> int:
        """Number of skipped samples (``on_error="skip"``) among those delivered in the current or the last pass.

        With a ``transform``, those that the stream has failed to give so far are among them.
        """
        if self._progress is None or self._saved is not None:
            return 0
        settings, progress = self._progress
        by_stream = 0
        if isinstance(settings.sampler, Source):
            stream = settings.sampler.loader
            # Of a pass that was saved at its end, nothing is left to load.
            by_stream = stream.num_skipped if stream._saved is None else stream._saved["num_skipped"]
        return progress.copy().settle().num_skipped + by_stream

    @property
    def _is_accelerate_prepared(self) -> bool:
        # Accelerate reads this before it replaces a loader by torch's, which does not know our workers.
        if self._where is not None:
            raise LocalProtocolError(
                "Accelerate would replace this loader by one without its workers: use "
                "rpcdataloader.integrations.prepare(accelerator, ...) instead of accelerator.prepare(...)"
            )
        return False


def _where(dataset: object, workers: str | Iterable[str] | None, num_workers: int) -> Where | None:
    """The places of the workers; None to load in this process, as torch does."""
    if isinstance(dataset, RPCDataset):
        if workers is not None:
            raise ValueError("workers contradicts the RPCDataset, which has its own: leave it out")
        return dataset._where
    _check_whole(dataset)
    where = find_workers(workers)
    if where is None:
        if isinstance(num_workers, Auto):
            return Local()
        return Local(num_workers) if num_workers > 0 else None
    return where


def _check_whole(dataset: object) -> None:
    """Raise a ``LocalProtocolError`` for one of torch's wrappers around an ``RPCDataset``, such as a ``Subset``."""
    behind = [dataset]
    while behind:
        one = behind.pop()
        if isinstance(one, RPCDataset):
            raise LocalProtocolError(IS_HERE)
        if type(one).__module__.startswith("torch.utils.data."):
            parts = vars(one).get("datasets", [vars(one).get("dataset")])
            if isinstance(parts, (list, tuple, dict)):  # an iterator of datasets would be used up
                behind += parts.values() if isinstance(parts, dict) else parts
