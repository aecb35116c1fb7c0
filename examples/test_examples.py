"""The examples, run as their docstrings say."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import TIMEOUT_SCALE
from tests.support.comparison import assert_same
from tests.support.quick import quick_server
from tests.support.zygote import Script, Zygote

EXAMPLES = Path(__file__).parent
ROOT = EXAMPLES.parent


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
    ended = script.wait(100 * TIMEOUT_SCALE)
    assert ended.status == 0, ended.errors
    return ended.output


def read_digits(output: str, epochs: int) -> tuple[str, float]:
    """The digest of the batches, and the accuracy."""
    *progress, digest, accuracy, _where, _waited, following = output.splitlines()
    assert [line.split()[:2] for line in progress] == [["epoch", str(number + 1)] for number in range(epochs)], output
    assert (ROOT / following.split()[1]).exists()
    return digest.split()[-1], float(accuracy.split()[-1])


def test_digits_are_learnt_from_the_same_batches_wherever_they_are_made(library_zygote, servers):
    scripts = [start_digits(library_zygote, *workers, epochs=3) for workers in ([], ["--workers", *servers])]
    local, remote = [read_digits(output_of(script), 3) for script in scripts]
    assert local[1] >= 0.95
    assert remote == local


def test_digits_in_two_training_processes_get_the_same_batches_wherever_they_are_made(library_zygote, servers):
    job = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True}
    results = []
    for options in ["--num-workers", 0], ["--workers", *servers]:
        # As torchrun does it: the processes meet at a store of their parent.
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job["MASTER_PORT"] = store.port
        ranks = [start_digits(library_zygote, *options, epochs=1, RANK=rank, **job) for rank in range(2)]
        results.append(read_digits(output_of(ranks[0]), 1))
        assert output_of(ranks[1]) == ""
    assert results[0] == results[1]


@pytest.mark.timeout(300)
def test_notebook_runs(library_zygote):
    cells = json.loads((EXAMPLES / "first_training.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    sizes, *epochs, diagnosis, killed, continued = output_of(
        library_zygote.start(source.replace("time.sleep(0.003)", "time.sleep(0.0003)"), ends_quickly=True)
    ).splitlines()
    assert sizes == "1437 360"
    assert [re.fullmatch(r"epoch (\d)  accuracy 0\.\d{4}", line)[1] for line in epochs] == ["1", "2", "3"]
    assert re.fullmatch(r"step .* waiting \(\d+ %\).*", diagnosis)
    # The other worker may have loaded all batches before the new one was ready.
    assert re.fullmatch(r"50 batches from [23] processes", killed)
    assert continued == "10 batches before, 35 after, 45 in an epoch"


def test_imagenet_shows_its_help_without_torchvision(library_zygote):
    run = f"runpy.run_path({str(EXAMPLES / 'imagenet.py')!r}, run_name='__main__')"
    source = f"import runpy, sys; assert 'torchvision' not in sys.modules; sys.modules['torchvision'] = None; {run}"
    output = output_of(library_zygote.start(source, "--help", ends_quickly=True))
    assert "torchrun" in output
    assert "--workers HOST:PORT" in output


def test_imagenet_normalises_bytes():
    normalise = runpy.run_path(str(EXAMPLES / "imagenet.py"))["normalise"]
    images = torch.randint(256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (images.permute(0, 2, 3, 1).numpy() / 255 - mean) / std
    np.testing.assert_allclose(normalise(images).permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)


STANDINS = ROOT / "tests" / "support" / "standins"

IMAGENET = """
import importlib.util, os, signal, sys
os.environ.update({env})
sys.path[:0] = {paths}
spec = importlib.util.spec_from_file_location("imagenet", {path!r})
imagenet = importlib.util.module_from_spec(spec)
spec.loader.exec_module(imagenet)
normalise, sizes = imagenet.normalise, []

def count_and_normalise(images):
    sizes.append(len(images))
    if len(sizes) == {stops_at}:
        os.kill(os.getpid(), signal.SIGUSR1)
    return normalise(images)

imagenet.normalise = count_and_normalise
imagenet.main()
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of images of two classes."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    for part, number in ("train", 24), ("val", 6):
        for k in range(number):
            path = folder / part / ("cat", "dog")[k % 2] / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.random.default_rng(k).integers(256, size=(60, 80, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture
def train(library_zygote, servers, images, tmp_path):
    def train(checkpoint, num_ranks, *, stops_at=0):
        """Train for two epochs, or on from the checkpoint, or until a batch of the last rank; gives the output.

        One process that stops has a pool of its own. The others use node servers. Those that stop are of srun, and
        others of torchrun.
        """
        workers = "local:2" if stops_at and num_ranks == 1 else ",".join(servers)
        env = {"OMP_NUM_THREADS": "1", "RPCDATALOADER_WORKERS": workers}
        paths = [str(ROOT)] if importlib.util.find_spec("torchvision") else [str(ROOT), str(STANDINS)]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
        options = {"epochs": 2, "batch-size": 2, "image-size": 32, "warmup-epochs": 1, "amp": "off"}
        words = [images, "--checkpoint", tmp_path / checkpoint]
        words += [f"--{name}={value}" for name, value in options.items()]
        rank_name, size_name = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS") if stops_at else ("RANK", "WORLD_SIZE")
        if num_ranks > 1:
            store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            env |= {size_name: str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        ranks = []
        for rank in range(num_ranks):
            source = IMAGENET.format(
                env={**env, rank_name: str(rank)}, paths=paths, path=str(EXAMPLES / "imagenet.py"),
                stops_at=stops_at if rank == num_ranks - 1 else 0,
            )  # fmt: skip
            ranks.append(library_zygote.start(source, *words, ends_quickly=True))
        for script in ranks:
            ended = script.wait(100 * TIMEOUT_SCALE)
            assert ended.status == (os.EX_TEMPFAIL if stops_at else 0), ended.errors
        return ranks[0].output

    return train


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_imagenet_that_is_told_to_stop_goes_on_as_if_nothing_had_happened(train, tmp_path, num_ranks):
    assert train("stopped.pt", num_ranks, stops_at=3) == ""
    shutil.copy(tmp_path / "stopped.pt", tmp_path / "other.pt")
    output = train("stopped.pt", num_ranks)
    assert re.fullmatch(r"(epoch +[12]  loss \d+\.\d{4}  .*within five guesses 1\.0000\n){2}", output), output
    if num_ranks > 1:
        assert train("other.pt", 1).count("\n") == 2
        return
    assert train("whole.pt", num_ranks).count("\n") == 2
    whole, stopped = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "stopped.pt"))
    assert whole["epoch"] == stopped["epoch"] == 2
    assert_same(dict(stopped["network"]), dict(whole["network"]))
