"""Differences between two samples, and their usual causes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from rpcdataloader.wire.diagnose import USER_ERRORS

#: Ways to load a sample again, with equal seeds.
AGAIN = "again in the same worker"
OTHER_WORKER = "in another worker"
OTHER_NODE = "on another node"
SENT = "sent as an instance"
HERE = "in this process"

# Ids of the objects above the two at hand, which may lead back to them.
_Above = frozenset[tuple[int, int]]


def find_differences(
    first: Any, second: Any, path: str = "sample", above: _Above = frozenset()
) -> Iterator[tuple[str, str]]:
    """Compare two samples bit by bit, so that a NaN equals itself.

    Yields:
        Path of an innermost differing part (``sample[0]['image']``), and the difference (``12 of 4096 values``).
    """
    if first is second or (id(first), id(second)) in above:
        return
    above |= {(id(first), id(second))}
    if type(first) is not type(second):
        yield path, f"{kind_of(first)} and {kind_of(second)}"
    elif isinstance(first, torch.Tensor) and first.layout is torch.strided and not first.is_nested:
        yield from _compare_tensors(first, second, path)
    elif isinstance(first, np.generic) or type(first) is np.ndarray:
        try:
            yield from _compare_tensors(torch.tensor(first), torch.tensor(second), path)
        except (TypeError, ValueError):  # text, objects, structures
            yield from find_differences(first.tolist(), second.tolist(), path, above)
    elif isinstance(first, dict) and first.keys() == second.keys():
        for key in first:
            yield from find_differences(first[key], second[key], f"{path}[{key!r}]", above)
    elif isinstance(first, (list, tuple)) and len(first) == len(second):
        fields = getattr(first, "_fields", None)
        for i, (mine, other) in enumerate(zip(first, second, strict=True)):
            yield from find_differences(mine, other, f"{path}.{fields[i]}" if fields else f"{path}[{i}]", above)
    elif isinstance(first, (list, tuple)):
        yield path, f"{len(first)} and {len(second)} items"
    elif isinstance(first, dict):
        yield path, f"keys {list(first)} and {list(second)}"
    elif isinstance(first, (str, bytes, bytearray, int, float, complex, set, frozenset)):
        # The text of a number tells 0.0 from -0.0, and equates all NaN; the text of a set has an order.
        if repr(first) != repr(second) and (isinstance(first, (float, complex)) or first != second):
            shown = f"{first!r} and {second!r}"
            yield path, shown if len(shown) < 120 else f"two {kind_of(first)} that are not the same"
    else:
        try:
            # What pickle saves, and so what was sent: attributes, slots, and the class's own state.
            parts = [
                [list(part) if isinstance(part, Iterator) else part for part in obj.__reduce_ex__(4)]
                for obj in (first, second)
            ]
        except USER_ERRORS:
            return  # sent by name (functions, classes), or not at all
        yield from find_differences(parts[0], parts[1], f"{path}.__reduce__()", above)


def _compare_tensors(first: torch.Tensor, second: torch.Tensor, path: str) -> Iterator[tuple[str, str]]:
    if first.dtype != second.dtype:
        yield path, f"dtype {first.dtype} and {second.dtype}"
    elif first.shape != second.shape:
        yield path, f"shape {tuple(first.shape)} and {tuple(second.shape)}"
    elif first.numel():
        mine, other = (
            tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
            for tensor in (first, second)
        )
        differing = (mine.view(torch.uint8) != other.view(torch.uint8)).view(-1, first.element_size()).any(dim=1)
        if differing.any():
            largest = math.nan if first.is_complex() else (mine.double() - other.double()).abs().max().item()
            by = f", by up to {largest:.3g}" if math.isfinite(largest) else ""
            yield path, f"{int(differing.sum())} of {first.numel()} values{by}"


def kind_of(value: Any) -> str:
    """``PIL.Image.Image``; built-in types without their module."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def explain(runs: Collection[str]) -> str:
    """The usual cause of a difference in these runs, and its remedy."""
    if AGAIN in runs and OTHER_WORKER in runs:
        cause = "a random generator of its own that is never seeded, the time, or memory never written (np.empty)"
    elif OTHER_WORKER in runs:
        cause = "the id of the process, or a generator made in the constructor where each worker builds for itself"
    elif AGAIN in runs:
        cause = "state kept from sample to sample: a generator made in the constructor, a cache that changes"
    else:
        return "the order of a set or folder (sort it), hash() of a string, or other versions, files or paths there"
    return f"{cause}: draw from the global generators, or seed your own with get_sample_seed() in each sample"
