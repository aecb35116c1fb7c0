"""The job scripts in ``slurm``, on a real Slurm: what they train, and how they end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.platform.slurm import testbed
from tests.platform.slurm.testbed import ROOT, Job, Testbed, become, wait_until

NO_SLURM = testbed.why_not()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(NO_SLURM is not None, reason=f"no Slurm here: {NO_SLURM}")]

DIGITS = f"{ROOT}/examples/digits.py"
TRAINING = f"python {DIGITS} --epochs 36 --digest --checkpoint digits.pt"
# Trainers for what has nothing to do with training.
WAIT = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
names = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'CUDA_VISIBLE_DEVICES'
print('waiting', *(os.environ[name] for name in names))
signal.pause()
"""
IDLE = f'python -uc "{WAIT}"'


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    bed = Testbed(tmp_path_factory.mktemp("home"))
    yield bed
    bed.close()


def edit(name: str, train: str = TRAINING, nodes: int = 2) -> str:
    """A script as somebody with a small cluster would edit it."""
    text = (ROOT / "slurm" / name).read_text()
    trainers, servers = "train=(" in text, "rpcdataloader.launch" in text
    for is_there, old, new in [
        (trainers, "per-node=4 --gpus-per-node=4 --cpus-per-task=4", "per-node=2 --gpus-per-node=2 --cpus-per-task=1"),
        (trainers, "train=(python train.py)", f"train=({train})"),
        (servers, "--nodes=2 --ntasks-per-node=1 --cpus-per-task=32", f"--nodes={nodes} --ntasks-per-node=1 -c 4"),
        (servers, "rpcdataloader.launch", "rpcdataloader.launch --num-workers 4"),  # there may be fewer CPUs
    ]:
        assert text.count(old) == is_there, old
        text = text.replace(old, new)
    return text


def result(job: Job) -> list[str]:
    """The lines with the checksum of all batches, and with the accuracy."""
    lines = re.findall(r"^digest .*|^test accuracy.*", job.output, re.MULTILINE)
    assert len(lines) == 2, job.output
    return lines


def check_nothing_is_left(job: Job) -> None:
    wait_until(lambda: not list(job.folder.glob(".pool-*")), 20, "the register and its secret are left")
    assert not list(job.folder.glob(".again-*"))
    wait_until(lambda: not job.processes(), 20, "processes of a job that has ended")


