from __future__ import annotations

import queue
import random
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.fetch import batch_loader, seeding
from rpcdataloader.fetch.batch_loader import BatchLoader, LoaderSpec
from rpcdataloader.fetch.stream_loader import StreamLoader
from rpcdataloader.wire.slabs import Block
from tests.support.comparison import assert_same
from tests.support.datasets import Augmented, Failing
from tests.support.kinds import Tagged, as_is


@pytest.fixture(autouse=True)
def _process_restored(monkeypatch):
    """A worker's process is not meant to be used for anything else; this one is."""
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, collate_tensor_fn)
    with seeding.generators_restored():
        yield


class CountingAllocator:
    """Fresh memory, and what was asked for."""

    def __init__(self):
        self.sizes: list[int] = []

    def allocate(self, size_bytes: int) -> Block:
        self.sizes.append(size_bytes)
        return Block(torch.full((size_bytes,), 0xA5, dtype=torch.uint8))


SPEC = LoaderSpec(
    collate_fn=None,
    worker_init_fn=None,
    auto_collation=True,
    iterable=False,
    drop_last=False,
    base_seed=2**62 + 5,
    epoch=0,
    rank=0,
    world_size=1,
    worker_id=0,
    num_workers=1,
)


def make_loader(dataset, allocator=None, inline=False, **changes: Any) -> BatchLoader:
    return BatchLoader(dataset, replace(SPEC, **changes), allocator, inline=inline)


def load(dataset, indices=(0, 1, 2), position=0, batch_number=0, **options: Any):
    return make_loader(dataset, **options).load(list(indices), position, batch_number)[1]


def floats(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@pytest.mark.parametrize("inline", [True, False])
def test_init_function_that_stops_an_iteration_is_an_error_and_leaves_nothing_behind(inline):
    def stop(_worker):
        random.random()
        raise StopIteration("x")

    state = random.getstate()
    with pytest.raises(RuntimeError, match=r"^worker_init_fn raised StopIteration, which would have ended the epoch"):
        load([1], worker_init_fn=stop, inline=inline)
    assert not inline or random.getstate() == state


def test_torch_that_keeps_worker_info_elsewhere_is_refused(monkeypatch):
    """Of threads, for example: each worker would read all of a stream."""
    monkeypatch.setattr("rpcdataloader.fetch.batch_loader.get_worker_info", lambda: None)
    for inline in True, False:
        with pytest.raises(
            RuntimeError, match=r"^get_worker_info\(\) of torch \S+ does not give what a worker has set"
        ):
            make_loader([1, 2], inline=inline)
    assert load([1, 2], [0, 1], num_workers=0).tolist() == [1, 2]  # without workers, there is none


# Seeds


def seed_at(position, purpose=seeding.SAMPLE):
    return seeding.derive_seeds(purpose, 2**62 + 5, 0, position)[0]


def test_position_over_all_ranks_seeds_a_sample_its_first_one_samples_at_once_and_its_number_a_batch():
    class Batched:
        def __getitems__(self, indices):
            return [seeding.get_sample_seed() for _ in indices]

    seeds = load(Augmented(), position=10, rank=1, world_size=4)["seed"]
    assert seeds.tolist() == [seed_at(41), seed_at(45), seed_at(49)]
    assert make_loader(Augmented(), auto_collation=False).load(3, 17, 17)[1]["seed"] == seed_at(17)
    assert set(load(Batched(), position=10).tolist()) == {seed_at(10)}
    of_batch = load(
        [0, 1], (0, 1), collate_fn=lambda _samples: seeding.get_sample_seed(), batch_number=5, rank=1, world_size=4
    )
    assert of_batch == seed_at(21, seeding.BATCH)


def test_each_call_in_a_step_of_a_stream_has_a_seed_of_its_own_in_the_same_order_again():
    class Ahead(IterableDataset):
        def __iter__(self):
            for number in range(3):
                yield [seeding.get_sample_seed() for _ in range(number + 2)]

    def run():
        loader = StreamLoader(Ahead(), replace(SPEC, iterable=True, collate_fn=list))
        return [loader.load([0], number, number)[1][0] for number in range(3)]

    steps = run()
    assert steps == run()
    assert [step[0] for step in steps] == [seed_at(1), seed_at(2), seed_at(3)]  # before the first, it was opened
    seeds = [seed for step in steps for seed in step]
    assert len(set(seeds)) == 2 + 3 + 4
    assert all(0 <= seed < 2**63 for seed in seeds)


class Batches(Dataset):
    """Notes what it is asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.asked.append(index)
        return index

    def __getitems__(self, indices):
        self.asked.append(indices)
        return list(indices)


class Singles(Batches):
    __getitems__: Any = None


class Forwarding:
    """Passes on what it has not itself."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        return getattr(self.dataset, name)


class InReverse(Subset):
    """A subclass as torch's documentation has it."""

    def __getitem__(self, index):
        return self.dataset[7 - index]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Spelled(InReverse):
    """The other spelling."""

    def __getitems__(self, numbers):
        """Return samples."""
        return [self.__getitem__(number) for number in numbers]


class Relative(Subset):
    """A subclass whose samples depend on the batch."""

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        return [self.dataset[index] - min(indices) for index in indices]


class AtOnce(Subset):
    """A subclass that loads batches itself."""

    def __getitems__(self, indices):
        self.dataset.asked.append(len(indices))
        return [self.dataset[index] for index in indices]


EIGHT = range(8)


@pytest.mark.parametrize(
    ("wrap", "of_batches", "of_singles"),
    [
        (lambda dataset: dataset, [[2, 3]], [2, 3]),
        (lambda dataset: Subset(dataset, EIGHT), [[2, 3]], [2, 3]),
        (lambda dataset: Subset(Subset(dataset, EIGHT), EIGHT), [[2, 3]], [2, 3]),
        (lambda dataset: StackDataset(dataset, dataset), [[2, 3]] * 2, [2, 2, 3, 3]),
        (lambda dataset: StackDataset(dataset, Singles()), [[2], [3]], [2, 3]),
        (lambda dataset: StackDataset(a=dataset, b=Subset(dataset, EIGHT)), [[2, 3]] * 2, [2, 2, 3, 3]),
        (lambda dataset: ConcatDataset([dataset]), [2, 3], [2, 3]),
        (lambda dataset: Forwarding(Subset(dataset, EIGHT)), [[2, 3]], [2, 3]),
        (lambda dataset: InReverse(dataset, EIGHT), [5, 4], [5, 4]),
        (lambda dataset: AtOnce(dataset, EIGHT), [2, 2, 3], [2, 2, 3]),
    ],
)
def test_dataset_is_asked_for_batches_only_if_what_is_behind_all_wrappers_loads_these(wrap, of_batches, of_singles):
    for dataset, expected in (Batches(), of_batches), (Singles(), of_singles):
        load(wrap(dataset), [2, 3], collate_fn=list)
        assert dataset.asked == expected


@pytest.mark.parametrize("kind", [Subset, InReverse, Spelled])
def test_wrapper_that_only_asks_for_single_samples_lets_each_have_its_own_seed(kind):
    class Seeds(Singles):
        def __getitem__(self, index):
            return seeding.get_sample_seed()

    batch = load(kind(Seeds(), EIGHT), [2, 5], collate_fn=list)
    assert batch == [seed_at(0), seed_at(1)]


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: StackDataset(one), lambda one: StackDataset(one, one)])
def test_subclass_whose_samples_depend_on_the_batch_gets_the_whole_batch(wrap):
    batch = load(wrap(Relative(Singles(), EIGHT)), [2, 5], collate_fn=list)
    assert [sample if type(sample) is int else sample[0] for sample in batch] == [0, 3]


