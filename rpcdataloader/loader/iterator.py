"""What ``iter(loader)`` returns when workers load."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.client.node import Node
from rpcdataloader.diagnosis.recorder import Recorder
from rpcdataloader.diagnosis.records import Records
from rpcdataloader.diagnosis.verdict import Diagnosis
from rpcdataloader.fetch.bad_samples import Reduced
from rpcdataloader.loader.driver import Driver
from rpcdataloader.loader.passes import warn_if_longer
from rpcdataloader.loader.placement import Placement
from rpcdataloader.loader.reporting import to_status
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.tasks import Progress
from rpcdataloader.wire.status import LoopStatus

# As torch's profiler names the ranges of its own loaders, which it finds by the beginning.
_RANGE = "enumerate(DataLoader)#RPCDataloader.__next__"

# Seconds without news after which a loop is not reported: another one may run in its middle.
_PAUSE = 60.0

_is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class RemoteIterator:
    """What ``iter(loader)`` returns when workers load. Dropping it ends its workers.

    Args:
        placement: Of the workers; for an iterable-style dataset, of the streams.
        saved: The state of the pass to go on with.
        reported_length: What ``len`` of the loader has said of an iterable-style dataset.
        before: What is known of the pass before.
    """

    def __init__(
        self,
        settings: PassSettings,
        dataset: RemoteDataset,
        placement: Placement,
        saved: Mapping[str, Any] | None = None,
        reported_length: int | None = None,
        before: Records | None = None,
    ) -> None:
        self._driver = Driver(settings, dataset, placement, saved, before)
        self._name = dataset.name
        self._reported_length = reported_length
        self._sampler = settings.sampler
        self._max_skipped = settings.max_skipped
        self._rank = settings.partition.rank if settings.partition.world_size > 1 else None
        self._news: tuple[tuple[float, float], float] = (-1.0, -1.0), 0.0  # of the last report, and when it came
        get_client().reporter.add(self)
        weakref.finalize(self, get_client().janitor.leave, self._driver.close).atexit = False

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: The sampler is at its end, and everything was delivered.
            RuntimeError: No batch within the loader's timeout.
            ConnectionLostError: No worker is left and none came back in time, or a batch has ended too many of them.
            Exception: What the dataset, the collate function or the init function raised on a worker.
            BadSamplesError: More samples were skipped than the loader allows.
        """
        try:
            # torch's loaders open a range for every batch, which takes as long as all that is noted of it.
            while type(batch := self._profiled_next() if _is_profiled() else self._driver.next()) is Reduced:
                self.progress.account_reduced(batch, self._max_skipped)
                if not batch.is_empty:
                    batch = batch.batch
                    break
        except StopIteration:
            self._driver.tell()
            raise
        if self._reported_length is not None:
            warn_if_longer(self.progress.num_yielded, self._reported_length, self._name)
        return batch

    def _profiled_next(self) -> Any:
        with torch.profiler.record_function(_RANGE):
            return self._driver.next()

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def progress(self) -> Progress:
        """How far this pass has come; changes with it."""
        return self._driver.progress

    @property
    def is_usable(self) -> bool:
        """Whether :meth:`reset` is possible."""
        return self._driver.is_usable

    @property
    def recorder(self) -> Recorder:
        """What takes notes of this pass; it refers to nothing else."""
        return self._driver.recorder

    def diagnosis(self) -> Diagnosis:
        """Why the loop waits."""
        return self._driver.diagnosis()

    def report(self) -> LoopStatus | None:
        """The diagnosis for node servers; None if the pass is over, or neither takes nor awaits a batch for a while."""
        if self.progress.finished or not self._driver.is_open():
            return None
        diagnosis, now = self.diagnosis(), time.monotonic()
        news = float(self.progress.num_yielded), diagnosis.wait_share
        if news != self._news[0]:
            self._news = news, now
        return to_status(diagnosis, self._name, self._rank) if now - self._news[1] < _PAUSE else None

    def add_nodes(self, nodes: Sequence[Node]) -> None:
        """Let more nodes help from now on."""
        self._driver.add_nodes(nodes)

    def remove_nodes(self, nodes: Sequence[Node]) -> None:
        """Ask no more of these nodes."""
        self._driver.remove_nodes(nodes)

    def reset(self, reported_length: int | None = None) -> None:
        """Begin another epoch with the same workers."""
        self._reported_length = reported_length
        self._driver.begin_epoch()
