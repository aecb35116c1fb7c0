"""The limits of the control groups that this process is in, as the texts of their files. Linux; empty elsewhere."""

from __future__ import annotations

import os


def cgroup_folders(controller: str, root: str = "/sys/fs/cgroup") -> list[str]:
    """The folders of this process's groups, each followed by those above it; they need not exist.

    Args:
        controller: The one whose limits are wanted, such as ``cpu``; version 1 has a hierarchy for each.
        root: Mount point of the cgroup file system.
    """
    folders = []
    for line in read("/proc/self/cgroup").splitlines():
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
    """The text of a small file, stripped; empty if there is none or it cannot be read."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
