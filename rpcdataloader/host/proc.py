"""What the kernel says in ``/proc`` of processes, connections and memory. Linux; nothing elsewhere."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from rpcdataloader.host.cgroups import read


class ProcessUse(NamedTuple):
    """What a process is doing, and what it has used.

    Attributes:
        state: The letter by which Linux names the state of its main thread; empty when it has gone.
        cpu_seconds: CPU time that all of its threads have used.
        memory_bytes: Resident memory, including what it shares with other processes.
    """

    state: str = ""
    cpu_seconds: float = 0.0
    memory_bytes: int = 0


def process_use(pid: int) -> ProcessUse:
    """What the process of that number is doing; the default if it has gone."""
    # The name of the program, in parentheses, may hold anything.
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 22:
        return ProcessUse()
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUse(fields[0], ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


def unread_bytes() -> dict[int, int]:
    """Bytes that the kernel holds for the processes that own TCP sockets, by inode."""
    unread = {}
    for name in "tcp", "tcp6":
        for line in read(f"/proc/net/{name}").splitlines()[1:]:
            fields = line.split()
            unread[int(fields[9])] = int(fields[4].partition(":")[2], 16)
    return unread


def memory_bytes(meminfo: str | None = None) -> dict[str, int]:
    """The amounts of ``/proc/meminfo``, under the kernel's names; ``meminfo`` is its text, if it was read before."""
    text = read("/proc/meminfo") if meminfo is None else meminfo
    return {name: int(amount) * 2**10 for name, amount in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
