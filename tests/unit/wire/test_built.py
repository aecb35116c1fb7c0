"""What is compared of datasets that several processes build."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from rpcdataloader.wire.built import Built


class Holder(Dataset[Any]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __getitem__(self, index: int) -> Any:
        return self.held[index]

    def __len__(self) -> int:
        return len(self.held)


ORDERED, SHUFFLED = range(5000), random.Random(3).sample(range(5000), 5000)
LISTS = {
    "numbers": list,
    "numbers of numpy": lambda order: list(np.array(order)),
    "texts": lambda order: tuple(f"{number}.png" for number in order),
    "bytes": lambda order: [b"%d" % number for number in order],
    "paths": lambda order: [Path(f"/data/{number}.png") for number in order],
    "pairs": lambda order: [(f"/data/{number}.png", number % 10) for number in order],
    "array": np.array,
    "tensor": torch.tensor,
}


def wrap(held: Any) -> list[Any]:
    inner = Holder(held)
    return [inner, Subset(inner, [1, 2]), ConcatDataset([Holder([1, 2]), inner])]


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_other_order_or_length_differ_wherever_they_are(kind):
    ordered, again, *others = (
        wrap(LISTS[kind](list(order))) for order in (ORDERED, ORDERED, SHUFFLED, ORDERED[:100], ORDERED[1:])
    )
    for place, dataset in enumerate(ordered):
        built = Built.of(dataset)
        assert built.differing(Built.of(again[place])) == []
        for other in others:
            assert built.differing(Built.of(other[place])) != []


def test_lists_of_datasets_within_have_their_paths():
    assert Built.of(Subset(Holder([1, 2]), [0, 1])).lists.keys() == {"indices", "dataset.held"}
    both = ConcatDataset([Holder([1, 2]), Holder([3, 4])])
    assert Built.of(both).lists.keys() == {"datasets[0].held", "datasets[1].held"}


def shared_parts() -> Any:
    part: Any = ("x",)
    for _depth in range(40):
        part = ("add", part, part)
    return [part] * 3


def part_of_itself() -> Any:
    part: list[Any] = [0, 1, 2]
    part[1] = part
    return part


class RaisingPath(os.PathLike[str]):
    def __fspath__(self) -> str:
        raise OSError("the cloud is gone")


OTHERS: dict[str, Callable[[], Any]] = {
    "objects": lambda: [object(), object()],
    "nothing yet": lambda: [None] * 3,
    "floats": lambda: [0.5, 1.5],
    "one more kind": lambda: [1, 2, 3.0],
    "deeper": lambda: [(1, (2,)), (3, (4,))],
    "more parts": lambda: [range(9), range(9)],
    "lists of many": lambda: [[1] * 9] * 3,
    "sets": lambda: [{"a", "b"}, {"c", "d"}],
    "mapping": lambda: {3: 4, 5: 6},
    "text": lambda: "other text",
    "one": lambda: [1],
    "noise": lambda: np.ones(4),
    "scratch": lambda: np.empty((3, 3), np.int64),
    "scratch of torch": lambda: torch.empty(1000),
    "images": lambda: torch.zeros(3, 2, dtype=torch.int64),
    "sparse": lambda: torch.tensor([0, 1, 2]).to_sparse(),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "no memory": lambda: torch.ones(3, dtype=torch.int64, device="meta"),
    "shared parts": shared_parts,
    "part of itself": part_of_itself,
    "paths": lambda: [RaisingPath(), RaisingPath()],
}


@pytest.mark.filterwarnings("ignore")  # of kinds of tensors that torch may change
@pytest.mark.parametrize("kind", OTHERS)
def test_other_content_is_not_compared(kind):
    assert Built.of(Holder(OTHERS[kind]())).lists == {}


def test_lists_that_have_other_lengths_than_their_dataset_are_not_compared():
    dataset = Holder([1, 2])
    dataset.of_process = [os.getpid(), "host", 3]
    assert Built.of(dataset).lists.keys() == {"held"}


def test_folders_are_not_compared():
    one, other = ([f"/scratch/{node}/{number}.png" for number in range(3)] for node in range(2))
    assert Built.of(Holder(one)) == Built.of(Holder(other))
    assert Built.of(Holder([*map(Path, one)])) == Built.of(Holder([*map(Path, other)]))


def test_maps_of_files_are_not_read(tmp_path):
    np.arange(4).tofile(tmp_path / "file")
    mapped = np.memmap(tmp_path / "file", np.int64)
    assert Built.of(Holder(mapped)).lists == Built.of(Holder(np.asarray(mapped))).lists == {}


def test_datasets_that_have_each_other_are_described_once():
    one, other = Holder([1, 2]), Holder([3, 4])
    one.other, other.other = other, one
    assert Built.of(one).lists.keys() == {"held", "other.held"}


def test_of_iterable_style_datasets_nothing_is_compared():
    class Shards(IterableDataset[int]):
        def __init__(self) -> None:
            self.shards = [1, 2]

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[int]:
            return iter(self.shards)

    assert Built.of(Shards()) == (None, {})
    assert Built.of(Subset(Shards(), [1, 0])).lists.keys() == {"indices"}


@pytest.mark.parametrize("dataset", [Holder([]), [1, 2, 3], range(3), type("Slotted", (), {"__slots__": ("held",)})()])
def test_any_dataset_can_be_described(dataset):
    assert Built.of(dataset).lists == {}