class Columns(Subset):
    """A subclass whose batches are no lists of samples."""

    def __getitem__(self, index):
        return self.dataset[index], seeding.get_sample_seed()

    def __getitems__(self, indices):
        return torch.tensor(indices), seeding.get_sample_seed()


def test_subclass_that_gives_something_else_than_lists_is_asked_for_batches():
    loader = make_loader(Columns(Singles(), EIGHT), collate_fn=as_is)
    for position in 0, 3:
        indices, seed = loader.load([2, 5, 3], position, 0)[1]
        assert indices.tolist() == [2, 5, 3]
        assert seed == seed_at(position)


# The default collate


def test_large_batches_are_contiguous_as_from_torchs_workers():
    # The one difference between torch with and without workers that shows in what torch.stack returns.
    samples = [floats(2, 3, 64, 64).to(memory_format=torch.channels_last)] * 2
    batch = load(samples, range(2), allocator=CountingAllocator())
    assert batch.is_contiguous()
    assert torch.equal(batch, torch.stack(samples))


def test_large_results_are_in_memory_of_the_allocator_and_small_ones_are_not():
    allocator = CountingAllocator()
    array = np.ones((200, 200), np.uint8)
    samples = [(floats(3, 100, 100), floats(1 << 13), i, floats((1 << 13) - 1), floats(3), array) for i in range(2)]
    load(samples, range(2), allocator=allocator)
    assert allocator.sizes == [2 * 4 * 30000, 1 << 16, 2 * 40000]


@pytest.mark.parametrize(
    "samples",
    [
        [floats(200, 200), floats(200, 200, dtype=torch.float64)],
        [floats(200, 200), floats(200, 200).requires_grad_()],
        [floats(200, 200).as_subclass(Tagged)] * 2,
        [floats(200, 200), floats(200, 200).as_subclass(Tagged)],
        [torch.nn.Parameter(floats(200, 200))] * 2,
        [floats(200, 200), floats(200, 201)],
    ],
    ids=["dtypes", "later with grad", "subclass", "subclass later", "parameter", "shapes"],
)
def test_what_cannot_be_stacked_as_it_is_asks_for_no_memory(request, samples):
    allocator = CountingAllocator()
    try:
        load(samples, range(len(samples)), allocator=allocator, collate_fn=lambda samples: default_collate(samples))
    except RuntimeError:
        assert "shapes" in request.node.name
    assert allocator.sizes == []


