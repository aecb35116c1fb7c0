"""What /proc says of processes: changes of thread, and memory."""

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


def count_switches() -> dict[str, Switches]:
    """Return what each thread of this process has counted so far, by thread id."""
    counts = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = (task / "status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
            numbers = fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"]
            counts[task.name] = Switches(*map(int, numbers))
    return counts


def switches_between(before: dict[str, Switches], after: dict[str, Switches]) -> Switches:
    """Return what was counted in between, by the threads that are there at the end."""
    zero = Switches(0, 0)
    return Switches(*(sum(counts[i] - before.get(task, zero)[i] for task, counts in after.items()) for i in (0, 1)))


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
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
