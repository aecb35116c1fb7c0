"""Where two samples differ, what that usually means, and which part of a sample does not collate."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rpcdataloader.wire.diagnose import USER_ERRORS

#: The ways in which a sample is loaded again, with equal seeds.
AGAIN = "again in the same worker"
OTHER_WORKER = "in another worker"
OTHER_ORDER = "in another order"
OTHER_NODE = "on another node"
HERE = "in this process"

_SEED_ADVICE = "draw from the global generators, or seed your own with get_sample_seed() in each sample"


@dataclass(frozen=True, slots=True)
class Difference:
    """A part that is not the same in two samples.

    Attributes:
        path: ``sample[0]['image']``.
        what: ``12 of 4096 values``.
    """

    path: str
    what: str


def find_differences(first: Any, second: Any, path: str = "sample") -> list[Difference]:
    """Compare two samples bit by bit, so that a NaN equals itself.

    Args:
        path: What the caller calls them.

    Returns:
        The innermost parts that differ; empty if none does.
    """
    return list(_compare(first, second, path, {}))


# Pairs that are being compared or have been, kept alive so that their ids stay theirs.
_Visited = dict[tuple[int, int], tuple[Any, Any]]


def _compare(first: Any, second: Any, path: str, visited: _Visited) -> Iterator[Difference]:
    if (id(first), id(second)) in visited:
        return
    visited[id(first), id(second)] = first, second
    if type(first) is not type(second):
        yield Difference(path, f"{kind_of(first)} and {kind_of(second)}")
    elif isinstance(first, torch.Tensor) and _has_bytes(first):
        yield from _compare_tensors(first, second, path)
        if type(first) is not torch.Tensor:
            yield from _compare_attributes(vars(first), vars(second), path, visited)
    elif isinstance(first, np.generic) or type(first) is np.ndarray:
        yield from _compare_arrays(np.asarray(first), np.asarray(second), path, visited)
    elif isinstance(first, dict):
        yield from _compare_entries(first, second, path, visited)
    elif isinstance(first, (list, tuple)):
        if len(first) != len(second):
            yield Difference(path, f"{len(first)} and {len(second)} items")
        else:
            fields = getattr(first, "_fields", None)
            for i, (mine, other) in enumerate(zip(first, second, strict=True)):
                yield from _compare(mine, other, f"{path}.{fields[i]}" if fields else f"{path}[{i}]", visited)
    elif isinstance(first, float):
        if struct.pack("d", first) != struct.pack("d", second):
            yield Difference(path, f"{first!r} and {second!r}")
    elif first is None or isinstance(first, (str, bytes, bytearray, int, complex, set, frozenset)):
        if first != second:
            yield Difference(path, _shown(first, second))
    else:
        yield from _compare_objects(first, second, path, visited)


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _compare_tensors(first: torch.Tensor, second: torch.Tensor, path: str) -> Iterator[Difference]:
    if first.dtype != second.dtype:
        yield Difference(path, f"dtype {first.dtype} and {second.dtype}")
    elif first.shape != second.shape:
        yield Difference(path, f"shape {tuple(first.shape)} and {tuple(second.shape)}")
    else:
        mine, other = (_flat(tensor) for tensor in (first, second))
        number = _count_differing(mine.view(torch.uint8).numpy(), other.view(torch.uint8).numpy(), first.itemsize)
        if number:
            largest = math.nan
            if not first.dtype.is_complex:
                largest = (mine.double() - other.double()).abs().max().item()
            yield Difference(path, _share_of_values(number, first.numel(), largest))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().as_subclass(torch.Tensor).cpu()
    return plain.resolve_conj().resolve_neg().reshape(-1).contiguous()


def _compare_arrays(first: Any, second: Any, path: str, visited: _Visited) -> Iterator[Difference]:
    if first.dtype != second.dtype:
        yield Difference(path, f"dtype {first.dtype} and {second.dtype}")
    elif first.shape != second.shape:
        yield Difference(path, f"shape {first.shape} and {second.shape}")
    elif first.dtype.hasobject:
        yield from _compare(first.tolist(), second.tolist(), path, visited)
    elif first.dtype.itemsize:
        mine, other = (np.ascontiguousarray(array).reshape(-1) for array in (first, second))
        number = _count_differing(mine.view(np.uint8), other.view(np.uint8), first.dtype.itemsize)
        if number:
            is_real = first.dtype.kind in "biuf"
            largest = np.abs(mine.astype("f8") - other.astype("f8")).max().item() if is_real else math.nan
            yield Difference(path, _share_of_values(number, first.size, largest))


def _count_differing(first: Any, second: Any, item_bytes: int) -> int:
    """Number of items that are not the same bytes."""
    return int((first != second).reshape(-1, item_bytes).any(axis=1).sum())


def _share_of_values(number: int, total: int, largest: float) -> str:
    if total == 1:
        return "its value" + (f", by {largest:.3g}" if math.isfinite(largest) else "")
    return f"{number} of {total} values" + (f", by up to {largest:.3g}" if math.isfinite(largest) else "")


def _compare_entries(
    first: Mapping[Any, Any], second: Mapping[Any, Any], path: str, visited: _Visited
) -> Iterator[Difference]:
    for key in [*first, *(key for key in second if key not in first)]:
        if key in first and key in second:
            yield from _compare(first[key], second[key], f"{path}[{key!r}]", visited)
        else:
            yield Difference(f"{path}[{key!r}]", "one of them has no such key")


def _compare_attributes(
    first: Mapping[str, Any], second: Mapping[str, Any], path: str, visited: _Visited
) -> Iterator[Difference]:
    for name in [*first, *(name for name in second if name not in first)]:
        if name in first and name in second:
            yield from _compare(first[name], second[name], f"{path}.{name}", visited)
        else:
            yield Difference(f"{path}.{name}", "one of them has no such attribute")


def _compare_objects(first: Any, second: Any, path: str, visited: _Visited) -> Iterator[Difference]:
    """By what pickle would save of them; attributes by their names, anything else is the object itself."""
    try:
        reductions: Any = first.__reduce_ex__(4), second.__reduce_ex__(4)
    except USER_ERRORS:
        # Functions and the like, which pickle saves by name, or what cannot have come from a worker.
        return
    if isinstance(reductions[0], str) or isinstance(reductions[1], str):
        reductions = [(reduction,) for reduction in reductions]
    (mine, my_states), (other, other_states) = map(_take_apart, reductions)
    for my_state, other_state in zip(my_states, other_states, strict=True):
        yield from _compare_attributes(my_state, other_state, path, visited)
    if any(_compare(mine, other, path, visited)):
        yield Difference(path, f"two objects {kind_of(first)} that are not the same")


def _take_apart(reduction: Sequence[Any]) -> tuple[list[Any], tuple[dict[str, Any], dict[str, Any]]]:
    """What a reduction consists of, without the attributes; those of the dictionary; those of slots."""
    parts: list[Any] = [*reduction, None, None, None, None]
    make, args, state, items, pairs, *_ = parts
    states: tuple[Any, Any] = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    rest = [make, args, list(items or ()), list(pairs or ())]
    if all(part is None or isinstance(part, dict) for part in states):
        return rest, (states[0] or {}, states[1] or {})
    return [*rest, state], ({}, {})


def kind_of(value: Any) -> str:
    """``PIL.Image.Image``; without the module for what is built in."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _shown(first: Any, second: Any) -> str:
    texts = [repr(value) for value in (first, second)]
    if max(map(len, texts)) > 60:
        return f"two {kind_of(first)} that are not the same"
    return " and ".join(texts)


