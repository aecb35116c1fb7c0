"""CPUs and memory that this process may use, and that processes use, according to Linux.

Where the kernel does not tell, texts are empty, and unknown amounts set no limit.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import NamedTuple


def available_cpus(environ: Mapping[str, str] = os.environ, cgroup_root: str = "/sys/fs/cgroup") -> int:
    """CPUs that this process may use, at least 1: the least of its affinity, its cgroup's quota and its Slurm task's.

    Args:
        environ: Environment with ``SLURM_CPUS_PER_TASK``.
        cgroup_root: Mount point of the cgroup file system (version 2, or 1 with the cpu controller).
    """
    limits = [len(os.sched_getaffinity(0))]
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


def cgroup_folders(controller: str, root: str = "/sys/fs/cgroup") -> list[str]:
    """The folders of this process's groups, each followed by its parents; they may be missing.

    Args:
        controller: Controller of the limits, such as ``cpu``; version 1 has a hierarchy for each.
    """
    folders = []
    # Not splitlines: names of groups may have what it takes for the end of a line.
    for line in filter(None, read("/proc/self/cgroup").split("\n")):
        _number, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = f"{root}/{controllers}" if controllers else root
        while True:
            folders.append(base + path.rstrip("/"))
            if path in ("/", ""):
                break
            path = os.path.dirname(path)
    return folders


def read(path: str) -> str:
    """The text of a small file, stripped; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


class ProcessUse(NamedTuple):
    """State and use of a process."""

    state: str = ""  # Linux's letter for the state of its main thread; empty when it has gone
    cpu_seconds: float = 0.0  # CPU time of all of its threads
    memory_bytes: int = 0  # resident memory, including shared pages


def process_use(pid: int) -> ProcessUse:
    """The use of a process; the default if it has gone."""
    # The name of the program, in parentheses, may hold anything.
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 22:
        return ProcessUse()
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUse(fields[0], ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


def memory_bytes(meminfo: str | None = None) -> dict[str, int]:
    """The amounts of ``/proc/meminfo``, under the kernel's names; ``meminfo`` is its text, if read before."""
    text = read("/proc/meminfo") if meminfo is None else meminfo
    return {name: int(amount) * 2**10 for name, amount in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


class CpuUse:
    """The CPUs that this process may use, and how many of them are busy, with any program.

    A quota of a cgroup caps both numbers.
    """

    def __init__(self, period: float = 0.25) -> None:
        self._period = period  # seconds for which a look holds
        self._next_look = 0.0
        self._cpus = 0.0
        self._before = 0, 0  # ticks of all these CPUs, and of those idle
        self._found = 0.0, 0.0

    def look(self, now: float) -> tuple[float, float]:
        """Return both numbers for the last moments; zeros until two looks have passed, or if the kernel tells nothing.

        Args:
            now: Seconds of a clock that never goes back.
        """
        if now < self._next_look:
            return self._found
        self._next_look = now + self._period
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [row.split() for row in read("/proc/stat").splitlines() if row.startswith("cpu")]
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = [list(map(int, fields[1:9])) for fields in rows if fields[0] in mine]
        before, self._before = self._before, (sum(map(sum, ticks)), sum(each[3] + each[4] for each in ticks))
        passed, idle = (after - earlier for after, earlier in zip(self._before, before, strict=True))
        if before[0] and passed > 0:
            self._cpus = self._cpus or float(available_cpus({}))
            self._found = self._cpus, min(self._cpus, len(ticks) * max(0, passed - idle) / passed)
        return self._found


# Assumed where the memory is unknown.
UNKNOWN_MEMORY_BYTES = 4 * 2**30

# Less would slow loaders down, and would not save a node whose memory is that full.
MIN_BYTES = 64 * 2**20

# A quarter of the memory for the batches of all loaders on a node, half of that for each of two loaders. The rest is
# for the trainer itself, for datasets, and for the page cache.
FRACTION = 1 / 8

# The number of ranks on this node, best source first: torchrun or mpirun, which started them, then Slurm, which may
# have started one process that starts the others. Slurm abbreviates: "4(x2),3" for nodes with 4, 4 and 3 tasks.
_RANKS_VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
)


def default_in_flight_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """The default of ``max_in_flight_bytes``, for the memory that is available now.

    The limit holds for the machine, so it is divided among the ranks on this node, and among the loaders of each, of
    which most scripts use two at a time: training and validation.
    """
    limits = [
        read(f"{folder}/{name}")
        for folder in cgroup_folders("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return share_of_memory(read("/proc/meminfo"), limits, environ)


def share_of_memory(meminfo: str, cgroup_limits: Iterable[str], environ: Mapping[str, str]) -> int:
    """An eighth of the memory of this node, divided by the number of ranks on it; at least 64 MiB.

    Pure. The memory is the least known amount: available according to the kernel, the limits of the control groups,
    and the Slurm job's. If all are unknown, the result is 4 GiB.

    Args:
        meminfo: Text of ``/proc/meminfo``; empty without such a file.
        cgroup_limits: Texts of ``memory.max`` (version 2) or ``memory.limit_in_bytes`` (version 1); texts that are not
            numbers, such as ``max``, set no limit.
        environ: Environment with ``SLURM_MEM_PER_NODE`` (MiB, 0 for all) and the number of ranks.
    """
    memory = memory_bytes(meminfo)
    known = [int(text) for text in cgroup_limits if text.isdecimal()]
    if (available := memory.get("MemAvailable", memory.get("MemTotal"))) is not None:
        known.append(available)
    if (per_node := environ.get("SLURM_MEM_PER_NODE", "")).isdecimal() and int(per_node) > 0:
        known.append(int(per_node) * 2**20)
    if not known:
        return UNKNOWN_MEMORY_BYTES
    return max(MIN_BYTES, int(min(known) * FRACTION) // _num_ranks_here(environ))


def _num_ranks_here(environ: Mapping[str, str]) -> int:
    for name in _RANKS_VARIABLES:
        # Without the 2 of "4(x2)".
        counts = [int(count) for count in re.findall(r"\b\d+", environ.get(name, ""))]
        if max(counts, default=0) > 0:
            return max(counts)
    return 1


def cpus_of_rank(num_cpus: int, world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """This rank's part of the CPUs that it may use, at least 1. Pure.

    Args:
        num_cpus: Number of CPUs that the rank may use; with ``SLURM_CPUS_PER_TASK`` its own part, unless torchrun has
            started several ranks in one task.
        world_size: Number of ranks on all machines. Slurm's variables also hold where a job runs a single process.
    """
    is_divided = "SLURM_CPUS_PER_TASK" in environ and "LOCAL_WORLD_SIZE" not in environ
    return num_cpus if is_divided else max(1, num_cpus // min(_num_ranks_here(environ), world_size))


@functools.cache
def machine_id() -> str:
    """Identifies this machine, the same in all of its containers; new with every boot."""
    return read("/proc/sys/kernel/random/boot_id") or socket.gethostname()
