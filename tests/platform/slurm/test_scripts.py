"""What the job scripts in ``slurm`` give to ``srun``, as clusters are set up: without a Slurm."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from tests.platform.slurm.testbed import ROOT

# The servers of a job with both components stay until the script ends them, as its trainers do until they are there.
SRUN = """
import json, os, sys, time
while "--het-group=0" in sys.argv and not os.path.exists("seen"):
    time.sleep(0.01)
with open("seen", "a") as file:
    print(json.dumps([sys.argv[1:], dict(os.environ)]), file=file)
time.sleep(60 * ("--het-group=1" in sys.argv))
sys.exit(1)
"""

CPUS = {"SLURM_CPUS_PER_TASK": "7", "SLURM_CPUS_PER_TASK_HET_GROUP_0": "7", "SLURM_CPUS_PER_TASK_HET_GROUP_1": "7"}


@pytest.mark.parametrize("folder", ["project", "lr=0.1, bs=64"])
@pytest.mark.parametrize("cpus", [CPUS, {}], ids=["--cpus-per-task", "--exclusive"])
@pytest.mark.parametrize("export", [{}, {"SLURM_EXPORT_ENV": "NONE"}], ids=["", "--export=NONE"])
@pytest.mark.parametrize("script", ["train.sbatch", "separate/train.sbatch", "separate/workers.sbatch"])
def test_steps_get_the_cpus_and_the_environment_of_their_job(tmp_path, script, export, cpus, folder):
    srun, here = tmp_path / "bin" / "srun", tmp_path / folder
    srun.parent.mkdir()
    here.mkdir()
    srun.with_suffix(".py").write_text(SRUN)
    srun.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$0.py" "$@"\n')
    srun.chmod(0o700)
    environ = {"PATH": f"{srun.parent}:{os.environ['PATH']}", "HOME": str(here), "SLURM_JOB_ID": "4711"}
    environ |= {"SLURM_JOB_NUM_NODES_HET_GROUP_1": "0", "SLURMD_NODENAME": "node07", **export, **cpus}
    done = subprocess.run(
        ["bash", ROOT / "slurm" / script],
        cwd=here,
        env=environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "")
    steps = [json.loads(line) for line in (here / "seen").read_text().splitlines()]
    assert len(steps) == (2 if script == "train.sbatch" else 1)
    for words, passed in steps:
        assert [word for word in words if word.startswith("--cpus")] == (["--cpus-per-task=7"] if cpus else [])
        assert passed["SLURM_EXPORT_ENV"] == "ALL"
        assert "" not in words
        if script != "separate/workers.sbatch":
            assert passed["RPCDATALOADER_WORKERS"].startswith(f"@{here}/")
