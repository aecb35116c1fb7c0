"""What a process may use of its machine: CPUs, and memory for the bytes in flight."""

from __future__ import annotations

import os

import pytest

from rpcdataloader.host import resources
from rpcdataloader.host.resources import available_cpus, cpus_of_rank, default_in_flight_bytes, share_of_memory

VERSION_1 = "9:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/x"
OF_JOB = {"cpu,cpuacct/job/cpu.cfs_period_us": "100000", "memory/job/cpu.cfs_quota_us": "100000"}


@pytest.mark.parametrize(
    ("membership", "files", "task", "expected"),
    [
        # Affinity alone
        ("", {}, None, 16),
        # A Slurm task
        ("", {}, "4", 4),
        ("", {}, "64", 16),
        ("", {}, "", 16),
        ("", {}, "many", 16),
        ("", {}, "0", 1),
        # A quota of cgroup version 2
        ("0::/job", {"job/cpu.max": "200000 100000"}, None, 2),
        ("0::/job", {"job/cpu.max": "150000 100000"}, None, 1),
        ("0::/job", {"job/cpu.max": "50000 100000"}, None, 1),
        ("0::/job", {"job/cpu.max": "max 100000"}, None, 16),
        # The least on the way up, and that inside of a container, which is at the mount point
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000", "cpu.max": "800000 100000"}, None, 3),
        ("0::/", {"cpu.max": "400000 100000"}, None, 4),
        # One of version 1
        (VERSION_1, {**OF_JOB, "cpu,cpuacct/job/cpu.cfs_quota_us": "600000"}, None, 6),
        (VERSION_1, {**OF_JOB, "cpu,cpuacct/job/cpu.cfs_quota_us": "-1"}, None, 16),
        # All of them
        ("0::/job", {"job/cpu.max": "700000 100000"}, "9", 7),
        ("0::/job", {"job/cpu.max": "700000 100000"}, "5", 5),
    ],
)
def test_the_least_counts(monkeypatch, tmp_path, membership, files, task, expected):
    read = resources.read
    monkeypatch.setattr(resources, "read", lambda path: membership if path == "/proc/self/cgroup" else read(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    environ = {} if task is None else {"SLURM_CPUS_PER_TASK": task}
    assert available_cpus(environ, str(tmp_path)) == expected


# What a rank may use


GIB = 2**30
MEMINFO = f"MemTotal:       {128 << 20} kB\nMemFree:  1 kB\nMemAvailable:   {64 << 20} kB\nHugePages_Total:  7\n"


@pytest.mark.parametrize(
    ("limits", "environ", "expected"),
    [
        ([], {}, 8 * GIB),  # an eighth of what is available
        # The least limit of control groups
        (["max", str(32 * GIB), ""], {}, 4 * GIB),
        ([str(32 * GIB), str(16 * GIB)], {}, 2 * GIB),  # of groups within each other
        (["9223372036854771712"], {}, 8 * GIB),  # how version 1 says that there is none
        # The memory of a Slurm job, in MiB
        ([], {"SLURM_MEM_PER_NODE": "16384"}, 2 * GIB),
        ([], {"SLURM_MEM_PER_NODE": "0"}, 8 * GIB),
        ([], {"SLURM_MEM_PER_NODE": ""}, 8 * GIB),
        ([], {"SLURM_MEM_PER_NODE": "16G"}, 8 * GIB),
        # The ranks of a node, which share it
        ([], {"LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS_PER_NODE": "1"}, 2 * GIB),
        ([], {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 4 * GIB),
        ([], {"SLURM_STEP_TASKS_PER_NODE": "4(x12),8(x2),3", "SLURM_NTASKS_PER_NODE": "16"}, GIB),
        ([], {"SLURM_NTASKS_PER_NODE": "16"}, GIB // 2),
        ([], {"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "0"}, 8 * GIB),
        ([], {"LOCAL_WORLD_SIZE": "many"}, 8 * GIB),
    ],
)
def test_share_of_memory(limits, environ, expected):
    assert share_of_memory(MEMINFO, limits, environ) == expected


def test_nothing_known_is_the_constant():
    assert share_of_memory("", ["", "max"], {"LOCAL_WORLD_SIZE": "8"}) == 4 * GIB


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
