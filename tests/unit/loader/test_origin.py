from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from rpcdataloader import ResumableDistributedSampler
from rpcdataloader.loader.origin import Origin, check_order, check_rank, describe_sampler
from rpcdataloader.loader.settings import PassSettings


class Own:
    """Numbers of other types, and a name of no consequence."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def origin(*samplers, job=(0, 1), partition=None, one_order=False):
    return Origin(list(job), list(partition or job), [describe_sampler(each) for each in samplers], one_order)


def distributed(num_ranks, rank=0, batch_size=4, **options):
    sampler = DistributedSampler(range(64), num_ranks, rank, **options)
    return origin(BatchSampler(sampler, batch_size, False), sampler, job=(rank, num_ranks), one_order=True)


def resumable(num_ranks, rank=0):
    return origin(ResumableDistributedSampler(range(64), num_ranks, rank), job=(rank, num_ranks), one_order=True)


def shuffled(num_ranks, rank=0, **options):
    return origin(RandomSampler(range(64), **options), job=(rank, num_ranks))


def ordered(num_ranks, rank=0):
    return origin(SequentialSampler(range(64)), job=(rank, num_ranks))


def stream(num_ranks, rank=0):
    return origin(job=(rank, num_ranks))


def refusal(check, *args, **options):
    try:
        check(*args, **options)
    except ValueError as error:
        return str(error)
    return None


def test_what_decides_about_the_order_is_described():
    sampler = DistributedSampler(range(10), 4, 3, seed=5)
    sampler.set_epoch(2)
    assert [describe_sampler(each) for each in [BatchSampler(sampler, 2, True), sampler]] == [
        {"kind": "BatchSampler", "batch_size": 2},
        {
            "kind": "DistributedSampler", "rank": 3, "num_ranks": 4, "seed": 5, "shuffle": True, "num_samples": 3,
            "length": 10, "set_epoch": 2,
        },
    ]  # fmt: skip
    names = {"process_index": 1, "num_processes": 2, "seed": torch.tensor(3), "epoch": 4, "given": 5}
    assert [describe_sampler(each) for each in [Own(**names), [3, 4]]] == [
        {"kind": "Own", "rank": 1, "num_ranks": 2, "epoch": 4},
        {"kind": "list", "length": 2},
    ]
    stateful = Own(epoch=4, load_state_dict=None, rank=0, world_size=1)
    assert describe_sampler(stateful) == {"kind": "Own", "rank": 0, "num_ranks": 1}


@pytest.mark.parametrize("make", [distributed, shuffled, ordered, stream, resumable])
@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("here", [1, 2, 4])
def test_only_our_sampler_goes_on_with_another_number_of_ranks(make, saved, here):
    text = refusal(check_order, make(saved), make(here))
    if make is resumable or saved == here:
        assert text is None
        return
    assert f"rank 0 of {saved}, and here is " in text
    assert f"rank 0 of {here}: " in text
    assert f"go on with as many ranks as before, {saved}" in text
    assert ("ResumableDistributedSampler" in text) == (make is not stream)


@pytest.mark.parametrize("here", [1, 2, 4])
def test_our_sampler_takes_up_what_torchs_has_begun(here):
    assert refusal(check_order, distributed(2), resumable(here)) is None
    assert refusal(check_order, shuffled(2), resumable(here)) is not None
    assert refusal(check_order, resumable(here), distributed(here)) is not None


@pytest.mark.parametrize(
    ("saved", "here", "text"),
    [
        (
            distributed(2),
            distributed(2, batch_size=8),
            "BatchSampler(batch_size=4), and here is BatchSampler(batch_siz",
        ),
        (
            distributed(2),
            distributed(2, seed=1),
            "DistributedSampler(seed=0), and here is DistributedSampler(seed=1): ",
        ),
        (distributed(2), distributed(2, shuffle=False), "shuffle=True), and here is DistributedSampler(shuffle=False)"),
        (shuffled(1), shuffled(1, replacement=True), "replacement=False), and here is RandomSampler(replacement=True)"),
        (shuffled(1), ordered(1), "RandomSampler on rank 0 of 1, and here is SequentialSampler on rank 0 of 1: go on"),
        (
            stream(1),
            origin(partition=(0, 2)),
            "rank 0 of 1, and here is an iterable-style dataset on rank 0 of 1 and 0 ",
        ),
        (
            origin(Own(epoch=1)),
            origin(Own(epoch=2)),
            "Own(epoch=1), and here is Own(epoch=2): go on with the same epoch",
        ),
    ],
)
def test_differences_are_named(saved, here, text):
    assert text in refusal(check_order, saved, here)


def test_epochs_may_be_told_later():
    assert refusal(check_order, origin(Own(epoch=1)), origin(Own(epoch=2)), epochs=False) is None


@pytest.mark.parametrize(
    ("make", "in_step", "is_good"),
    [
        (distributed, True, True),
        (distributed, False, False),
        (resumable, True, True),
        (resumable, False, False),
        (ordered, True, True),
        (shuffled, True, False),
        (stream, True, False),
    ],
)
def test_state_of_another_rank(make, in_step, is_good):
    assert refusal(check_rank, make(2, 1), make(2, 1), in_step=in_step) is None
    text = refusal(check_rank, make(2, 0), make(2, 1), in_step=in_step)
    if is_good:
        assert text is None
    else:
        assert "rank 0 of 2, and here is rank 1 of 2: " in text
        assert "save a state on each rank" in text


def test_one_rank_is_in_step_with_itself():
    assert refusal(check_rank, resumable(1), resumable(2, 1), in_step=False) is None
    assert refusal(check_rank, resumable(2), resumable(1), in_step=False) is not None


def chain_of(sampler):
    return PassSettings(dataset=None, sampler=sampler, auto_collation=True, iterable=False, collate_fn=list)


def test_samplers_around_samplers_are_found():
    inside = RandomSampler(range(9), generator=torch.Generator())
    wrapper = Own(dataset=Own(_sampler=inside))
    outside = Own(batch_sampler=BatchSampler(wrapper, 2, False))
    found = chain_of(outside)
    assert found.chain == [outside, outside.batch_sampler, wrapper, inside]
    assert found.own_generators == [inside.generator]


def test_batches_in_another_order_hide_our_sampler():
    class Sorted(BatchSampler):
        def __iter__(self):
            return iter(sorted(super().__iter__()))

    class Named(BatchSampler):
        pass

    sampler = ResumableDistributedSampler(range(9), 1, 0)
    assert chain_of(sampler).resumable is sampler
    assert chain_of(Named(sampler, 2, False)).resumable is sampler
    assert chain_of(Sorted(sampler, 2, False)).resumable is None
