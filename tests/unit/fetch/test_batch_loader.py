from __future__ import annotations

import random
import re
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.fetch import seeding
from tests.support.comparison import assert_same
from tests.unit.fetch.loading import (
    Augmented,
    Bad,
    CountingAllocator,
    floats,
    load,
    make_loader,
)

pytestmark = pytest.mark.usefixtures("_process_restored")


# Fetching, as torch does


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration("x"), GeneratorExit(), SystemExit(3)])
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("stage", ["fetch", "collate", "init"])
def test_errors_propagate_and_leave_nothing_behind(error, inline, stage):
    def fail(_value):
        random.random()
        raise error

    class Failing:
        def __getitem__(self, index):
            return fail(index) if stage == "fetch" else index

    state = random.getstate()
    stops = isinstance(error, StopIteration)
    with pytest.raises(RuntimeError if stops else type(error)) as caught:
        load(
            Failing(),
            inline=inline,
            collate_fn=fail if stage == "collate" else None,
            worker_init_fn=fail if stage == "init" else None,
        )
    assert (caught.value.__cause__ if stops else caught.value) is error
    if stops:
        place = {"fetch": r"Failing\.__getitem__\(\d+\)", "collate": "collate_fn", "init": "worker_init_fn"}[stage]
        assert re.match(f"{place} raised StopIteration, which would have ended the epoch", str(caught.value))
    assert seeding._current_seed is None
    assert not inline or random.getstate() == state


# Seeds


def test_global_position_is_position_times_world_size_plus_rank():
    *_, seeds = load(Augmented(), position=10, rank=1, world_size=4)
    expected = [seeding.derive_seeds(seeding.SAMPLE, 2**62 + 5, 0, position)[0] for position in (41, 45, 49)]
    assert seeds.tolist() == expected


def test_getitems_is_seeded_once_with_its_first_position():
    class Batched:
        def __getitems__(self, indices):
            return [(seeding.get_sample_seed(), torch.rand(()).item()) for _ in indices]

    seeds, drawn = load(Batched(), position=10, batch_number=5)
    assert set(seeds.tolist()) == {seeding.derive_seeds(seeding.SAMPLE, 2**62 + 5, 0, 10)[0]}
    assert len(set(drawn.tolist())) == 3


def test_single_samples_are_seeded_by_their_position():
    _metrics, sample, *_rest = make_loader(Augmented(), auto_collation=False).load(3, 17, 17)
    assert sample[4] == seeding.derive_seeds(seeding.SAMPLE, 2**62 + 5, 0, 17)[0]


def test_collate_is_seeded_by_the_batch_and_unlike_any_sample():
    def mix(_samples):
        return seeding.get_sample_seed(), torch.rand(3).tolist(), random.random()

    def collate(batch_number, **options):
        # However many numbers the samples have drawn.
        class Drawing:
            def __getitem__(self, index):
                return torch.rand(options.get("draws", 1))

        options = {key: value for key, value in options.items() if key != "draws"}
        return load(Drawing(), batch_number=batch_number, collate_fn=mix, **options)

    assert collate(1) == collate(1, draws=5)
    results = [collate(number, rank=rank, world_size=2) for number in range(3) for rank in range(2)]
    assert len({seed for seed, *_ in results}) == 6
    assert collate(2)[0] not in {
        seeding.derive_seeds(seeding.SAMPLE, 2**62 + 5, 0, position)[0] for position in range(10)
    }


# Worker info and the init function


# The default collate


class Tagged(torch.Tensor):
    pass


def test_large_batches_are_contiguous_as_from_torchs_workers():
    # The one difference between torch with and without workers that shows in what torch.stack returns.
    samples = [floats(2, 3, 64, 64).to(memory_format=torch.channels_last)] * 2
    batch = load(samples, range(2), allocator=CountingAllocator())
    assert batch.is_contiguous()
    assert torch.equal(batch, torch.stack(samples))


def test_large_results_are_in_memory_of_the_allocator_and_small_ones_are_not():
    allocator = CountingAllocator()
    samples = [(floats(3, 100, 100), floats(1 << 13), i, floats((1 << 13) - 1), floats(3)) for i in range(2)]
    load(samples, range(2), allocator=allocator)
    assert allocator.sizes == [2 * 4 * 30000, 1 << 16]


def test_arrays_are_stacked_in_memory_of_the_allocator():
    allocator = CountingAllocator()
    load([np.ones((200, 200), np.uint8)] * 4, range(4), allocator=allocator)
    assert allocator.sizes == [160000]


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
def test_sample_is_copied_to_the_batch_before_the_next_one_is_fetched(make):
    allocator = CountingAllocator()
    expected = default_collate([make(torch.full((3, 96, 96), i, dtype=torch.uint8), i) for i in range(8)])
    assert_same(load(Fresh(make), range(8), allocator=allocator), expected)
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


class Reusing:
    """Writes its samples into the same memory for each batch."""

    def __init__(self):
        self.memory = torch.zeros(3, 1 << 16)
        self.rows = list(self.memory)

    def __getitem__(self, index):
        return self.rows[index % 3].fill_(index)


class ReusingBatches(Reusing):
    def __getitems__(self, indices):
        for index in indices:
            self[index]
        return self.rows


@pytest.mark.parametrize("dataset", [Reusing, ReusingBatches])
def test_a_dataset_that_uses_its_memory_again_does_not_change_a_batch_on_its_way(dataset):
    loader = make_loader(dataset())
    _metrics, batch, *_rest = loader.load([0, 1, 2], 0, 0)
    loader.load([3, 4, 5], 3, 1)
    assert batch[:, 0].tolist() == [0, 1, 2]


# Skipping


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, RPCError, ConnectionLostError])
def test_what_is_no_fault_of_a_sample_is_raised(error):
    with pytest.raises(error):
        load(Bad(1, error=error), skips=True)


class Passing(Augmented):
    """Draws, and then raises so many times."""

    def __init__(self, num_failures):
        self.num_failures = num_failures

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if self.num_failures:
            self.num_failures -= 1
            raise ConnectionResetError(index)
        return sample

    def get_batch(self, indices):
        return [self[index] for index in indices]


class PassingBatches(Passing):
    __getitems__ = Passing.get_batch


@pytest.mark.parametrize("dataset", [Passing, PassingBatches])
def test_what_may_pass_is_retried_with_the_same_random_numbers(dataset, caplog):
    options = {"retry_on": (OSError,), "max_retries": 1}
    assert_same(load(dataset(1), [3, 4], **options), load(dataset(0), [3, 4]))
    assert "at position 0 is retried in 0.5 s: ConnectionResetError: 3" in caplog.text
    with pytest.raises(ConnectionResetError):
        load(dataset(2), [3, 4], **options)
    with pytest.raises(ConnectionResetError):
        load(dataset(1), [3, 4], retry_on=(LookupError,), max_retries=1)


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
