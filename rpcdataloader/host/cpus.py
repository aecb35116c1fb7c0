"""How many CPUs this process may really use: the least of its affinity, its cgroup's quota and its Slurm task's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rpcdataloader.host.cgroups import cgroup_folders, read


def available_cpus(environ: Mapping[str, str] = os.environ, cgroup_root: str = "/sys/fs/cgroup") -> int:
    """CPUs that this process may use, at least 1.

    Args:
        environ: Where ``SLURM_CPUS_PER_TASK`` is looked up.
        cgroup_root: Mount point of the cgroup file system (version 2, or 1 with the cpu controller).
    """
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    quota = _cgroup_quota(cgroup_root)
    if quota is not None:
        limits.append(int(quota))
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdigit():
        limits.append(int(per_task))
    return max(1, min(limits))


def _cgroup_quota(root: str) -> float | None:
    """CPUs per period of the nearest limit above this process; None without one."""
    quotas = []
    for folder in cgroup_folders("cpu", root):
        # Version 2 has "max 100000" or "200000 100000"; version 1 two files, -1 for no limit.
        if text := read(f"{folder}/cpu.max"):
            amount, _, period = text.partition(" ")
            if amount != "max":
                quotas.append(int(amount) / int(period))
        elif text := read(f"{folder}/cpu.cfs_quota_us"):
            period = read(f"{folder}/cpu.cfs_period_us")
            if int(text) > 0 and period:
                quotas.append(int(text) / int(period))
    return min(quotas, default=None)
