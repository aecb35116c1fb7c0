"""``RPCDataloader``: torch's ``DataLoader``, whose workers may be on other machines."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset, make_key, ship
from rpcdataloader.client.discovery import Inline, Local, Remote, Where, find_workers
from rpcdataloader.client.local import LocalNode
from rpcdataloader.client.mutable import MutableDataset
from rpcdataloader.client.sharing import Partition, of_rank
from rpcdataloader.client.worker import DatasetRef
from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.fetch.batch_loader import StreamState
from rpcdataloader.fetch.raw import RawBatch, pack
from rpcdataloader.host.environment import Additions, set_variables
from rpcdataloader.host.resources import available_cpus
from rpcdataloader.loader.copying import find_device, make_carrier
from rpcdataloader.loader.dataset import RPCDataset, access_of
from rpcdataloader.loader.executor import Here
from rpcdataloader.loader.iterator import NO_OTHER_PASS, CannotGoOnError, InlineIterator, PassIterator, RemoteIterator
from rpcdataloader.loader.passes import functions_of
from rpcdataloader.loader.placement import Placement, check_min_workers, choose_nodes, has_local, warn_once
from rpcdataloader.loader.sampler import Source
from rpcdataloader.loader.settings import PassSettings, check_numbers, make_partition, name_of
from rpcdataloader.loader.states import has_begun, streams_of
from rpcdataloader.loader.tasks import Progress
from rpcdataloader.loader.tools import LoaderTools, TimedBatches, keep_out_of_graphs
from rpcdataloader.loader.waits import Auto, Wants
from rpcdataloader.server.local import Inherited
from rpcdataloader.wire.slabs import PageablePool

_T_co = TypeVar("_T_co", covariant=True)

# Asked once: frameworks wrap the constructors of loaders while their hooks run.
_ARGUMENTS_OF_TORCH = tuple(inspect.signature(DataLoader).parameters)

# Arguments that a loader with a transform shares with the loader of its stream, also if they change.
_ALSO_OF_SOURCE = (
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


class RPCDataloader(LoaderTools[_T_co]):
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

    # SpeechBrain's loader sets this to the number of batches of which a checkpoint tells. Its own way to leave them out
    # replaces the constructor of torch's iterators.
    _speechbrain_recovery_skip_to: int | None = None

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
        arguments["num_workers"] = num_workers = _check_num_workers(num_workers, dataset, transform)
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
        self._pass: PassIterator | None = None  # with persistent workers
        self._around: Any = None  # what a subclass's own _get_iterator() has put around it
        self._progress: tuple[PassSettings, Progress] | None = None  # of the last iterator
        self._saved: Mapping[str, Any] | None = None  # for the next iterator
        self._kept_source: Source | None = None  # of a loader with a transform
        self._shipped: RemoteDataset | None = None
        self._wants: Wants | None = None
        self._memory: PageablePool | None = None  # for batches, kept from pass to pass
        # Public attributes have the names of arguments: frameworks recreate the loader from them.
        for name in arguments.keys() - torchs.keys():
            setattr(self, name, arguments[name])
        if own:
            self.num_workers = num_workers or 1  # torch refuses a context without workers
            self.multiprocessing_context = multiprocessing_context
            if isinstance(where, Local):
                _check_starts_processes(self.multiprocessing_context)
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

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's private iterator classes are not ours
        keep_out_of_graphs()
        check_transform(self, self._where)
        if self._where is None:
            return self._iterate_here()
        if type(self)._get_iterator is RPCDataloader._get_iterator:
            return self._iterate()
        # As in torch's __iter__: what a subclass has put around the iterator lets that begin the next pass.
        if self.persistent_workers and hasattr(self._around, "_reset"):
            with contextlib.suppress(CannotGoOnError):
                self._around._reset(self)
                return self._around  # type: ignore[no-any-return]
        around = self._get_iterator()
        if self.persistent_workers:
            self._around = around
        return around  # type: ignore[no-any-return]

    def _get_iterator(self) -> Any:
        """Begin a pass with new workers: torch's method, which subclasses call to begin anew, or override."""
        check_transform(self, self._where)
        if self._where is None:
            return super()._get_iterator()
        self._iterator = None
        return self._iterate()

    # torch's attribute. Scripts set it to None for new persistent workers, and end those that it has.
    @property
    def _iterator(self) -> Any:
        """What persistent workers load for."""
        around = self.__dict__.get("_around")
        return self.__dict__.get("_pass") if around is None else around

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._around = iterator  # also one that a subclass keeps here for itself
        if iterator is None:
            self._pass = None

    def _iterate(self, goes_on: PassIterator | None = None) -> PassIterator:
        """Begin a pass with the workers that are kept, if any.

        Args:
            goes_on: Iterator that must have them; by default, a new one begins if there is none.

        Raises:
            CannotGoOnError: ``goes_on`` has no workers for another pass, or a state was loaded.
        """
        self.num_workers = _check_num_workers(self.num_workers, self.dataset, self.transform)
        settings = PassSettings.of(self)
        # A state of the beginning has nothing to resume, but begins anew.
        saved = self._saved if self._saved is not None and has_begun(self._saved) else None
        iterator = self._pass
        if goes_on is not None and goes_on is not iterator:
            raise CannotGoOnError(NO_OTHER_PASS)
        if iterator is None or self._saved is not None or not iterator.reset(self._IterableDataset_len_called):
            if goes_on is not None:
                raise CannotGoOnError(NO_OTHER_PASS)
            ended = saved if saved is not None and saved["finished"] and not self.persistent_workers else None
            saved = None if ended is not None else saved
            iterator = self._pass = None  # ends its workers, whose places are needed
            try:
                iterator = self._begin(settings, saved, ended)
            except Exception as exc:
                if (named := of_rank(exc, settings.partition)) is exc:
                    raise
                raise named from exc.__cause__
            if self.persistent_workers:
                self._pass = iterator
        if isinstance(iterator, InlineIterator):
            iterator.recorder = self._recorder = self._make_recorder()
        if self._speechbrain_recovery_skip_to is not None:
            self._speechbrain_recovery_skip_to = None
        before, self._progress = self._progress, (settings, iterator.progress)
        # From here on without a call: Ctrl-C must not come between the state and the iterator that goes on with it.
        if before is not None:
            before[1].is_replaced = False
        self._saved = None
        return iterator

    def _iterate_here(self) -> Iterator[Any]:
        """torch's own iterator, for ``num_workers=0`` and no workers."""
        here = self
        if self.num_workers:  # set since; with them, torch's processes would load
            here = copy.copy(self)
            here.num_workers = 0
        device = find_device(self.device)
        send = None if device is None else make_carrier(device, PageablePool()).send
        self._recorder = self._make_recorder()
        partition = PassSettings.of(self).partition
        return TimedBatches(DataLoader.__iter__(here), send, name_of(self.dataset), partition, self._recorder)

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
        by_stream = settings.sampler.loader.num_skipped if isinstance(settings.sampler, Source) else 0
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

    def __getstate__(self) -> dict[str, Any]:
        # State of this process alone; a copy begins without it.
        here = (
            "_pass",
            "_around",
            "_wants",
            "_kept_source",
            "_shipped",
            "_memory",
            "_progress",
            "_last",
            "_recorder",
            "_trace",
        )
        return {**self.__dict__, **dict.fromkeys(here)}

    def _begin(
        self, settings: PassSettings, saved: Mapping[str, Any] | None, ended: Mapping[str, Any] | None
    ) -> PassIterator:
        """Begin a pass: the rest of ``saved``, or the one after ``ended``."""
        if self.pin_memory and self.pin_memory_device:
            warnings.warn(
                "pin_memory_device is deprecated, the current accelerator will be used as the device,"
                f"ignore pin_memory_device='{self.pin_memory_device}'.",
                stacklevel=3,
            )
        if isinstance(self._where, Inline):
            set_variables(settings.env)
            local = access_of(settings.dataset) if isinstance(settings.dataset, RPCDataset) else settings.dataset
            streams: Sequence[StreamState] = () if ended is None else streams_of(ended["streams"])
            is_elsewhere = ended is not None
            if saved is ended is None and self._progress is not None and (last := self._progress[1]).finished:
                streams, is_elsewhere = last.streams, last.is_elsewhere
            length, num_skipped = self._IterableDataset_len_called, self._speechbrain_recovery_skip_to or 0
            return InlineIterator(
                settings, local, saved, length, streams, is_elsewhere=is_elsewhere, num_skipped=num_skipped
            )
        with get_client().additions.adding(Additions.of(settings.env, settings.py_modules, settings.forward_output)):
            return self._begin_remote(settings, saved)

    def _begin_remote(self, settings: PassSettings, saved: Mapping[str, Any] | None) -> RemoteIterator:
        assert self._where is not None
        assert not isinstance(self._where, Inline)
        recorder, pickling = self._make_recorder(), 0.0
        with contextlib.ExitStack() as failed:
            here: Here | None = None
            if isinstance(settings.dataset, RPCDataset):
                remote: MutableDataset = access_of(settings.dataset)
                dataset: RemoteDataset = remote
                if (node := remote.place_of_pass()) is not None:
                    here = Here(node, None)
            else:
                name = name_of(settings.dataset)
                if isinstance(self._where, Local):
                    dataset = RemoteDataset(name, None)
                else:
                    # Kept until the next one: an unchanged dataset is on its nodes already.
                    dataset = self._shipped = ship(settings.dataset, name)
                if has_local(self._where):
                    here = self._begin_here(settings, dataset)
                recorder.start.is_instance, pickling = True, time.monotonic() - recorder.start.begun
            local = dataset.local
            if here is not None:
                failed.callback(here.node.close)
                local = here.node
            dataset.spent, recorder.start.dataset = 0.0, lambda: pickling + dataset.spent
            placement = self._choose_nodes(local, 0 if saved is None or saved["finished"] else len(saved["streams"]))
            if self._wants is None or self._wants.num_workers is not self.num_workers:
                self._wants = Wants(self.num_workers, self.min_workers)
            self._memory = get_client().allocator
            length, num_skipped = self._IterableDataset_len_called, self._speechbrain_recovery_skip_to or 0
            iterator = RemoteIterator(
                settings, dataset, placement, recorder, saved, length, self._wants, here, num_skipped
            )
            failed.pop_all()
        recorder.start.in_iter = time.monotonic() - recorder.start.begun
        self._last, self._recorder = weakref.ref(iterator), recorder
        return iterator

    def _begin_here(self, settings: PassSettings, dataset: RemoteDataset) -> Here:
        """A place on this machine for the workers of one pass."""
        functions, parts = DatasetRef(make_key()), {"dataset": settings.dataset, **functions_of(settings)}
        objects = {dataset.key: settings.dataset, functions.key: functions_of(settings)}
        additions = Additions.of(settings.env, settings.py_modules, settings.forward_output)
        inherited = Inherited(available_cpus(), objects, additions=additions, parts=parts)
        return Here(get_client().local_node(self.multiprocessing_context, inherited), functions)

    def _choose_nodes(self, local: LocalNode | None, num_streams: int) -> Placement:
        """Choose the nodes of a pass.

        Args:
            num_streams: Number of streams that go on; 0 if none does.
        """
        assert isinstance(self._where, (Local, Remote))
        share = Partition() if self.partition is None else make_partition(self.partition)
        placement = choose_nodes(
            self._where,
            local,
            partition=share,
            num_workers=num_streams or self.num_workers,
            min_workers=self.min_workers,
        )
        if num_streams:
            # Each stream of an iterable-style dataset continues, on the present nodes.
            homes = itertools.islice(itertools.cycle(placement.homes), num_streams)
            return dataclasses.replace(placement, homes=tuple(homes))
        if placement.followed is None and self.num_workers > len(placement.homes):
            warn_once(
                f"num_workers is {self.num_workers}, but this process's share of the workers of {self._where} is "
                f"{len(placement.homes)}: start them with more --num-workers"
            )
        return placement


def check_transform(loader: RPCDataloader[Any], where: Where | None) -> None:
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


def _check_starts_processes(context: Any) -> None:
    kind = getattr(context, "Process", None)
    if isinstance(kind, type) and not issubclass(kind, BaseProcess):
        raise ValueError(
            f"multiprocessing_context starts objects of {kind.__qualname__} in place of processes, but workers are "
            "processes: leave it out (in MONAI, use_thread_workers), or load in this process by workers='inline'"
        )


def _check_num_workers(num_workers: int | str, dataset: object, transform: object) -> int:
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


def _where(dataset: object, workers: str | Iterable[str] | None, num_workers: int) -> Where | None:
    """The places of the workers; None to load in this process, as torch does."""
    if isinstance(dataset, RPCDataset):
        if workers is not None:
            raise ValueError("workers contradicts the RPCDataset, which has its own: leave it out")
        return dataset._where
    where = find_workers(workers)
    if where is None:
        if isinstance(num_workers, Auto):
            return Local()
        return Local(num_workers) if num_workers > 0 else None
    if isinstance(where, Local) and where.num_workers and num_workers and where.num_workers != num_workers:
        raise ValueError(f"workers={workers!r} and num_workers={num_workers} contradict each other: give one")
    return where