class Differences:
    """What is found to differ when samples are loaded again.

    Attributes:
        found: For each path, what differs in each run.
        places: For each path, the samples in which it differs.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, str]] = {}
        self.places: dict[str, set[int]] = {}

    def add(self, run: str, samples: Sequence[Any], others: Sequence[Any]) -> None:
        """Compare the samples of another run."""
        if len(samples) != len(others):
            self._add(run, Difference("the number of samples", f"{len(samples)} and {len(others)}"))
        for place, (sample, other) in enumerate(zip(samples, others, strict=False)):
            for difference in find_differences(sample, other):
                self._add(run, difference)
                self.places[difference.path].add(place)

    def _add(self, run: str, difference: Difference) -> None:
        self.found.setdefault(difference.path, {}).setdefault(run, difference.what)
        self.places.setdefault(difference.path, set())

    def by_runs(self) -> dict[tuple[str, ...], list[str]]:
        """Paths by the runs in which they differ."""
        paths: dict[tuple[str, ...], list[str]] = {}
        for path, runs in self.found.items():
            paths.setdefault(tuple(runs), []).append(path)
        return paths


def explain(runs: Collection[str]) -> str:
    """What it usually means that a part of a sample differs in these runs, and what helps."""
    if AGAIN in runs and OTHER_WORKER in runs:
        return (
            "a random generator of its own that nobody seeds, the time, or memory that was never written "
            f"(np.empty): {_SEED_ADVICE}"
        )
    if OTHER_WORKER in runs:
        return (
            "something of the process: its id, or a generator made in the constructor where each worker builds "
            f"for itself: {_SEED_ADVICE}"
        )
    if AGAIN in runs or OTHER_ORDER in runs:
        return (
            "state that is kept from sample to sample: a generator made in the constructor, a counter, a cache that "
            f"is changed in place: {_SEED_ADVICE}"
        )
    if runs:
        return (
            "the order of a set, or hash() of a string, which differ between interpreters (sort, or set "
            "PYTHONHASHSEED); the order of a folder (sort it); or other versions, files or paths there"
        )
    return ""


def find_uncollatable(samples: Sequence[Any], collate: Callable[[Any], Any], path: str = "sample") -> tuple[str, str]:
    """Find the innermost part of samples that makes ``collate`` fail, given that it does.

    Returns:
        The path of the part, and the error with it.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        parts = [(f"{path}[{key!r}]", _column(samples, key)) for key in first]
    elif isinstance(first, (list, tuple)):
        fields = getattr(first, "_fields", None)
        parts = [(f"{path}.{fields[i]}" if fields else f"{path}[{i}]", _column(samples, i)) for i in range(len(first))]
    else:
        parts = []
    for part_path, column in parts:
        if column is not None and _error_of(collate, column):
            return find_uncollatable(column, collate, part_path)
    return path, _error_of(collate, samples)


def _column(samples: Sequence[Any], key: Any) -> list[Any] | None:
    try:
        return [sample[key] for sample in samples]
    except (LookupError, TypeError):  # the samples are not all alike, which is an error of theirs
        return None


def _error_of(collate: Callable[[Any], Any], samples: Sequence[Any]) -> str:
    try:
        collate(samples)
    except USER_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    return ""
