"""Load the batches of a stream, which is one worker's iterator over an iterable-style dataset.

How to continue from a place follows torchdata's StatefulDataLoader: the state is the iterator's if it has one, else the
dataset's. Without any state, delivered samples are taken again and thrown away.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils.data.graph_settings
from torch.utils.data import IterDataPipe

from rpcdataloader.fetch import seeding
from rpcdataloader.fetch.batch_loader import BatchLoader, BatchMetrics, LoaderSpec, StreamState
from rpcdataloader.fetch.samples import DONE, here, stopped

logger = logging.getLogger("rpcdataloader.loader")


class StreamLoader(BatchLoader):
    """Load the batches of one stream of an iterable-style dataset.

    The seeds come from rank, stream and place in the stream.
    """

    def _begin(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._ended = self._spec.stream is not None and self._spec.stream.ended
        self._num_samples = 0
        self._num_batches = 0
        self._failed_at = -1  # number of samples after the last skipped one

    def _load(
        self,
        indices: Any,
        position: int,  # noqa: ARG002
        batch_number: int,
        left_out: Mapping[int, str] | None,  # noqa: ARG002
    ) -> tuple[BatchMetrics, Any]:
        """Load the next batch. The stream itself knows its place; ``indices`` only gives the number of samples.

        Returns:
            Timings, and the batch with the :class:`StreamState` after it, or None in its place at the end. If samples
            were skipped, or the stream ended after a skipped one, a :class:`Reduced` replaces the batch.
        """
        start = time.perf_counter()
        here.sample[0] = self._num_samples
        here.batch[0] = batch_number + 1
        try:
            samples = self._next_samples(len(indices) if self._spec.auto_collation else 1)
        except StopIteration:
            self._ended, samples = True, []
        except BaseException:
            # As with torch: without an iterator there are no more batches.
            self._ended = self._ended or self._iterator is None
            raise
        here.sample[0] = DONE
        fetched = time.perf_counter()
        if self._ended:
            self._note_end()
            if not samples and self._reduced is None:
                self._iterator = None
                return (fetched - start, 0.0), (None, None)
        self._num_batches += 1
        number = (self._num_batches - 1) * self._spec.num_workers + self._spec.worker_id
        try:
            if self._reduced is not None:
                batch = self._collate_rest(samples, number)
            else:
                batch = self._collate_seeded(samples if self._spec.auto_collation else samples[0], number)
        except BaseException as error:
            self._name(error, f"collating batch {self._num_batches - 1} of stream {self._spec.worker_id}")
            raise
        return (fetched - start, time.perf_counter() - fetched), (batch, self._state())

    def _next_samples(self, batch_size: int) -> list[Any]:
        samples: list[Any] = []
        try:
            for _ in range(batch_size):
                try:
                    samples.append(self._next_sample())
                except StopIteration:
                    raise
                except BaseException as error:
                    if self._iterator is None or not self._skip([self._num_samples - 1], error):
                        sample = f"position {self._num_samples - 1}" if self._num_samples else "the beginning"
                        self._name(error, f"{sample} of stream {self._spec.worker_id}, batch {self._num_batches}")
                        raise
                    self._failed_at = self._num_samples
        except StopIteration:
            self._ended = True
            if not samples or self._spec.drop_last:
                raise
        return samples

    def _note_end(self) -> None:
        """Report, once, that the stream has ended right after a skipped sample."""
        if self._failed_at == self._num_samples:
            self._failed_at = -1
            self._begin_reduced().ends_stream = True

    def _next_sample(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._iterator is None:
            try:
                self._iterator = self._open_iterator()
            except StopIteration as stop:
                raise stopped(f"{type(self._dataset).__name__}.__iter__()") from stop
        here.sample[0] = self._num_samples
        self._begin_sample(self._num_samples)
        self._num_samples += 1  # failed samples count: skipping repeats them
        try:
            return next(self._iterator)
        except StopIteration:
            self._num_samples -= 1
            raise

    def _open_iterator(self) -> Iterator[Any]:
        """Iterate over the dataset from the saved place."""
        saved = self._spec.stream or StreamState()
        _check_split(self._dataset, self._spec)
        self._begin_sample(-1)
        _shuffle_pipe(self._dataset, self._spec)
        _load_state("dataset", self._dataset, saved)
        iterator: Iterator[Any] = iter(self._dataset)
        _load_state("iterator", iterator, saved)
        for number in range(0 if saved.owner else saved.num_samples):
            self._begin_sample(number)
            if not _skip_sample(iterator) and self._spec.skips:
                self._failed_at = number + 1
        self._num_samples, self._num_batches = saved.num_samples, saved.num_batches
        return iterator

    def _state(self) -> StreamState:
        owner, state = _state_of(self._iterator, self._dataset)
        # A worker pickles it now; here the dataset may go on changing the same object.
        state = copy.deepcopy(state) if self._inline else state
        return StreamState(self._num_samples, self._num_batches, owner, state, self._ended)

    def _begin_sample(self, position: int) -> None:
        # -1 stands for the time before the first sample.
        super()._begin_sample((position + 1) * self._spec.num_workers + self._spec.worker_id)


def _check_split(dataset: Any, spec: LoaderSpec) -> None:
    """Refuse a Hugging Face dataset that was split for the session's rank, where the stream is of another rank."""
    split = getattr(dataset, "_distributed", None)
    if spec.job is not None and split is not None and (split.rank, split.world_size) != spec.job:
        raise ValueError(
            f"this stream began on rank {spec.job[0]} of {spec.job[1]}, but its dataset is that of rank {split.rank} "
            f"of {split.world_size}: let an RPCDataset with build='worker' call split_dataset_by_node with RANK and "
            "WORLD_SIZE of the environment"
        )


def _shuffle_pipe(dataset: Any, spec: LoaderSpec) -> None:
    """Let a pipe of torch shuffle as on all other workers, which then take different parts of the same order."""
    if isinstance(dataset, IterDataPipe):
        # A dataset built on the nodes is not known to be a pipe where seeds are drawn.
        seed = spec.pipe_seed
        if seed is None:
            seed = seeding.derive_seeds(seeding.BATCH, spec.base_seed, spec.epoch, 2**64 - 1)[0]
        generator = torch.Generator().manual_seed(seed)
        torch.utils.data.graph_settings.apply_random_seed(dataset, generator)


def _state_of(iterator: Any, dataset: Any) -> tuple[str, Any]:
    """Return the owner of a state, the iterator before the dataset, and the state."""
    for name, owner in (("iterator", iterator), ("dataset", dataset)):
        if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
            return name, owner.state_dict()
    return "", None


def _load_state(name: str, owner: Any, saved: StreamState) -> None:
    """Load the saved state of the ``"dataset"``, before the iterator is created, or of the ``"iterator"``.

    Raises:
        ValueError: The state is of another kind of dataset.
    """
    if saved.owner == name:
        if not hasattr(owner, "load_state_dict"):
            raise ValueError(
                f"the {name} was saved by its state_dict(), but {type(owner).__name__} has no load_state_dict()"
            )
        owner.load_state_dict(copy.deepcopy(saved.state))


def _skip_sample(iterator: Iterator[Any]) -> bool:
    """Throw away a delivered sample.

    Returns:
        False if it failed, as it must have failed before.

    Raises:
        ValueError: The stream has ended.
    """
    try:
        next(iterator)
    except StopIteration:
        raise ValueError("the saved pass had delivered more samples than this iterable-style dataset has now") from None
    except Exception:
        # It failed before, when it was delivered.
        logger.debug("a skipped sample has failed again", exc_info=True)
        return False
    return True
