"""What is left of a sampler after so many batches, without making these."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

from rpcdataloader.loader.tasks import TaskSource

# Iterators that can be set to a place.
_PLACED: tuple[type, ...] = (type(iter([])), type(iter(range(0))))

# Samples that are thrown away at once.
_CHUNK_SIZE = 1 << 14


def skip(samples: Iterator[Any], sampler: Any, num_batches: int, *, auto_collation: bool) -> tuple[Iterator[Any], int]:
    """The iterator after so many batches, and how many samples were in them.

    Args:
        samples: Iterator over the sampler, at its beginning or where its own state has taken it.
        sampler: What it iterates over.
        num_batches: To leave out; without ``auto_collation``, samples.

    Raises:
        ValueError: There are not so many.
    """
    if num_batches == 0:
        # Samplers choose their order when they are asked for the first batch, which must not wait.
        for first in samples:
            return itertools.chain([first], samples), 0
        return samples, 0
    if not auto_collation:
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
        for task in itertools.islice(source, num_batches):
            num_samples += task.num_samples
            num_skipped += 1
    if num_skipped < num_batches:
        raise ValueError(
            f"the saved pass had delivered {num_batches} batches, but the sampler has only {num_skipped} now: have "
            "dataset, batch size or sampler changed?"
        )
    return samples, num_samples


def _consume(iterator: Iterator[Any], count: int) -> int:
    """Throw away ``count`` elements; returns how many there were."""
    num_consumed = 0
    while num_consumed < count:
        num_consumed += _jump(iterator, count - num_consumed)
        # As a list, 30 ns for each instead of 60 for counting.
        num_taken = len(list(itertools.islice(iterator, min(count - num_consumed, _CHUNK_SIZE))))
        num_consumed += num_taken
        if not num_taken:
            break
    return num_consumed


def _jump(iterator: Any, count: int) -> int:
    """Throw away up to ``count`` elements at once, where that is possible; returns how many.

    torch's samplers are iterators over a list or range, or generators that have come to one. Those can be set to a
    place, as copying and unpickling do, so that millions of samples take no time.
    """
    while getattr(iterator, "gi_yieldfrom", None) is not None:
        iterator = iterator.gi_yieldfrom
    if type(iterator) not in _PLACED:
        return 0
    count = min(count, operator.length_hint(iterator))
    if count:
        _iter, _args, place = iterator.__reduce__()
        iterator.__setstate__((place or 0) + count)
    return count
