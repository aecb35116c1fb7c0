"""A package of many modules on a slow mount, simulated: written to a local folder, and imported with pauses.

A shared file system answers each question about a file after a round trip to its server, here 0.2 ms. Python's import
of one module asks for the time of the folder, whether the file is there, the time and size of the source, and the
bytecode: four questions, so four pauses, in which no CPU time is used. The finder is that of the standard library with
these pauses in it, and the package itself installs it for its own folder: so it is at work in whatever
process imports it, and only there.

What is left out: the load of the server when many clients ask at the same time, and caches of the kernel, which
would make the second process on a host faster. So workers that each import everything fare as on a mount without
caches of attributes.
"""

from __future__ import annotations

import importlib.machinery
import time
from pathlib import Path
from types import ModuleType

NAME = "slowly_mounted"

PAUSE = 0.0002

_INIT = """
from benchmark.slow_modules import SlowFinder
import sys

for folder in __path__:
    sys.path_importer_cache[folder] = SlowFinder(folder)
"""

_DATASET = """
import importlib

from benchmark.datasets import Paths

for number in range({count}):
    importlib.import_module(f"slowly_mounted.module_{{number}}")


class Slow(Paths):
    pass
"""


def _ask() -> None:
    time.sleep(PAUSE)


class _SlowLoader(importlib.machinery.SourceFileLoader):
    """Asks for the time of a source file, and for the bytes of it or its bytecode."""

    def path_stats(self, path):
        _ask()
        return super().path_stats(path)

    def get_data(self, path):
        _ask()
        return super().get_data(path)


class SlowFinder(importlib.machinery.FileFinder):
    """Asks for the time of the folder, and for the file of the module."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, (_SlowLoader, [".py"]))

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        _ask()
        _ask()
        return super().find_spec(fullname, target)


def write(folder: Path, count: int) -> None:
    """Write the package into a folder, with so many modules, a dataset that imports them all, and bytecode for all."""
    package = folder / NAME
    package.mkdir()
    (package / "__init__.py").write_text(_INIT)
    (package / "dataset.py").write_text(_DATASET.format(count=count))
    for number in range(count):
        (package / f"module_{number}.py").write_text(f"def get():\n    return {number}\n")
    # Written here, as on a real mount somebody has: the processes of the benchmark write none.
    import compileall

    if not compileall.compile_dir(package, quiet=1):
        raise OSError(f"cannot compile {package}")
