"""What /proc says of processes: changes of thread, threads and descriptors, memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Switches(NamedTuple):
    """How often threads gave up the processor: because they waited, and because others were given it."""

    voluntary: int
    involuntary: int


def count_switches(pid: str = "self") -> dict[str, Switches]:
    """Return what each thread of a process has counted so far, by thread id."""
    counts = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            counts[task.name] = parse_switches((task / "status").read_text())
    return counts


def parse_switches(status: str) -> Switches:
    """Read the two counters of ``/proc/PID/task/TID/status``."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return Switches(int(fields["voluntary_ctxt_switches"]), int(fields["nonvoluntary_ctxt_switches"]))


def switches_between(before: dict[str, Switches], after: dict[str, Switches]) -> Switches:
    """Return what was counted in between, by the threads that are there at the end."""
    zero = Switches(0, 0)
    return Switches(*(sum(counts[i] - before.get(task, zero)[i] for task, counts in after.items()) for i in (0, 1)))


def count_threads() -> int:
    """Return the number of threads of this process, of whatever language."""
    return len(os.listdir("/proc/self/task"))


def count_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # without the one of this look


def find_descendants(roots: Iterable[int]) -> list[int]:
    """Return the processes below these, at any depth; without themselves."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    todo = list(roots)
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def sum_memory(pids: Iterable[int]) -> int:
    """Return the proportional set size of these processes together, in bytes: shared pages are divided among all."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += parse_memory(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return total


def parse_memory(rollup: str) -> int:
    """Read the proportional set size of ``/proc/PID/smaps_rollup``, in bytes; 0 of a process that has ended."""
    sizes = [int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")]
    return sum(sizes)
