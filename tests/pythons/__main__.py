"""``make test-pythons``: the unit tests, and some of behaviour, on each supported Python that this machine has.

The Python of this environment runs them with the torch of this environment. The others run what needs no torch: most
decisions, formats and files of the package. ``--torch`` installs it for them as well, which are gigabytes where the
package index has no build for the CPU. The rows that are printed belong into the table in docs/design.md.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OWN = "{}.{}".format(*sys.version_info)
OLDEST_TORCH = (2, 4)

PACKAGES = ["cloudpickle", "hypothesis", "numpy", "pillow", "pytest", "pytest-timeout", "pyyaml"]
UNIT = ["tests/unit", "tests/simulation"]
INTEGRATION = [
    f"tests/behaviour/test_{name}.py"
    for name in ("rpc", "batches", "iterable", "exceptions", "resume", "main_script", "py_modules", "forward_output")
]
WITHOUT_TORCH = ["-p", "tests.pythons.without_torch"]


def find(version: str) -> str | None:
    """A program that is this version, of the search path or of pyenv."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    installed = sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))
    for program in filter(None, [shutil.which(f"python{version}"), *installed]):
        # One of pyenv's may be there for a version that is not chosen.
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return program
    return None


def oldest_torch(python: str) -> str:
    """The oldest supported torch that there is for a Python."""
    command = [python, "-m", "pip", "index", "versions", "torch"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = [tuple(map(int, version)) for version in re.findall(r"(\d+)\.(\d+)\.(\d+)(?=[,\n])", found)]
    return ".".join(map(str, min(version for version in versions if version >= OLDEST_TORCH)))


def make_environment(program: str, folder: Path, torch: str) -> str:
    """Install what tests need, and torch if it is wanted; returns the Python of the new environment."""
    subprocess.run([program, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *PACKAGES], check=True)
    if torch != "none":
        version = f"torch=={oldest_torch(python)}" if torch == "oldest" else "torch"
        subprocess.run([*pip, version], check=True)
    return python


def run(python: str, torch: str) -> tuple[bool, str]:
    """Run the tests; returns whether they pass, and a row of the table."""
    tests = [*WITHOUT_TORCH, *UNIT] if torch == "none" else [*UNIT, *INTEGRATION]
    fast = ["-m", "not slow and not study", "--timeout", "120", "--quiet"]
    command = [python, "-m", "pytest", *fast, *tests]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    summary = re.sub(r"=+|,? ?\d+ deselected,?|in [\d.]+s.*", "", last).strip(" ,")
    program = "import platform; print(platform.python_version())"
    version = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    if torch != "none":
        program = "import torch; print(torch.__version__)"
        torch = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    what = "unit" if torch == "none" else "unit, some behaviour"
    return process.returncode == 0, f"| {version} | {torch} | {what} | {summary} | {datetime.date.today()} |"


def runs(versions: list[str], torches: list[str]) -> Iterator[tuple[bool, str]]:
    """Run everything, one after the other."""
    for version in versions:
        program = find(version)
        if program is None:
            yield True, f"| {version} | | | there is no such Python here | |"
            continue
        if version == OWN and not torches:
            yield run(sys.executable, "own")
            continue
        for torch in torches or ["none"]:
            with tempfile.TemporaryDirectory() as folder:
                yield run(make_environment(program, Path(folder, "environment"), torch), torch)


def main() -> int:
    """Run the tests and print the rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.pythons", description=__doc__)
    parser.add_argument("versions", nargs="*", default=PYTHONS, choices=PYTHONS, help="(default: all)")
    parser.add_argument(
        "--torch",
        nargs="+",
        default=[],
        choices=("oldest", "newest"),
        help="install these versions of torch, for each Python (default: that of this environment, and none elsewhere)",
    )
    options = parser.parse_args()
    found = list(runs(list(options.versions), options.torch))
    print("\n| Python | torch | tests | result | on |\n| --- | --- | --- | --- | --- |")
    print("\n".join(row for _passed, row in found))
    return 0 if all(passed for passed, _row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
