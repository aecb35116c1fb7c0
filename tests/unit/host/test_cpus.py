"""How many CPUs a server may use: the least of affinity, cgroup quota and Slurm task."""

from __future__ import annotations

import os

import pytest

from rpcdataloader.host import resources
from rpcdataloader.host.resources import available_cpus


@pytest.fixture(autouse=True)
def sixteen_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))


@pytest.fixture
def cgroup(monkeypatch, tmp_path):
    """Make this process a member of a made-up cgroup."""

    def make(membership, files):
        read = resources.read
        monkeypatch.setattr(resources, "read", lambda path: membership if path == "/proc/self/cgroup" else read(path))
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        return str(tmp_path)

    return make


def test_affinity_counts(tmp_path):
    assert available_cpus({}, str(tmp_path)) == 16


@pytest.mark.parametrize(("value", "expected"), [("4", 4), ("64", 16), ("", 16), ("many", 16), ("0", 1)])
def test_slurm_task(tmp_path, value, expected):
    assert available_cpus({"SLURM_CPUS_PER_TASK": value}, str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 16)]
)
def test_quota_of_cgroup_version_2(cgroup, limit, expected):
    assert available_cpus({}, cgroup("0::/job\n", {"job/cpu.max": limit})) == expected


def test_least_quota_on_the_way_up_counts(cgroup):
    files = {"a/b/c/cpu.max": "max 100000", "a/b/cpu.max": "800000 100000", "a/cpu.max": "300000 100000"}
    assert available_cpus({}, cgroup("0::/a/b/c\n", files)) == 3


def test_quota_inside_a_container_is_at_the_mount_point(cgroup):
    assert available_cpus({}, cgroup("0::/\n", {"cpu.max": "400000 100000"})) == 4


@pytest.mark.parametrize(("quota", "expected"), [("600000", 6), ("-1", 16)])
def test_quota_of_cgroup_version_1(cgroup, quota, expected):
    root = cgroup(
        "9:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/x\n",
        {
            "cpu,cpuacct/job/cpu.cfs_quota_us": quota,
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "memory/job/cpu.cfs_quota_us": "100000",
        },
    )
    assert available_cpus({}, root) == expected


def test_the_least_of_all_counts(cgroup):
    root = cgroup("0::/job\n", {"job/cpu.max": "700000 100000"})
    assert available_cpus({"SLURM_CPUS_PER_TASK": "9"}, root) == 7
    assert available_cpus({"SLURM_CPUS_PER_TASK": "5"}, root) == 5
