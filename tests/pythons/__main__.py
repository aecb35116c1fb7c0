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
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OWN = "{}.{}".format(*sys.version_info)
# And 2.4.0 for others. There is a torch 2.9 for Python 3.14, which crashes where attributes outlive their tensor.
OLDEST_TORCH = {"3.13": "2.5.0", "3.14": "2.10.0"}

PACKAGES = ["cloudpickle", "hypothesis", "numpy", "pillow", "pytest", "pytest-timeout", "pyyaml"]
UNIT = ["tests/unit", "tests/simulation"]
INTEGRATION = [
    f"tests/behaviour/test_{name}.py"
    for name in ("rpc", "batches", "dataset", "exceptions", "resume", "main_script", "py_modules", "forward_output")
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


def make_environment(version: str, program: str, folder: Path, torch: str) -> str:
    """Install what tests need, and torch if it is wanted; returns the Python of the new environment."""
    subprocess.run([program, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *PACKAGES], check=True)
    oldest = f"torch=={OLDEST_TORCH.get(version, '2.4.0')}"
    for package in {"none": [], "oldest": [oldest], "newest": ["torch"]}[torch]:
        subprocess.run([*pip, package], check=True)
    return python


def run(python: str, torch: str) -> tuple[bool, str]:
    """Run the tests; returns whether they pass, and a row of the table."""
    tests = [*WITHOUT_TORCH, *UNIT] if torch == "none" else [*UNIT, *INTEGRATION]
    fast = ["-m", "not slow and not study", "--timeout", "120", "--quiet"]
    with subprocess.Popen([python, "-m", "pytest", *fast, *tests], cwd=ROOT, stdout=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        lines: list[str] = []
        for line in done.stdout:
            print(line, end="", flush=True)
            lines += filter(None, [line.strip()])
    summary = re.sub(r"=+|,? ?\d+ deselected,?|in [\d.]+s.*", "", lines[-1]).strip(" ,")
    show = "import platform; print(platform.python_version())"
    if torch != "none":
        show += "; import torch; print(torch.__version__)"
    versions = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.split()
    row = [*versions, *(["none", "unit"] if torch == "none" else ["unit, some behaviour"])]
    return done.returncode == 0, f"| {' | '.join([*row, summary, str(datetime.date.today())])} |"


def runs(versions: list[str], torches: list[str]) -> Iterator[tuple[bool, str]]:
    """Run everything, one after the other."""
    for version in versions:
        program = find(version)
        if program is None:
            yield True, f"| {version} | | | there is no such Python here | |"
        elif version == OWN and not torches:
            yield run(sys.executable, "own")
        else:
            for torch in torches or ["none"]:
                with tempfile.TemporaryDirectory() as folder:
                    yield run(make_environment(version, program, Path(folder, "environment"), torch), torch)


def main() -> int:
    """Run the tests and print the rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.pythons", description=__doc__)
    parser.add_argument("versions", nargs="*", default=PYTHONS, choices=PYTHONS, help="(default: all)")
    wanted = "install these versions of torch (default: that of this environment, and none for other Pythons)"
    parser.add_argument("--torch", nargs="+", default=[], choices=("oldest", "newest"), help=wanted)
    options = parser.parse_args()
    found = list(runs(list(options.versions), options.torch))
    print("\n| Python | torch | tests | result | on |\n| --- | --- | --- | --- | --- |")
    print("\n".join(row for _passed, row in found))
    return 0 if all(passed for passed, _row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
