"""The bucket as a folder, by ``rclone mount``, as the mounts of object stores that trainings often read through."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from examples.storage_formats.processes import Child, wait_for
from examples.storage_formats.storage import Location
from examples.storage_formats.store import find_program


def why_not() -> str | None:
    """What is missing for a mount; None if nothing is."""
    if shutil.which("fusermount3") is None:
        return "there is no fusermount3: install the package fuse3"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing, or may not be opened"
    return None


class Mount(NamedTuple):
    """A folder, and the program that serves it."""

    folder: str
    child: Child


@contextlib.contextmanager
def mounted(location: Location, folder: Path, log: Path) -> Iterator[Mount]:
    """Mount the bucket read-only, without a cache of contents."""
    program = find_program("rclone", "pip install --group formats")
    folder.mkdir()
    # Without a file of its own, rclone would read the user's, and its answers are cached in a folder of the user's.
    options = ["--read-only", "--config", "/dev/null", "--cache-dir", f"{folder}.cache", "--vfs-cache-mode", "off"]
    options += ["--s3-provider", "Other", "--s3-endpoint", location.endpoint, "--s3-env-auth", "--s3-force-path-style"]
    with Child([program, "mount", f":s3:{location.bucket}", str(folder), *options], log) as child:
        try:
            wait_for(child, lambda: os.path.ismount(folder), "the mount")
            yield Mount(str(folder), child)
        finally:
            try:
                child.stop()
            finally:  # rclone unmounts, unless it was killed
                subprocess.run(["fusermount3", "-uzq", str(folder)], check=False)
