"""Fetch the original, rpcdataloader 0.2.1, into a folder of its own.

It has our import name, so it is on the path of the processes that measure it and of no other.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# tblib is its only dependency that is not among ours.
REQUIREMENTS = ("rpcdataloader==0.2.1", "tblib==3.2.2")


def install(cache: Path) -> Path:
    """Return the folder that holds the original, filling it first when it is missing.

    Args:
        cache: Created when missing, together with a ``.gitignore`` that hides it.

    Raises:
        OSError: pip failed; the text holds the end of its output.
    """
    folder = cache / "original-0.2.1"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=cache) as parent:
        fresh = Path(parent) / "new"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(fresh)]
        done = subprocess.run([*pip, *REQUIREMENTS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise OSError(f"pip cannot fetch {' and '.join(REQUIREMENTS)}: {done.stdout.strip()[-1000:]}")
        # Complete or not there at all, also after Ctrl-C.
        shutil.move(fresh, folder)
    return folder
