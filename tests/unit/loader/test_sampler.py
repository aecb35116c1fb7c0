from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import DistributedSampler

from rpcdataloader import ResumableDistributedSampler

OPTIONS = {
    "size": st.integers(0, 30),
    "num_replicas": st.integers(1, 5),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
}


def ranks(size, num_replicas, shuffle=True, seed=0, drop_last=False, kind=ResumableDistributedSampler):
    return [kind(range(size), num_replicas, rank, shuffle, seed, drop_last) for rank in range(num_replicas)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 5), **OPTIONS)
def test_order_and_length_are_those_of_torchs_sampler(size, num_replicas, shuffle, seed, drop_last, epoch):
    if size == 0 and not drop_last:
        return  # torch's fails
    ours = ranks(size, num_replicas, shuffle, seed, drop_last)
    theirs = ranks(size, num_replicas, shuffle, seed, drop_last, DistributedSampler)
    for one, other in zip(ours, theirs, strict=True):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert (list(one), len(one)) == (list(other), len(other))


def in_turn(samplers):
    """The global order."""
    return [index for row in zip(*samplers, strict=True) for index in row]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), **OPTIONS)
def test_other_ranks_go_on_in_the_same_order(data, size, num_replicas, shuffle, drop_last):
    whole = in_turn(ranks(size, 1, shuffle))
    start = data.draw(st.integers(0, size))
    state = json.loads(json.dumps(ranks(size, 1, shuffle)[0].state_dict(start)))
    samplers = ranks(size, num_replicas, not shuffle, seed=5, drop_last=drop_last)
    for sampler in samplers:
        sampler.load_state_dict(state)
        assert sampler.start == start
    lengths = {len(sampler) for sampler in samplers}
    rest = in_turn(samplers)
    assert lengths == {len(rest) // num_replicas}
    num_left = size - start
    assert rest[:num_left] == whole[start : start + len(rest)]
    left_out, padding = num_left % num_replicas, -num_left % num_replicas
    assert len(rest) == (num_left - left_out if drop_last else num_left + padding)
    # The next pass has everything.
    assert in_turn(samplers) == in_turn(ranks(size, num_replicas, shuffle, drop_last=drop_last))


def test_state_says_where_the_next_pass_begins():
    sampler = ranks(9, 1)[0]
    sampler.load_state_dict(sampler.state_dict(4))
    assert sampler.state_dict()["start"] == 4
    list(sampler)
    assert sampler.state_dict()["start"] == 0
    assert sampler.state_dict(100)["start"] == 9


def test_dataset_of_another_length_is_refused_and_changes_nothing():
    sampler = ranks(9, 1)[0]
    with pytest.raises(ValueError, match="a dataset of 10 samples, but there are 9 now"):
        sampler.load_state_dict(ResumableDistributedSampler(range(10), 1, 0, seed=3).state_dict(4))
    assert (sampler.start, sampler.seed) == (0, 0)


def test_global_generators_are_left_alone():
    before = torch.get_rng_state()
    list(ranks(9, 1)[0])
    assert torch.equal(torch.get_rng_state(), before)
