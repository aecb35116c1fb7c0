"""Which workers of the nodes are a rank's, and which rank a process has."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.client.sharing import Partition, current_partition, rank_of_step, share_of

NODES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def shares(num_workers: list[int], world_size: int) -> list[list[int]]:
    return [share_of(num_workers, Partition(rank, world_size)) for rank in range(world_size)]


# Shares


def test_one_rank_has_every_worker_of_every_node():
    assert share_of([2, 1, 3], Partition()) == [0, 1, 2, 0, 2, 2]


@settings(deadline=None)
@given(num_workers=NODES, data=st.data())
def test_shares_are_disjoint_complete_and_equal(num_workers, data):
    world_size = data.draw(st.integers(1, sum(num_workers)))
    dealt = shares(num_workers, world_size)
    assert Counter(node for share in dealt for node in share) == Counter(dict(enumerate(num_workers)))
    sizes = {len(share) for share in dealt}
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(num_workers=NODES, excess=st.integers(1, 20))
def test_more_ranks_than_workers_double_up_evenly(num_workers, excess):
    total = sum(num_workers)
    dealt = shares(num_workers, total + excess)
    assert all(len(share) == 1 for share in dealt)
    first_round = Counter(node for share in dealt[:total] for node in share)
    assert first_round == Counter(dict(enumerate(num_workers)))
    assert dealt[total:] == [dealt[rank % total] for rank in range(total, total + excess)]


# Who this process is


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        *((environ, Partition(0, 1)) for environ in ({}, {"RANK": "1"}, {"WORLD_SIZE": "2"}, {"SLURM_PROCID": "1"})),
        ({**STEP, "RANK": "6", "WORLD_SIZE": "8"}, Partition(6, 8)),  # of torchrun, within a step
    ],
)
def test_rank_is_that_of_both_variables(environ, expected):
    assert current_partition(environ) == expected


def test_torch_distributed_comes_before_the_environment(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert current_partition({"RANK": "0", "WORLD_SIZE": "2"}) == Partition(3, 4)


# Processes of Slurm jobs. The environments were written down from jobs of Slurm 22.05.


# A heterogeneous job of 1 node with 2 trainers, and 2 nodes with 1 node server each.
JOB = {
    "SLURM_HET_SIZE": "2",
    "SLURM_NTASKS_HET_GROUP_0": "2",
    "SLURM_NTASKS_HET_GROUP_1": "2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
}


def step(procid, num_tasks, num_nodes):
    return {
        "SLURM_STEP_ID": "3",
        "SLURM_PROCID": str(procid),
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NUM_NODES": str(num_nodes),
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        ({"SLURM_NTASKS": "8"}, None),
        (step(5, 8, 2), (5, 8)),
        (step(0, 1, 1), (0, 1)),
        # A step in a batch script of 8 tasks has its own number of them.
        ({**step(3, 4, 2), "SLURM_TASKS_PER_NODE": "4(x2)"}, (3, 4)),
        # One srun for each component
        ({**JOB, **step(1, 2, 1)}, (1, 2)),
        ({**JOB, **step(1, 2, 2)}, (1, 2)),
        # A step on more tasks than its component has is not one over all of them.
        ({**JOB, **step(3, 4, 1)}, (3, 4)),
    ],
)
def test_only_a_task_of_a_step_has_a_rank(environ, expected):
    assert rank_of_step(environ, is_terminal=False) == expected


def test_one_srun_for_all_components_counts_the_tasks_of_each_apart():
    job = {**JOB, "SLURM_NTASKS_HET_GROUP_1": "3", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3"}
    ranks = [rank_of_step({**job, **step(procid, 5, 4)}, is_terminal=False) for procid in range(5)]
    assert ranks == [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]


def test_shell_of_a_step_is_alone_and_a_step_from_there_is_not():
    environ = {**step(0, 8, 1), "SLURM_PTY_PORT": "41575"}
    assert rank_of_step(environ, is_terminal=True) is None
    assert rank_of_step(environ, is_terminal=False) == (0, 8)
    assert rank_of_step(step(0, 8, 1), is_terminal=True) == (0, 8)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"])
def test_what_is_no_number_is_refused(name):
    with pytest.raises(ValueError, match="invalid literal"):
        rank_of_step({**step(0, 8, 1), name: "many"}, is_terminal=False)
