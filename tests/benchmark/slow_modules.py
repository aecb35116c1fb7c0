"""A package of many modules on a slow mount, simulated: written to a local folder, and imported with pauses.

A shared file system answers each question about a file after a round trip to its server, here 0.2 ms. Python's import
of one module asks for the time of the folder, whether the file is there, the time and size of the source, and the
bytecode: four questions, so each module begins with four pauses, in which no CPU time is used.

What is left out: the load of the server when many clients ask at the same time, and caches of the kernel, which
would make the second process on a host faster. So workers that each import everything fare as on a mount without
caches of attributes.
"""

from __future__ import annotations

import compileall
import time
from pathlib import Path

NAME = "slowly_mounted"

_MODULE = """
from benchmark.slow_modules import ask

ask()
"""

_DATASET = """
import importlib

from benchmark.datasets import Paths

for number in range({count}):
    importlib.import_module(f"slowly_mounted.module_{{number}}")


class Slow(Paths):
    pass
"""


def ask() -> None:
    """Wait for four answers."""
    for _ in range(4):
        time.sleep(0.0002)


def write(folder: Path, count: int) -> None:
    """Write the package into a folder, with so many modules, a dataset that imports them all, and bytecode for all."""
    package = folder / NAME
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "dataset.py").write_text(_DATASET.format(count=count))
    for number in range(count):
        (package / f"module_{number}.py").write_text(_MODULE)
    # Written here, as on a real mount somebody has: the processes of the benchmark write none.
    if not compileall.compile_dir(package, quiet=1):
        raise OSError(f"cannot compile {package}")
