"""Random numbers that depend on a sample's position in the epoch, and on nothing else.

Before each sample, python's, numpy's and torch's global generators are seeded from (base seed, epoch, position). So the
augmentation of a batch depends neither on its worker nor on that worker's past.

The state here is the process's, like the three generators: one sample at a time per process.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rpcdataloader.host.state import get_states, set_states

_MASK_64 = 2**64 - 1
_PACK_KEY = struct.Struct("<QQQ").pack
_UNPACK_SEEDS = struct.Struct("<QQLL").unpack

# Seeds of a sample (63 bits), and of python's (64), numpy's and torch's generators (32 each) while it is loaded.
Seeds = tuple[int, int, int, int]

SAMPLE, BATCH, AHEAD = b"sample", b"batch", b"ahead"

# Seed of the sample that is being loaded; and the numbers of the calls of get_sample_seed() in a step of a stream, in
# which it may load several samples, or None if all calls have that seed. One object, as threads of a dataset may call.
_current: tuple[int, Iterator[int] | None] | None = None


def get_sample_seed() -> int:
    """Return the seed of the sample that is being loaded, for datasets with generators of their own.

    While a loader of this package fetches a sample, every call returns the same number, which depends on base seed,
    epoch and position alone. In ``__getitems__`` it is the seed of the batch's first sample, in ``collate_fn`` one of
    the batch. A stream may read ahead: between two of its samples, each call returns another number, in a fixed order.
    Elsewhere, for example under a plain ``torch.utils.data.DataLoader``, each call draws a new number from torch's
    default generator.

    Returns:
        An integer from 0 to 2**63 - 1. Take it modulo ``2**32`` for ``numpy.random.seed``.
    """
    if (current := _current) is not None:
        seed, calls = current
        number = 0 if calls is None else next(calls)
        return derive_seeds(AHEAD, seed, 0, number)[0] if number else seed
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def set_random_seeds(base_seed: int, worker_id: int) -> None:
    """Seed the global generators of python, numpy and torch of this process once, as torch does in its workers.

    For a ``worker_init_fn``, or for a call by ``rpc_async``. Generators of accelerators are left alone.

    Args:
        base_seed: Seed from 0 to 2**63 - 1, the same on all workers.
        worker_id: Number from 0; workers with different ids get different random numbers.
    """
    random.seed(base_seed + worker_id)
    torch.default_generator.manual_seed(base_seed + worker_id)
    # numpy's and torch's generators would give the same numbers for the same seed (see below): mix, as torch does.
    entropy = np.random.SeedSequence([worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32])
    np.random.seed(entropy.generate_state(4))


def derive_seeds(purpose: bytes, base_seed: int, epoch: int, number: int) -> Seeds:
    """Return the seeds of a sample, or for collating a batch.

    Args:
        purpose: :data:`SAMPLE`, :data:`BATCH` or :data:`AHEAD`, whose seeds are never equal other than by chance.
        base_seed: Seed of 64 bits; further bits are ignored.
        epoch: Number of the epoch, from 0.
        number: Position of the sample or number of the batch in the epoch, over all ranks: that in this rank's loader
            times world size, plus rank. An index would repeat in sampling with replacement, and with it the
            augmentation.
    """
    # Neighbouring positions must give unrelated numbers. BLAKE2b does that, separates purposes by its `person`
    # parameter, and takes 0.6 us: less than a few rounds of an integer mixer such as splitmix64 in Python (1.0 us).
    key = _PACK_KEY(base_seed & _MASK_64, epoch, number)
    digest = hashlib.blake2b(key, digest_size=24, person=purpose).digest()
    seed, python_seed, numpy_seed, torch_seed = _UNPACK_SEEDS(digest)
    return seed >> 1, python_seed, numpy_seed, torch_seed  # the first fits int64, as torch and numpy need


def begin_sample(seeds: Seeds, *, reads_ahead: bool = False) -> None:
    """Seed the global generators of python, numpy and torch for a sample, or for collating a batch, in 6 us.

    Args:
        seeds: Seeds of the sample; the first becomes the result of :func:`get_sample_seed`.
        reads_ahead: True for a step in which samples after this one may be loaded, too: only the first call of
            :func:`get_sample_seed` gives this seed, and each further one another.
    """
    global _current
    # Numpy and torch run the same Mersenne twister and start it from 32 bits in the same way (torch ignores the upper
    # half): equal seeds give equal numbers. A dataset may also seed its own generator with `get_sample_seed()`. So each
    # has its own seed.
    seed, python_seed, numpy_seed, torch_seed = seeds
    _current = seed, itertools.count() if reads_ahead else None
    random.seed(python_seed)
    np.random.seed(numpy_seed)
    # `torch.manual_seed` visits every device, 126 us.
    torch.default_generator.manual_seed(torch_seed)


def end_sample() -> None:
    """Note that no sample is being loaded in this process."""
    global _current
    _current = None


def present_state() -> Callable[[], None]:
    """Return a function that sets the three global generators, and :func:`get_sample_seed`, to where they are now."""
    states, outer = get_states(), _current

    def restore() -> None:
        global _current
        set_states(states)
        _current = outer

    return restore


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the three global generators, and the result of :func:`get_sample_seed`, at the end of a block."""
    restore = present_state()
    try:
        yield
    finally:
        restore()
