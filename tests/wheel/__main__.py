"""``make dist``: build sdist and wheel, and use the wheel as pages say, in an environment that has only that.

The wheel is built from the sdist, which so is known to be complete. The dependencies are those of the environment that
runs this, seen through a ``.pth`` file, as torch takes minutes to install.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import READY_LINE

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def build(folder: Path) -> Path:
    """Build both into ``dist``, and run some tests of the sdist in its own folder; returns the wheel."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    hatch = [sys.executable, "-m", "hatchling", "build", "--directory", str(ROOT / "dist"), "--target"]
    subprocess.run([*hatch, "sdist"], cwd=ROOT, check=True)
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    subprocess.run([*hatch, "wheel"], cwd=source, check=True)
    tests = ["tests/unit/wire", "tests/unit/test_design_pages.py", "tests/behaviour/test_rpc.py"]
    subprocess.run([sys.executable, "-m", "pytest", "--quiet", *tests], cwd=source, check=True)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into a new environment; returns the folder of its programs."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages") and path != str(ROOT)]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    return python.parent


def run(command: list[str], folder: Path, **env: str) -> str:
    """Run a program; returns what it prints."""
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def train(python: str, folder: Path, **env: str) -> str:
    """Train for an epoch; returns the line with its accuracy."""
    printed = run([python, "train.py", "1"], folder, **env)
    (line,) = re.findall(r"^epoch 1  accuracy 0\.\d{4}$", printed, re.MULTILINE)
    return line


@contextmanager
def node_server(programs: Path, folder: Path) -> Iterator[str]:
    """A node server, from the installed command; gives its address. Its secret is that of this environment."""
    command = [str(programs / "rpcdataloader"), "launch", "--port", "0", "--num-workers", "2", "--log-level", "warning"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = READY_LINE.fullmatch(process.stdout.readline())
            assert match
            yield match[1]
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def main() -> None:
    """Build, install and try."""
    os.environ.pop("PYTHONPATH", None)  # nothing of this checkout is in the path of what runs
    os.environ["RPCDATALOADER_TOKEN"] = os.urandom(16).hex()
    with tempfile.TemporaryDirectory() as name:
        source, environment, folder = (Path(name, part) for part in ("source", "environment", "script"))
        source.mkdir()
        folder.mkdir()
        programs = install(build(source), environment)
        python = str(programs / "python")
        found = run([python, "-c", "import rpcdataloader; print(rpcdataloader.__file__)"], folder)
        assert found.startswith(str(environment)), f"the package comes from {found}"
        run([python, "-c", "from rpcdataloader.status.serving import make_page; make_page()"], folder)
        for page in ("first-training.md", "datasets.md"):
            for file, text in FILE.findall((ROOT / "docs" / page).read_text()):
                (folder / file).write_text(text)
        here = train(python, folder, RPCDATALOADER_WORKERS="local:2")
        with node_server(programs, folder) as address:
            there = train(python, folder, RPCDATALOADER_WORKERS=address)
            run([python, "-m", "rpcdataloader.check", "photos:Photos", "--workers", address], folder)
        assert here == there, f"{here} on this machine, and {there} from a node server"


if __name__ == "__main__":
    main()
