"""Digests of indices and samples: two passes that give the same ones have the same digest, in any process."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch


def digest(value: Any, before: int = 0) -> int:
    """Return a CRC-32 of the contents of ``value``, after what ``before`` is the digest of.

    A list of integers, as samplers give it, takes 10 ns per integer. Of objects of other classes than those of Python,
    numpy, torch and PIL only the class counts, as they say nothing that is the same in all processes.
    """
    if type(value) is int:
        value = [value]
    if type(value) is list:
        try:
            return crc32(struct.pack(f"{len(value)}q", *value), before)
        except (struct.error, TypeError):
            pass  # other elements, of which each has a digest
    try:
        return _digest(value, before)
    except Exception:  # a value that cannot be read must not end a pass
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
