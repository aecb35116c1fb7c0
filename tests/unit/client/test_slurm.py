"""What processes of Slurm jobs take for their rank. The environments were written down from jobs of Slurm 22.05."""

from __future__ import annotations

import pytest

from rpcdataloader.client.sharing import rank_of_step

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
    ],
    ids=["nowhere", "batch script", "salloc", "srun", "srun of one", "smaller step"],
)
def test_only_a_task_of_a_step_has_a_rank(environ, expected):
    assert rank_of_step(environ, is_terminal=False) == expected


@pytest.mark.parametrize("procid", range(2))
def test_one_srun_for_each_component(procid):
    assert rank_of_step({**JOB, **step(procid, 2, 1)}, is_terminal=False) == (procid, 2)
    assert rank_of_step({**JOB, **step(procid, 2, 2)}, is_terminal=False) == (procid, 2)


def test_one_srun_for_all_components_counts_the_tasks_of_each_apart():
    job = {**JOB, "SLURM_NTASKS_HET_GROUP_1": "3", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3"}
    ranks = [rank_of_step({**job, **step(procid, 5, 4)}, is_terminal=False) for procid in range(5)]
    assert ranks == [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]


def test_step_on_more_tasks_than_its_component_has_is_not_one_over_all_of_them():
    assert rank_of_step({**JOB, **step(3, 4, 1)}, is_terminal=False) == (3, 4)


def test_shell_of_a_step_is_alone_and_a_step_from_there_is_not():
    environ = {**step(0, 8, 1), "SLURM_PTY_PORT": "41575"}
    assert rank_of_step(environ, is_terminal=True) is None
    assert rank_of_step(environ, is_terminal=False) == (0, 8)
    assert rank_of_step(step(0, 8, 1), is_terminal=True) == (0, 8)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"])
def test_what_is_no_number_is_refused(name):
    with pytest.raises(ValueError, match="invalid literal"):
        rank_of_step({**step(0, 8, 1), name: "many"}, is_terminal=False)
