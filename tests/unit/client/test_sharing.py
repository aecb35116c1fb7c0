from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from rpcdataloader.client.sharing import Partition, current_partition, share_of

NODES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def shares(num_workers: list[int], world_size: int) -> list[list[int]]:
    return [share_of(num_workers, Partition(rank, world_size)) for rank in range(world_size)]


# Shares


def test_one_rank_has_every_worker_of_every_node():
    assert share_of([2, 1, 3], Partition()) == [0, 1, 2, 0, 2, 2]


@given(num_workers=NODES, data=st.data())
def test_shares_are_disjoint_complete_and_equal(num_workers, data):
    world_size = data.draw(st.integers(1, sum(num_workers)))
    dealt = shares(num_workers, world_size)
    assert Counter(node for share in dealt for node in share) == Counter(dict(enumerate(num_workers)))
    sizes = {len(share) for share in dealt}
    assert max(sizes) - min(sizes) <= 1


@given(num_workers=st.integers(1, 8), num_nodes=st.integers(1, 5), factor=st.integers(1, 3))
def test_each_rank_stays_on_one_node_where_that_is_possible(num_workers, num_nodes, factor):
    world_size = num_nodes * factor
    if world_size > num_nodes * num_workers:
        return
    for share in shares([num_workers] * num_nodes, world_size):
        assert len(set(share)) == 1


@given(num_workers=NODES, excess=st.integers(1, 20))
def test_more_ranks_than_workers_double_up_evenly(num_workers, excess):
    total = sum(num_workers)
    dealt = shares(num_workers, total + excess)
    assert all(len(share) == 1 for share in dealt)
    first_round = Counter(node for share in dealt[:total] for node in share)
    assert first_round == Counter(dict(enumerate(num_workers)))
    assert dealt[total:] == [dealt[rank % total] for rank in range(total, total + excess)]


# Who this process is


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2), (63, 64)])
def test_rank_comes_from_the_environment(rank, world_size):
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    assert current_partition(environ) == Partition(rank, world_size)


@pytest.mark.parametrize("environ", [{}, {"RANK": "1"}, {"WORLD_SIZE": "2"}, {"SLURM_PROCID": "1"}])
def test_without_both_variables_a_process_is_alone(environ):
    assert current_partition(environ) == Partition(0, 1)


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}


def test_torchrun_comes_before_the_step_of_slurm_that_it_runs_in():
    assert current_partition({**STEP, "RANK": "6", "WORLD_SIZE": "8"}) == Partition(6, 8)


def test_torch_distributed_comes_before_the_environment(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert current_partition({"RANK": "0", "WORLD_SIZE": "2"}) == Partition(3, 4)


@pytest.mark.parametrize(("rank", "world_size"), [("2", "2"), ("-1", "2"), ("0", "0"), ("one", "2"), ("0", "")])
def test_impossible_environment_is_named(rank, world_size):
    with pytest.raises(ValueError, match="environment variables RANK and WORLD_SIZE: "):
        current_partition({"RANK": rank, "WORLD_SIZE": world_size})
