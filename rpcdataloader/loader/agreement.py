"""Ranks with unequal numbers of batches are found when an epoch begins, before they wait for each other at its end.

The ranks talk through the store of their process group, and nobody waits: whoever comes first leaves its number there,
and the others compare theirs with it. What only one rank iterates over is compared with nothing. A false alarm would be
worse than none, so these are compared only:

- map-style loaders over torch's ``DistributedSampler`` or ours, with torch's ``BatchSampler`` or none, that divide the
  dataset among all ranks of the group. Their numbers are meant to be equal. Those of other samplers, also subclasses,
  may not be: Lightning's for prediction is one.
- of these, loaders that the same lines of the program have made, as the same one in turn;
- passes over them with the same number, in the same epoch of the sampler.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch.distributed
from torch.utils.data import BatchSampler, DistributedSampler

from rpcdataloader.loader.sampler import ResumableDistributedSampler

logger = logging.getLogger("rpcdataloader.loader")

_SAMPLERS = (DistributedSampler, ResumableDistributedSampler)

# For each place in the program, the numbers of the loaders that it makes.
_ordinals: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class Agreement:
    """What one loader has in common with that of other ranks.

    To be made while the loader is, in the same thread.
    """

    def __init__(self) -> None:
        self._place = _place_in_program()
        self._ordinal = next(_ordinals[self._place])
        self._num_passes = 0

    def begin_pass(self, batches: Any, *, compare: bool = True) -> None:
        """Compare the number of batches of the next pass with that of other ranks. Costs a message or two.

        Args:
            batches: The batch sampler or, without automatic batching, the sampler.
            compare: False for a pass that is only counted.

        Raises:
            ValueError: Another rank has another number.
        """
        number = self._num_passes
        self._num_passes += 1
        sampler = distributed_sampler(batches)
        if not compare or sampler is None or not _divides_among_all(sampler):
            return
        # One key for all epochs, and for all loaders that are made here: the store keeps the last one.
        key = f"rpcdataloader/num_batches/{self._place}"
        mine = [self._ordinal, number, sampler.epoch], len(batches), sampler.rank
        try:
            _same_pass, found, rank = _meet(_store(), key, mine)
        except Exception as exc:
            # A store that is gone, or that cannot do this, must not end a training.
            logger.debug("numbers of batches are not compared: %s", exc)
            return
        if found != len(batches):
            raise ValueError(
                f"rank {sampler.rank} has {len(batches)} batches in this epoch, and rank {rank} has {found}: at the "
                "end, one would wait for the other for ever. Give DistributedSampler a dataset of the same length on "
                "all ranks, and the loaders the same batch_size and drop_last; or say check_num_batches=False where "
                "the numbers may differ, as with torch.distributed.algorithms.Join"
            )


def distributed_sampler(batches: Any) -> DistributedSampler[Any] | None:
    """The sampler that gives all ranks the same number of samples, if there is such a one behind these batches."""
    sampler: Any = batches.sampler if type(batches) is BatchSampler else batches
    return sampler if type(sampler) in _SAMPLERS else None


def _divides_among_all(sampler: DistributedSampler[Any]) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    here = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return sampler.num_replicas > 1 and here == (sampler.rank, sampler.num_replicas)


def _store() -> Any:
    """The store of the process group. In no version of torch has it a public name that all versions have."""
    return torch.distributed.distributed_c10d._get_default_store()


def _meet(store: Any, key: str, mine: tuple[list[int], int, int]) -> tuple[list[int], int, int]:
    """What the rank that came first has left for this pass, which may be ``mine``.

    Never waits for a key, as getting one would that somebody else deletes.
    """
    text = json.dumps(mine)
    found = bytes(store.compare_set(key, "", text)).decode()
    if json.loads(found)[0] != mine[0]:
        # Of another pass. If somebody else replaces it at the same time, it is theirs that is found.
        found = bytes(store.compare_set(key, found, text)).decode()
    that_pass, num_batches, rank = json.loads(found)
    return (that_pass, num_batches, rank) if that_pass == mine[0] else mine


def _place_in_program() -> str:
    """The lines that are being executed, from here to the beginning of the thread, in short.

    Without names of files, whose folders may be others on other machines.
    """
    lines = [f"{frame.f_code.co_name}:{line}" for frame, line in traceback.walk_stack(sys._getframe())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
