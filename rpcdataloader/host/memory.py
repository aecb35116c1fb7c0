"""How many bytes of batches a loader may have in flight where the script does not say: a part of what there is.

The limit has to hold for the machine and not for one loader, so it is shared out: among the ranks on this node, and
among the loaders of each, of which two are at work in most scripts, for training and for validation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from rpcdataloader.host.cgroups import cgroup_folders, read

# Where nothing is known of the memory, as on systems without /proc.
UNKNOWN_MEMORY_BYTES = 4 * 2**30

# Less than this would slow loaders down, and save nobody whose memory is that full.
MIN_BYTES = 64 * 2**20

# A quarter of the memory for the batches of all loaders on a node, half of that for each of two loaders. What is left
# is for what the trainer itself needs, for datasets, and for the page cache.
FRACTION = 1 / 8

# How many ranks are on this node, by whoever knows best: torchrun or mpirun, which started them, then Slurm, which may
# have started one process that starts the others. Slurm abbreviates: "4(x2),3" for nodes with 4, 4 and 3 tasks.
_RANKS_VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
)


def default_in_flight_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """The default of ``max_in_flight_bytes``, for the memory that is available now."""
    limits = [
        read(f"{folder}/{name}")
        for folder in cgroup_folders("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return share_of_memory(read("/proc/meminfo"), limits, environ)


def share_of_memory(meminfo: str, cgroup_limits: Iterable[str], environ: Mapping[str, str]) -> int:
    """An eighth of the memory of this node, divided by the number of ranks on it; at least 64 MiB.

    Pure. The memory is the least of what is known: what the kernel says is available, the limits of the control
    groups, and that of the Slurm job. Where nothing is known, the result is 4 GiB.

    Args:
        meminfo: Text of ``/proc/meminfo``; empty if there is none.
        cgroup_limits: Texts of ``memory.max`` (version 2) or ``memory.limit_in_bytes`` (version 1); those that are no
            numbers, such as ``max``, are no limits.
        environ: Where ``SLURM_MEM_PER_NODE`` (MiB, 0 for all) and the number of ranks are looked up.
    """
    kib = {name: int(amount) for name, amount in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}
    known = [int(text) for text in cgroup_limits if text.isdecimal()]
    if (available := kib.get("MemAvailable", kib.get("MemTotal"))) is not None:
        known.append(available * 2**10)
    if (per_node := environ.get("SLURM_MEM_PER_NODE", "")).isdecimal() and int(per_node) > 0:
        known.append(int(per_node) * 2**20)
    if not known:
        return UNKNOWN_MEMORY_BYTES
    return max(MIN_BYTES, int(min(known) * FRACTION) // _num_ranks_here(environ))


def _num_ranks_here(environ: Mapping[str, str]) -> int:
    for name in _RANKS_VARIABLES:
        # Not the 2 of "4(x2)".
        counts = [int(count) for count in re.findall(r"\b\d+", environ.get(name, ""))]
        if max(counts, default=0) > 0:
            return max(counts)
    return 1
