from __future__ import annotations

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from rpcdataloader import ResumableDistributedSampler
from rpcdataloader.loader.order import describe_sampler
from rpcdataloader.loader.settings import PassSettings


class Own:
    """Numbers of other types, and a name of no consequence."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


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
