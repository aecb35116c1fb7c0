"""The examples, run as their docstrings say."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.integration.quick import quick_server
from tests.integration.zygote import Script, Zygote

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*command: object, path: Path | str = "") -> str:
    """Run a program to its end within a minute, also where the package is not installed; returns its standard output.

    Args:
        command: Program and arguments.
        path: A folder to import from before all others.
    """
    paths = os.pathsep.join(filter(None, [str(path), str(ROOT), os.environ.get("PYTHONPATH")]))
    # torchrun warns when it chooses the number of threads itself.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    words = [str(part) for part in command]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60 * TIMEOUT_SCALE)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Result(NamedTuple):
    digest: str
    accuracy: float


def run_digits(*options: object, start: tuple[str, ...] = PYTHON, epochs: int) -> Result:
    return read_digits(run(*start, EXAMPLES / "digits.py", "--epochs", epochs, "--digest", *options), epochs)


@pytest.fixture(scope="module")
def servers(library_zygote):
    """Addresses of two node servers."""
    with contextlib.ExitStack() as stack:
        options = ("--num-workers", "2", "--max-connections", "64")
        yield [stack.enter_context(quick_server(library_zygote, *options)).address for _ in range(2)]


def start_digits(zygote: Zygote, *options: object, epochs: int, **env: object) -> Script:
    """Start it where torch has been imported."""
    path, changed = str(EXAMPLES / "digits.py"), {name: str(value) for name, value in env.items()}
    source = f"import os; os.environ.update({changed!r}); exec(compile(open({path!r}).read(), {path!r}, 'exec'))"
    return zygote.start(source, "--epochs", epochs, "--digest", *options, ends_quickly=True)


def output_of(script: Script) -> str:
    ended = script.wait(100)
    assert ended.status == 0, ended.errors
    return ended.output


def read_digits(output: str, epochs: int) -> Result:
    *progress, digest, accuracy = output.splitlines()
    assert len(progress) == epochs, output
    for number, line in enumerate(progress, 1):
        match = re.fullmatch(
            r"epoch +(\d+)  loss \d+\.\d{4}  accuracy [01]\.\d{4}  +\d+ samples/s  waiting for data +\d+%", line
        )
        assert match, line
        assert int(match[1]) == number
    assert re.fullmatch(r"digest of the training batches: [0-9a-f]{64}", digest)
    assert re.fullmatch(r"test accuracy: [01]\.\d{4}", accuracy)
    return Result(digest.split()[-1], float(accuracy.split()[-1]))


@pytest.fixture(scope="module")
def trainings(servers):
    """Those whose programs start by themselves, both at the same time: most of it is imports, one after the other."""
    with ThreadPoolExecutor() as pool:
        alone = pool.submit(run_digits, epochs=6)
        yield alone, pool.submit(run_digits, "--workers", *servers, start=TORCHRUN, epochs=1)


def test_digits_are_learnt_within_a_minute_and_from_the_same_batches_wherever_they_are_made(
    library_zygote, servers, trainings
):
    remote = start_digits(library_zygote, "--workers", *servers, epochs=6)
    embedded = trainings[0].result()
    # As good as after the 20 epochs of the default, but for some images.
    assert embedded.accuracy >= 0.97
    assert read_digits(output_of(remote), 6) == embedded


def test_digits_in_two_training_processes_get_the_same_batches_wherever_they_are_made(library_zygote, trainings):
    # As torchrun does it: the processes meet at a store of their parent.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    embedded = [start_digits(library_zygote, epochs=1, RANK=rank, **job) for rank in range(2)]
    remote = trainings[1].result()
    assert read_digits(output_of(embedded[0]), 1) == remote
    assert output_of(embedded[1]) == ""


@pytest.mark.slow  # the tests on Slurm do the same
def test_digits_that_are_told_to_stop_go_on_with_the_next_batch(zygote, shared_server, tmp_path):
    workers = ("--workers", shared_server.address)
    checkpoint = tmp_path / "checkpoint.pt"
    whole = output_of(start_digits(zygote, *workers, epochs=10))
    first = start_digits(zygote, *workers, "--checkpoint", checkpoint, epochs=10)
    wait_until(lambda: "epoch  1" in first.output, 60, "an epoch")
    os.kill(first.pid, signal.SIGUSR1)
    assert first.wait(60).status == os.EX_TEMPFAIL
    saved = torch.load(checkpoint, weights_only=True)
    assert 23 < saved["schedule"]["last_epoch"] < 10 * 23  # batches
    rest = output_of(start_digits(zygote, *workers, "--checkpoint", checkpoint, epochs=10))
    assert rest.splitlines()[-2:] == whole.splitlines()[-2:]  # the checksum of all batches, and the accuracy


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_imagenet_shows_its_help_without_torchvision(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise ImportError('not for --help')")
    output = run(*PYTHON, EXAMPLES / "imagenet.py", "--help", path=tmp_path)
    assert "torchrun" in output
    assert "--workers HOST:PORT" in output


def test_imagenet_parses_its_arguments(capsys):
    parse = load_example("imagenet").parse_arguments
    defaults = parse(["/data"])
    assert (defaults.data, defaults.workers, defaults.epochs, defaults.amp) == ("/data", None, 90, "bfloat16")
    given = parse(["/data", "--workers", "node01:6543", "[::1]:6543", "--lr", "0.2", "--amp", "off"])
    assert (given.workers, given.lr, given.amp) == (["node01:6543", "[::1]:6543"], 0.2, "off")
    for wrong in ([], ["/data", "--amp", "float8"], ["/data", "--epochs", "many"], ["/data", "--workers"]):
        with pytest.raises(SystemExit):
            parse(wrong)
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "rank"),
    [({}, 0), ({"SLURM_PROCID": "3"}, 3), ({"RANK": "1"}, 1), ({"RANK": "1", "SLURM_PROCID": "3"}, 1)],
)
def test_imagenet_runs_under_torchrun_and_under_srun(environ, rank, monkeypatch):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert load_example("imagenet").read_environment("RANK", "SLURM_PROCID", default=0) == rank


def test_imagenet_normalises_bytes():
    imagenet = load_example("imagenet")
    images = torch.randint(256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (images.permute(0, 2, 3, 1).numpy() / 255 - mean) / std
    np.testing.assert_allclose(imagenet.normalise(images).permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("start", [PYTHON, TORCHRUN], ids=["alone", "torchrun"])
def test_imagenet_trains_for_an_epoch(start, tmp_path):
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    from PIL import Image

    random = np.random.default_rng(0)
    for part, number in ("train", 6), ("val", 3):
        for label in "cat", "dog":
            folder = tmp_path / part / label
            folder.mkdir(parents=True)
            for k in range(number):
                pixels = random.integers(256, size=(80, 100, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{k}.jpg")
    checkpoint = tmp_path / "checkpoint.pt"
    options = ("--epochs", 1, "--batch-size", 4, "--image-size", 64, "--checkpoint", checkpoint)
    output = run(*start, EXAMPLES / "imagenet.py", tmp_path, *options)
    assert re.fullmatch(r"epoch +1  loss \d+\.\d{4}  .*within five guesses 1\.0000\n", output)
    assert checkpoint.stat().st_size > 2**20
