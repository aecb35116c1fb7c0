"""Fetch the original, rpcdataloader 0.2.1, into a folder of its own; and, as a program, run a worker of it.

It has our import name, so it is on the path of the processes that measure it and of no other. It neither tells which
port 0 became nor when it listens. The one change made to it is to write ``ready HOST:PORT`` then.
"""

from __future__ import annotations

import importlib
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# tblib is its only dependency that is not among ours.
_REQUIREMENTS = ("rpcdataloader==0.2.1", "tblib==3.2.2")


def install(cache: Path) -> Path:
    """Return the folder that holds the original, filling it first when it is missing.

    Args:
        cache: Created when missing, together with a ``.gitignore`` that hides it.

    Raises:
        OSError: pip failed.
    """
    folder = cache / "original-0.2.1"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=cache) as parent:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", "new"]
        if subprocess.run([*pip, *_REQUIREMENTS], cwd=parent).returncode:
            raise OSError(f"pip cannot fetch {' and '.join(_REQUIREMENTS)}")
        # Complete or not there at all, also after Ctrl-C.
        shutil.move(Path(parent, "new"), folder)
    return folder


def run_worker() -> None:
    """Run a worker on a free port of loopback."""
    # Not by an import statement, which type checkers would take to mean the package of this repository.
    rpc: Any = importlib.import_module("rpcdataloader.rpc")
    create_server = rpc._create_server

    def create_server_and_tell(*args: Any, **kwargs: Any) -> socket.socket:
        sock: socket.socket = create_server(*args, **kwargs)
        print(f"ready 127.0.0.1:{sock.getsockname()[1]}", flush=True)
        return sock

    rpc._create_server = create_server_and_tell
    rpc.run_worker("127.0.0.1", 0)


if __name__ == "__main__":
    run_worker()
