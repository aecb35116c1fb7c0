"""The job scripts in ``slurm``, on a real Slurm: what they train, and how they end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.slurm import testbed
from tests.slurm.testbed import ROOT, Job, Testbed

NO_SLURM = testbed.why_not()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(NO_SLURM is not None, reason=f"no Slurm here: {NO_SLURM}")]

DIGITS = f"python {ROOT}/examples/digits.py --epochs 8 --digest --checkpoint digits.pt"
# Trainers that save nothing and train nothing, for what has nothing to do with training.
IDLE = 'python -c "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); print(1); signal.pause()"'


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    bed = Testbed(tmp_path_factory.mktemp("jobs"))
    yield bed
    bed.close()


def edit(name: str, train: str = DIGITS, **more: str) -> str:
    """A script as a user would edit it, for a small cluster."""
    text = (ROOT / "slurm" / name).read_text()
    changes = {
        "--ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=4": "--ntasks-per-node=2 --gpus-per-node=1 --cpus-per-task=1",
        "--cpus-per-task=32": "--cpus-per-task=4",
        "rpcdataloader.launch": "rpcdataloader.launch --num-workers 4",
        "train=(python train.py)": f"train=({train})",
        **more,
    }
    for old, new in changes.items():
        assert text.count(old) <= 1, old
        text = text.replace(old, new)
    return text


def result(job: Job) -> list[str]:
    """The lines with the checksum of the batches, and with the accuracy."""
    lines = re.findall(r"^digest .*|^test accuracy.*", job.output, re.MULTILINE)
    assert len(lines) == 2, job.output
    return lines


def check_nothing_is_left(job: Job) -> None:
    assert not list(job.folder.glob(".pool-*")), "the register and its secret are left"
    wait_until(lambda: not job.processes("-m"), 20, "processes of a job that has ended")


@pytest.fixture(scope="module")
def reference(bed: Testbed) -> list[str]:
    """What an undisturbed job prints, while a worker of another one on the same nodes is killed."""
    jobs = [bed.submit(name, edit("train.sbatch")) for name in ("calm", "disturbed")]
    jobs[1].wait_for("epoch  1")
    worker = next(jobs[1].workers())
    os.kill(worker, signal.SIGKILL)
    for job in jobs:
        assert job.wait() == "COMPLETED 0:0", job.output
        check_nothing_is_left(job)
    log = (jobs[1].folder / f"workers-{jobs[1].id}.log").read_text()
    assert "SIGKILL" in log
    assert result(jobs[0]) == result(jobs[1])
    return result(jobs[0])


def test_two_jobs_on_the_same_nodes_train_and_one_survives_the_death_of_a_worker(reference):
    assert "digest of the training batches" in reference[0]
