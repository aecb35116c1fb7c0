"""What is compared of datasets that several processes build."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

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
    "texts": lambda order: tuple(f"{number}.png" for number in order),
    "pairs": lambda order: [(f"{number}.png", number % 10) for number in order],
    "records": lambda order: [{"path": Path(f"/data/{number}")} for number in order],
    "array": np.array,
    "images": lambda order: torch.tensor(order)[:, None, None].expand(-1, 64, 64),
    "images in a list": lambda order: [np.full((64, 64), number) for number in order[:200]],
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
    one, other = (TensorDataset(torch.arange(3), torch.arange(first, first + 3)) for first in (0, 3))
    assert Built.of(one).differing(Built.of(other)) == ["tensors"]


def test_what_belongs_to_a_process_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    np.arange(4.0).tofile(tmp_path / "file")
    held = [
        [object(), object()],
        [f"{tmp_path}/tmpabc/{number}" for number in range(3)],
        np.memmap(tmp_path / "file"),
        [np.memmap(tmp_path / "file")] * 2,
        {3: 4},
        "text",
    ]
    others = [
        [object(), object()],
        [f"{tmp_path}/tmpdef/{number}" for number in range(3)],
        np.memmap(tmp_path / "file") + 1,
        [np.memmap(tmp_path / "file", offset=8)] * 2,
        {5: 4},
        "other text",
    ]
    for one, other in zip(held, others, strict=True):
        assert Built.of(Holder(one)).differing(Built.of(Holder(other))) == []


@pytest.mark.parametrize("dataset", [Holder([]), [1, 2, 3], range(3), type("Slotted", (), {"__slots__": ("held",)})()])
def test_any_dataset_can_be_described(dataset):
    assert Built.of(dataset).lists == {}