class Fresh(Dataset):
    """Sees which of its samples are alive."""

    def __init__(self, make):
        self.make, self.alive = make, weakref.WeakSet()

    def __getitem__(self, index):
        assert len(self.alive) <= 1
        image = torch.full((3, 96, 96), index, dtype=torch.uint8)
        self.alive.add(image)
        return self.make(image, index)


@pytest.mark.parametrize(
    "make",
    [
        lambda image, _index: image,
        lambda image, index: (image, index),
        lambda image, index: [str(index), image],
        lambda image, index: {"image": image, "index": index},
    ],
)
@pytest.mark.parametrize("wrap", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(8))])
def test_sample_is_copied_to_the_batch_before_the_next_one_is_fetched(wrap, make):
    allocator = CountingAllocator()
    expected = default_collate([make(torch.full((3, 96, 96), i, dtype=torch.uint8), i) for i in range(8)])
    assert_same(load(wrap(Fresh(make)), range(8), allocator=allocator), expected)
    assert allocator.sizes == [8 * 3 * 96 * 96]


def test_user_function_that_calls_the_default_collate_uses_the_allocator_too():
    def collate(samples):
        assert get_worker_info() is not None
        return default_collate(samples), get_worker_info()

    allocator = CountingAllocator()
    batch, info = load([floats(200, 200)] * 2, range(2), allocator=allocator, collate_fn=collate)
    assert_same(batch, torch.stack([floats(200, 200)] * 2))
    assert info is not None
    assert len(allocator.sizes) == 1


def test_function_that_the_user_registered_for_tensors_stays(monkeypatch):
    def padded(batch, **_options):
        return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, padded)
    assert load([floats(2), floats(4)], range(2)).shape == (2, 4)


def draw_seed(batch, **_options):
    return [seeding.get_sample_seed() for _ in batch]


@pytest.mark.parametrize("kind", [str, Tagged])
def test_function_that_the_user_has_put_into_torchs_table_has_the_numbers_of_the_batch(monkeypatch, kind):
    samples = ["text"] * 2 if kind is str else [torch.zeros(300, 300).as_subclass(Tagged)] * 2
    monkeypatch.setitem(default_collate_fn_map, kind, draw_seed)
    assert load(samples, range(2), batch_number=3) == [seed_at(3, seeding.BATCH)] * 2


def test_function_that_the_user_has_put_into_torchs_table_gets_the_samples_themselves(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, **_options: list(batch))
    samples = [torch.zeros(300, 300) for _ in range(2)]
    batch = load(samples, range(2), allocator=CountingAllocator())
    assert [id(sample) for sample in batch] == list(map(id, samples))


# Skipping


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, RPCError, ConnectionLostError])
def test_what_is_no_fault_of_a_sample_is_raised(error):
    with pytest.raises(error):
        load(Failing(3, {0: (error, "x")}), skips=True)


class Drawing:
    def __getitem__(self, index):
        time.sleep(0)
        return index, random.random(), float(torch.rand(()))


def test_loaders_inside_of_two_threads_do_not_disturb_each_other():
    def run(seed):
        loader = make_loader(Drawing(), inline=True, base_seed=seed, collate_fn=list)
        return [loader.load([number], number, number)[1] for number in range(200)]

    expected = [run(0), run(1)]
    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(run, [0, 1])) == expected
    assert get_worker_info() is None


def test_thread_of_a_dataset_that_loads_here_keeps_nobody_waiting(monkeypatch, caplog):
    monkeypatch.setattr(batch_loader, "_PATIENCE", 0.05)
    monkeypatch.setattr(batch_loader, "_loads", batch_loader._Loads())

    class Ahead(IterableDataset):
        def __iter__(self):
            numbers = queue.Queue(1)

            def fill():
                inner = make_loader([10, 11, 12, 13], inline=True, collate_fn=list)
                for number in range(4):
                    numbers.put(inner.load([number], number, number)[1])

            with ThreadPoolExecutor(1) as executor:
                filled = executor.submit(fill)
                for _ in range(4):
                    yield numbers.get(timeout=20)
                filled.result()

    state = random.getstate()
    loader = StreamLoader(Ahead(), replace(SPEC, iterable=True, collate_fn=list), inline=True)
    loaded = [loader.load([number], number, number)[1] for number in range(5)]
    assert loaded == [[[number]] for number in range(10, 14)] + [None]
    assert (random.getstate(), get_worker_info()) == (state, None)
    assert caplog.messages == [batch_loader.TOGETHER]