@pytest.fixture(scope="module")
def whole(bed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What an undisturbed job prints, while a worker of another one on the same nodes is killed."""
    folder = tmp_path_factory.mktemp("jobs")
    calm, disturbed = (bed.submit(folder / name, edit("train.sbatch")) for name in ("calm", "disturbed"))
    disturbed.wait_for("epoch  1")

    def has_missed_one() -> bool:
        if "another worker starts there" in disturbed.output:
            return True
        disturbed.kill_worker()  # which nobody misses if it had answered the last batch of an epoch
        return False

    wait_until(has_missed_one, 30, "a worker that is missed")
    for job in calm, disturbed:
        assert job.wait() == "COMPLETED 0:0", job.output
        check_nothing_is_left(job)
    assert result(calm) == result(disturbed)
    return result(calm)


def test_two_jobs_on_the_same_nodes_train_the_same_and_one_survives_the_death_of_a_worker(whole):
    assert whole[0].startswith("digest of the training batches: ")


def test_told_to_stop_a_job_saves_is_requeued_and_goes_on_with_the_next_batch(bed, whole, tmp_path):
    job = bed.submit(tmp_path, edit("train.sbatch"))
    job.wait_for("epoch  1")
    with job.paused(DIGITS) as trainers:
        # As Slurm does before the time limit.
        bed.run("scancel", "--batch", "--signal=USR1", str(job.id))
        wait_until(lambda: all(has_pending(pid, signal.SIGUSR1) for pid in trainers), 20, "the signal for the trainers")
    wait_until(lambda: job.is_requeued, 60, "the job is requeued")
    check_nothing_is_left(job)
    assert "epoch 36" not in job.output
    # Slurm would let it wait for two minutes. Not "now": a node refuses to start a job in the second, as its clock
    # counts them, in which it was told to end it ("Job credential revoked"), and that fails the job.
    bed.run("scontrol", "update", f"JobId={job.id}", "StartTime=now+2")
    assert job.wait() == "COMPLETED 0:0", job.output
    assert result(job) == whole
    assert len(re.findall("^epoch  1", job.output, re.MULTILINE)) == 1, "it began again"


def has_pending(pid: int, number: signal.Signals) -> bool:
    masks = re.findall(r"^S[hi][dg]Pnd:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


@pytest.fixture(scope="module")
def ending(bed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Jobs that are about to end in different ways; they start together, which saves time."""
    folder = tmp_path_factory.mktemp("ending")
    endless = edit("train.sbatch", TRAINING.replace("--epochs 36", "--epochs 1000"))
    scripts = {"late": edit("train.sbatch", IDLE, nodes=1), "killed": endless, "cancelled": endless}
    return {name: bed.submit(folder / name, script) for name, script in scripts.items()}


def test_death_of_a_trainer_ends_the_job_and_fails_it(ending):
    job = ending["killed"]
    job.wait_for("epoch  1")
    os.kill(job.processes(DIGITS)[0], signal.SIGKILL)
    # That of the signal; or, if it is higher, that with which srun has ended the others.
    assert job.wait() in ("FAILED 137:0", "FAILED 143:0"), job.output
    check_nothing_is_left(job)


def test_scancel_ends_everything(bed, ending):
    job = ending["cancelled"]
    job.wait_for("epoch  1")
    bed.run("scancel", str(job.id))
    assert job.wait().startswith("CANCELLED")
    check_nothing_is_left(job)


def test_before_its_time_limit_a_job_is_told_to_stop_and_requeued(bed, ending):
    job = ending["late"]
    for rank in "01":
        job.wait_for(f"waiting {rank} 2 {rank} gpu1 ")
        assert re.search(r"gpu1 \d,\d$", job.output, re.MULTILINE), "each sees all GPUs of the node"
    bed.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=2")  # and two minutes before, it is told
    wait_until(lambda: job.is_requeued, 100, "the job is requeued")
    check_nothing_is_left(job)
    bed.run("scancel", str(job.id))


def test_pool_of_its_own_grows_shrinks_and_refuses_others_while_training_goes_on(bed, whole, tmp_path):
    pool = tmp_path / "pool"
    first = bed.submit(tmp_path, edit("separate/workers.sbatch", nodes=1), POOL=str(pool))
    job = bed.submit(tmp_path, edit("separate/train.sbatch"), POOL=str(pool))
    job.wait_for("epoch  1")
    with job.paused(DIGITS):
        second = bed.submit(tmp_path, edit("separate/workers.sbatch", nodes=1), POOL=str(pool))
        second.wait_for("rpcdataloader ready")
        bed.run("scancel", str(first.id))
        assert first.wait().startswith("CANCELLED")
        assert "drain" in first.output

        address = re.search(r"ready (\S+)", second.output)[1]
        assert "AuthenticationError" in ask_as_another_user(bed, address)
        assert "] refused " in second.output
    assert job.wait() == "COMPLETED 0:0", job.output
    assert result(job) == whole
    assert second.state.startswith("RUNNING")
    bed.run("scancel", str(second.id))
    assert second.wait().startswith("CANCELLED")
    for each in first, second, job:
        check_nothing_is_left(each)
    assert not list(pool.iterdir())


NOBODY = 65534


def ask_as_another_user(bed: Testbed, address: str) -> str:
    """What a job of another user prints that calls a function on somebody's node server."""
    folder = bed.state / "stranger"
    folder.mkdir()
    command = [*become(NOBODY), "sh", "-c", f"{shlex.quote(sys.executable)} -c 'open(\"{ROOT}/README.md\")'"]
    # Where only root can read Python or the package, it is the user of another home, and so of another secret.
    user = 0 if subprocess.run(command, capture_output=True).returncode else NOBODY
    os.chown(folder, user, user)
    call = f"from rpcdataloader import rpc_async; rpc_async('{address}', print).wait()"
    script = f'#!/bin/bash\nexec python -c "{call}"\n'
    job = bed.submit(folder, script, user=user, HOME=str(folder))
    assert job.wait() == "FAILED 1:0", job.output
    return job.output


def test_job_says_so_when_all_node_servers_have_ended(bed, tmp_path):
    job = bed.submit(tmp_path, edit("train.sbatch", IDLE, nodes=1))
    job.wait_for("waiting")
    (server,) = job.servers()
    os.kill(server, signal.SIGKILL)
    assert job.wait() == "FAILED 1:0"
    assert f"all node servers have ended: see workers-{job.id}.log" in job.output
    check_nothing_is_left(job)


def test_training_goes_on_when_a_node_is_lost(bed, whole, tmp_path):
    one_job = bed.submit(tmp_path / "one", edit("train.sbatch", IDLE))
    pool = tmp_path / "pool"
    workers = bed.submit(tmp_path, edit("separate/workers.sbatch"), POOL=str(pool))
    job = bed.submit(tmp_path, edit("separate/train.sbatch"), POOL=str(pool))
    one_job.wait_for("waiting")
    job.wait_for("epoch  1")
    bed.kill_node("cpu2")
    assert job.wait() == "COMPLETED 0:0", job.output
    assert result(job) == whole
    wait_until(lambda: bed.run("sinfo", "-hNo", "%T", "-n", "cpu2").startswith("down"), 60, "Slurm gives the node up")
    wait_until(lambda: one_job.is_requeued, 20, "a job is requeued")
    check_nothing_is_left(one_job)
    assert workers.state.startswith("RUNNING")
    assert " NodeList=cpu1 " in workers.show()[0]
