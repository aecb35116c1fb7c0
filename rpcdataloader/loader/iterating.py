"""``iter(loader)``: where a pass begins.

It is torch's own iterator where torch loads; the iterator of persistent workers, which go on; one that loads in this
process (``workers="inline"``); or one with new workers, on nodes or in a place on this machine that is its own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset, make_key, ship
from rpcdataloader.client.discovery import Inline, Local, Remote
from rpcdataloader.client.local import LocalNode
from rpcdataloader.client.mutable import MutableDataset
from rpcdataloader.client.sharing import Partition, of_rank
from rpcdataloader.client.worker import DatasetRef
from rpcdataloader.fetch.batch_loader import StreamState
from rpcdataloader.host.environment import Additions, set_variables
from rpcdataloader.host.resources import available_cpus
from rpcdataloader.loader.copying import find_device, make_carrier
from rpcdataloader.loader.dataset import RPCDataset, access_of
from rpcdataloader.loader.executor import Here
from rpcdataloader.loader.inline import InlineIterator
from rpcdataloader.loader.iterator import NO_OTHER_PASS, CannotGoOnError, PassIterator, RemoteIterator
from rpcdataloader.loader.passes import functions_of
from rpcdataloader.loader.placement import Placement, choose_nodes, has_local, warn_once
from rpcdataloader.loader.settings import PassSettings, check_num_workers, check_transform, make_partition, name_of
from rpcdataloader.loader.states import ended_streams, has_begun
from rpcdataloader.loader.tools import LoaderTools, TimedBatches, keep_out_of_graphs
from rpcdataloader.loader.waits import WantedWorkers
from rpcdataloader.server.local import Inherited
from rpcdataloader.wire.slabs import PageablePool

_T_co = TypeVar("_T_co", covariant=True)


class LoaderIteration(LoaderTools[_T_co]):
    """The passes over an ``RPCDataloader``, and what it keeps from one to the next."""

    device: Any
    min_workers: int
    partition: Any
    transform: Callable[[Any], Any] | None

    # SpeechBrain's loader sets this to the number of batches of which a checkpoint tells. Its own way to leave them out
    # replaces the constructor of torch's iterators.
    _speechbrain_recovery_skip_to: int | None = None

    _pass: PassIterator | None = None  # with persistent workers
    _around: Any = None  # what a subclass's own _get_iterator() has put around it
    _shipped: RemoteDataset | None = None
    _wanted: WantedWorkers | None = None
    _memory: PageablePool | None = None  # for batches, kept from pass to pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's private iterator classes are not ours
        keep_out_of_graphs()
        check_transform(self, self._where)
        if self._where is None:
            return self._iterate_here()
        if type(self)._get_iterator is LoaderIteration._get_iterator:
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
        self.num_workers = check_num_workers(self.num_workers, self.dataset, self.transform)
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
        self._speechbrain_recovery_skip_to = None
        before, self._progress = self._progress, (settings, iterator.progress)
        # In one step, see ``tasks``: the state, and the iterator that goes on with it.
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

    def __getstate__(self) -> dict[str, Any]:
        # State of this process alone; a copy begins without it.
        here = "_pass", "_around", "_wanted", "_kept_source", "_shipped", "_memory", "_progress", "_last"
        return {**self.__dict__, **dict.fromkeys((*here, "_recorder", "_trace"))}

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
            streams: Sequence[StreamState] = () if ended is None else ended_streams(ended)
            is_elsewhere = ended is not None
            if saved is ended is None and self._progress is not None:
                streams, is_elsewhere = self._progress[1].last_streams(), self._progress[1].is_elsewhere
            length, num_left_out = self._IterableDataset_len_called, self._speechbrain_recovery_skip_to or 0
            return InlineIterator(
                settings, local, saved, length, streams, is_elsewhere=is_elsewhere, num_left_out=num_left_out
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
            if self._wanted is None or self._wanted.num_workers is not self.num_workers:
                self._wanted = WantedWorkers(self.num_workers, self.min_workers)
            self._memory = get_client().allocator
            wanted, length = self._wanted, self._IterableDataset_len_called
            left_out = self._speechbrain_recovery_skip_to or 0
            iterator = RemoteIterator(settings, dataset, placement, recorder, saved, length, wanted, here, left_out)
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
        number = num_streams or self.num_workers
        placement = choose_nodes(self._where, local, partition=share, num_workers=number, min_workers=self.min_workers)
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
