"""A batch that is joined of its parts is the one that a single worker makes, or there is none."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, namedtuple
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from rpcdataloader.fetch.batch_loader import BatchLoader, LoaderSpec
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.loader.joining import join
from rpcdataloader.wire.pickling import dumps_reply, loads
from rpcdataloader.wire.slabs import Block, PageablePool, PinnedAllocator
from rpcdataloader.wire.tensors import MAX_SLAB_BYTES, MIN_BLOCK_BYTES, Movable, plan
from tests.support.comparison import assert_same
from tests.support.datasets import Augmented, Batched

SPEC = LoaderSpec(
    collate_fn=default_collate,
    auto_collation=True,
    iterable=False,
    drop_last=False,
    base_seed=7,
    epoch=0,
    rank=0,
    world_size=1,
    worker_id=0,
    num_workers=1,
)


class Point(NamedTuple):
    x: Any
    y: Any


Pair = namedtuple("Pair", "first second")


class Tagged(Point):
    """No plain named tuple: it may have attributes."""


@pytest.fixture(autouse=True)
def _process_restored(monkeypatch):
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, collate_tensor_fn)
    with generators_restored():
        yield


def image(number):
    return torch.arange(number, number + 3 * 8 * 8, dtype=torch.float32).view(3, 8, 8)


# A sample by its number.
JOINED = {
    "tensors": image,
    "channels last": lambda n: image(n)[None].contiguous(memory_format=torch.channels_last)[0],
    "large tensors": lambda n: torch.full((50, 100), n, dtype=torch.int64),
    "transposed": lambda n: image(n).transpose(0, 2),
    "scalars in tensors": lambda n: torch.tensor(n, dtype=torch.bfloat16),
    "without elements": lambda n: torch.empty(2, 0, 3),  # noqa: ARG005
    "complex": lambda n: torch.tensor([n, 1j]),
    "booleans in tensors": lambda n: torch.tensor([n % 2 == 0]),
    "float8": lambda n: torch.tensor([float(n)]).to(torch.float8_e4m3fn),
    "arrays": lambda n: np.full((2, 3), n, dtype=np.int16),
    "arrays in Fortran's order": lambda n: np.asfortranarray(np.arange(6.0).reshape(2, 3) + n),
    "scalars of numpy": np.float32,
    "doubles of numpy": np.float64,
    "booleans of numpy": lambda n: np.bool_(n % 2),
    "integers": int,
    "booleans": lambda n: n % 3 == 0,
    "floats": float,
    "text": lambda n: f"sample {n}",
    "bytes": lambda n: bytes([n]),
    "tuples": lambda n: (image(n), n, f"{n}"),
    "lists": lambda n: [n, [f"{n}", b"x"], {"a": float(n)}],
    "lists of text": lambda n: [f"{n}", "b"],
    "named tuples": lambda n: Point(image(n), Pair(n, "x")),
    "dicts": lambda n: {"image": image(n), 3: {"label": n, "names": (f"{n}", "b")}, "empty": (), "none": {}},
}

SAMPLES_THAT_DIFFER: dict[str, Any] = {
    "integers and floats": lambda n: n if n < 3 else float(n),
    "integers and booleans": lambda n: n if n else True,
    "floats and doubles of numpy": lambda n: float(n) if n < 3 else np.float64(n),
    "types of tensors": lambda n: torch.tensor(n, dtype=torch.int64 if n < 5 else torch.int32),
    "shapes": lambda n: torch.zeros(1 + n // 3),
    "lengths": lambda n: (n,) * (1 + n // 3),
    "keys": lambda n: {"a": n} if n < 3 else {"a": n, "b": n},
    "keys in another order": lambda n: {"a": n, "b": 1} if n < 3 else {"b": 1, "a": n},
    "tuples and lists": lambda n: (n,) if n < 3 else [n],
    "text of two lengths": lambda n: ["a"] * (1 + n // 3),
}

OTHER_TYPES: dict[str, Any] = {
    "ordered dicts": lambda n: OrderedDict(a=n),
    "keys of other types": lambda n: {None: n},
    "subclasses of named tuples": lambda n: Tagged(n, n),
    "subclasses of tensors": lambda n: torch.nn.Parameter(torch.tensor(float(n)), requires_grad=False),
    "tensors with a gradient": lambda n: torch.tensor(float(n), requires_grad=True),
    "sparse tensors": lambda n: torch.tensor([n]).to_sparse(),
    "nothing": lambda n: None,  # noqa: ARG005
    "text of numpy": lambda n: np.str_(n),
    "too large": lambda n: 2**63 + n,
}

NUM = 8


def make(samples, first, size, *, is_part, collate_fn=default_collate):
    """What a worker makes of some samples, and its reply brings here."""
    loader = BatchLoader(samples, replace(SPEC, collate_fn=collate_fn), PageablePool())
    loaded = loader.load(list(range(first, first + size)), first, 0, is_part)
    encoded = dumps_reply(loaded)
    blocks = [Block(torch.frombuffer(bytearray(each), dtype=torch.uint8)) for each in encoded.buffers]
    return loads(encoded.payload, blocks)[1]


def make_parts(samples, cuts):
    return [
        make(samples, first, end - first, is_part=True) for first, end in zip((0, *cuts), (*cuts, NUM), strict=True)
    ]


@pytest.mark.parametrize("cuts", [(4,), (1, 2, 7), tuple(range(1, NUM))], ids=str)
@pytest.mark.parametrize("kind", JOINED)
def test_joined_batch_is_that_of_one_worker(kind, cuts):
    samples = [JOINED[kind](number) for number in range(NUM)]
    expected = make(samples, 0, NUM, is_part=False)
    assert_same(join(make_parts(samples, cuts), None), expected)
    pinned = PinnedAllocator(lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8))
    assert_same(join(make_parts(samples, cuts), pinned), expected)
    movable = Movable()
    assert_same(join(make_parts(samples, cuts), None, movable), expected)
    large = sum(each.nbytes >= MIN_BLOCK_BYTES for each in movable._tensors)
    assert len(movable.blocks) == large + (len(movable._tensors) > large)  # all small ones share a slab


@pytest.mark.parametrize("kind", SAMPLES_THAT_DIFFER)
@pytest.mark.parametrize("cut", range(1, NUM))
def test_samples_that_differ_are_not_joined(kind, cut):
    parts = make_parts([SAMPLES_THAT_DIFFER[kind](number) for number in range(NUM)], [cut])
    if None not in parts:
        with pytest.raises(ValueError, match="do not fit"):
            join(parts, None)


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_batches_of_other_types_are_not_joined(kind):
    assert make_parts([OTHER_TYPES[kind](number) for number in range(NUM)], [4]) == [None, None]


def test_small_tensors_share_slabs_of_a_limited_size():
    index, sizes = plan([(torch.float32, (10_000,)), (torch.int64, (3,)), (torch.float32, (20_000,))] * 40)
    assert sizes[:40] == [80_000] * 40
    assert all(size <= MAX_SLAB_BYTES for size in sizes[40:])
    assert sum(sizes[40:]) >= 40 * (40_000 + 24)
    assert len(sizes) == len(index.large) + len(index.slabs)


def test_threads_that_join_parts_start_no_others():
    """Each would have some of its own, for its life."""
    parts = make_parts([torch.full((100_000,), number) for number in range(NUM)], (4,))
    torch.set_num_threads(2 + (before := torch.get_num_threads()))
    started = []

    def run():
        threads = set(os.listdir("/proc/self/task"))
        join(parts, None)
        started.append(set(os.listdir("/proc/self/task")) - threads)

    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert started == [set()]


def test_parts_that_came_in_another_form_are_not_joined():
    one = ("kind", {"a": torch.zeros(2, 3)})
    for other in ({"b": torch.zeros(2, 3)}, {"a": torch.zeros(2, 4)}, {"a": torch.zeros(2, 3).double()}, [], "x", None):
        with pytest.raises(ValueError, match="do not fit"):
            join([one, ("kind", other)], None)
    with pytest.raises(ValueError, match="do not fit"):
        join([one, ("another kind", one[1])], None)


def test_samples_of_a_part_have_the_seeds_of_their_positions():
    expected = make(Augmented(NUM), 0, NUM, is_part=False)
    assert_same(join(make_parts(Augmented(NUM), [3]), None), expected)


def test_datasets_and_functions_that_see_the_whole_batch_make_no_parts(monkeypatch):
    assert make(Batched(), 0, 4, is_part=True) is None
    assert make(range(NUM), 0, 4, is_part=True, collate_fn=lambda samples: default_collate(samples)) is None
    monkeypatch.setitem(default_collate_fn_map, int, lambda batch, **_options: sum(batch))
    assert make(range(NUM), 0, 4, is_part=True) is None


def test_a_part_with_an_exception_of_a_sample_raises_it():
    with pytest.raises(IndexError, match="out of range"):
        make([0, 1, 2], 2, 2, is_part=True)
