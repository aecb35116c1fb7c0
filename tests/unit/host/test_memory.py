"""What a rank may use of its machine: its part of the memory for the bytes in flight, and of the CPUs."""

from __future__ import annotations

import pytest

from rpcdataloader.host import resources
from rpcdataloader.host.resources import cpus_of_rank, default_in_flight_bytes, share_of_memory

GIB = 2**30
MEMINFO = f"MemTotal:       {128 << 20} kB\nMemFree:  1 kB\nMemAvailable:   {64 << 20} kB\nHugePages_Total:  7\n"


def test_eighth_of_what_is_available():
    assert share_of_memory(MEMINFO, [], {}) == 8 * GIB


def test_nothing_known_is_the_constant():
    assert share_of_memory("", ["", "max"], {"LOCAL_WORLD_SIZE": "8"}) == 4 * GIB


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (["max", str(32 * GIB), ""], 4 * GIB),
        ([str(32 * GIB), str(16 * GIB)], 2 * GIB),  # of groups within each other
        (["9223372036854771712"], 8 * GIB),  # how version 1 says that there is none
    ],
)
def test_least_limit_of_control_groups_counts(limits, expected):
    assert share_of_memory(MEMINFO, limits, {}) == expected


@pytest.mark.parametrize(("value", "expected"), [("16384", 2 * GIB), ("0", 8 * GIB), ("", 8 * GIB), ("16G", 8 * GIB)])
def test_memory_of_the_slurm_job_counts(value, expected):
    assert share_of_memory(MEMINFO, [], {"SLURM_MEM_PER_NODE": value}) == expected


@pytest.mark.parametrize(
    ("environ", "num_ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS_PER_NODE": "1"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x12),8(x2),3", "SLURM_NTASKS_PER_NODE": "16"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "16"}, 16),
        ({"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
    ],
)
def test_ranks_of_a_node_share(environ, num_ranks):
    assert share_of_memory(MEMINFO, [], environ) == 8 * GIB // num_ranks


@pytest.mark.parametrize(
    ("environ", "world_size", "expected"),
    [
        ({}, 8, 16),
        ({"LOCAL_WORLD_SIZE": "4"}, 8, 4),
        ({"LOCAL_WORLD_SIZE": "32"}, 64, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 8, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_CPUS_PER_TASK": "16"}, 8, 16),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_PER_TASK": "16"}, 8, 4),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 1, 16),  # a single process in the script of a job
    ],
)
def test_ranks_of_a_node_divide_its_cpus(environ, world_size, expected):
    assert cpus_of_rank(16, world_size, environ) == expected


@pytest.mark.parametrize(
    ("membership", "name"), [("0::/job\n", "job/memory.max"), ("9:memory:/job\n", "memory/job/memory.limit_in_bytes")]
)
def test_limit_of_this_process_is_read(monkeypatch, membership, name):
    texts = {"/proc/meminfo": MEMINFO.strip(), f"/sys/fs/cgroup/{name}": str(4 * GIB), "/proc/self/cgroup": membership}
    monkeypatch.setattr(resources, "read", lambda path: texts.get(path, ""))
    assert default_in_flight_bytes({}) == GIB // 2
