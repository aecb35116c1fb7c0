"""Digests: of memory, to see whether it has changed, and of values, to see whether two passes give the same ones.

SHA-256 takes 1.3 s per gigabyte. Large pieces of memory are first reduced to one block by a multiplicative hash in
numpy, on several threads. It finds every change but those made to deceive it, and these pieces are the caller's own.
What a peer could forge has SHA-256 under a MAC (``frames``), and pickles of one client have a shorter digest
(``by_value``).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from rpcdataloader.host.resources import available_cpus
from rpcdataloader.host.signals import is_interrupt

# A block of words stays in the fastest caches. A share is what one thread reduces to a block.
_BLOCK_BYTES = 1 << 16
_SHARE_BYTES = 1 << 25
_MAX_THREADS = 4

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no change of a single word is lost
_HALF = np.uint64(32)


def digest_memory(pieces: Iterable[memoryview]) -> bytes:
    """Return a digest of pieces of memory, in their order."""
    found = hashlib.sha256()
    for piece in pieces:
        end = len(piece) // _BLOCK_BYTES * _BLOCK_BYTES
        if end:
            for each in _reduce_all(piece[:end]):
                found.update(each)
        found.update(piece[end:])
    return found.digest()


def _reduce_all(blocks: memoryview) -> Iterator[bytes]:
    """Reduce whole blocks to fewer ones, in several threads."""
    cuts = [*range(0, len(blocks), _SHARE_BYTES), len(blocks)]
    shares = [blocks[start:stop] for start, stop in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(min(_MAX_THREADS, available_cpus()), "rpcdl-digest") as threads:
        reduced: Iterable[bytes] = map(_reduce, shares)
        with contextlib.suppress(RuntimeError):  # an executor takes nothing more once the main thread has ended
            reduced = threads.map(_reduce, shares)
        yield from reduced


def _reduce(share: memoryview) -> bytes:
    """Reduce whole blocks to one: each word to those of its place in all blocks, in their order."""
    blocks = np.frombuffer(share, np.uint64).reshape(-1, _BLOCK_BYTES // 8)
    state: NDArray[np.uint64] = np.zeros_like(blocks[0])
    moved = np.empty_like(state)
    for block in blocks:
        state ^= block
        # A product moves changes up only, and loses those of the highest bits, such as signs: move them down.
        state *= _FACTOR
        np.right_shift(state, _HALF, out=moved)
        state ^= moved
    return state.tobytes()


def digest(value: Any, before: int = 0) -> int:
    """Return a CRC-32 of the contents of ``value``, after what ``before`` is the digest of; the same in any process.

    A list of integers, as samplers give it, takes 10 ns per integer. Of objects of other classes than those of Python,
    numpy, torch and PIL only the class counts, as they say nothing that is the same in all processes.
    """
    if type(value) is int and value.bit_length() < 64:
        value = [value]
    elif type(value) is range:
        value = list(value)
    if type(value) is list:
        try:
            return crc32(struct.pack(f"{len(value)}q", *value), before)
        except (struct.error, TypeError):
            pass  # other elements, of which each has a digest
    try:
        return _digest(value, before)
    except Exception as error:  # a value that cannot be read must not end a pass
        if is_interrupt(error):
            raise
        return before


def _digest(value: Any, before: int) -> int:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, (list, tuple)):
        for element in value:
            before = digest(element, before)
        return before
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return digest(value.tolist(), before)
    if isinstance(value, str):
        data: Any = value.encode(errors="surrogatepass")
    elif isinstance(value, (bytes, bytearray)):
        data = value
    elif value is None or type(value) in (bool, int, float, complex):
        data = repr(value).encode()
    elif isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(value, (np.ndarray, np.generic)):
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    elif hasattr(value, "tobytes"):  # images of PIL, arrays of Python
        data = value.tobytes()
    else:
        data = type(value).__qualname__.encode()
    return crc32(data, before)
