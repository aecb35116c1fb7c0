"""Pools on real clusters of Ray and of Dask: ``make test-engines``.

A cluster, and each training, is a process of its own. With Ray, all of them are in a network of their own: it takes
every machine for the one with the first address that it finds, and joins clusters that it finds there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_SCALE, is_running, wait_until
from tests.support.network import Network, why_not

ROOT = Path(__file__).parents[3]

# Seconds for a training. It is no more than a deadline: machines may have two busy cores.
LIMIT = 200.0 * TIMEOUT_SCALE

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("ray", "distributed"))), reason="make test-engines installs Ray and Dask"
    ),
]


class Cluster:
    """A cluster, and what is run on it."""

    def __init__(self, engine, folder):
        self.engine = engine
        self.network = None
        if engine == "ray":
            if problem := why_not():
                pytest.skip(problem)
            self.network = Network()
            self.network.add()  # an address that is not the loopback's
            self.network.trainer.run("ip", "route", "add", "default", "via", "10.0.1.2")
        # Where the engines write; short, for Ray has sockets there.
        self._temporary = tempfile.TemporaryDirectory(prefix="rpcdl-")
        self._environment = {
            **os.environ,
            "HOME": str(folder),  # Ray writes a secret of its own there
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_TMPDIR": self._temporary.name,
            "RAY_raylet_start_wait_time_s": "180",  # of a machine that is busy
            "RAY_prestart_worker_first_driver": "0",  # processes for every CPU, with every training
            "DASK_TEMPORARY_DIRECTORY": self._temporary.name,
            "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "error",
        }
        for name in "RPCDATALOADER_TOKEN_FILE", "RPCDATALOADER_CONNECT_TIMEOUT":
            del self._environment[name]  # pools have secrets of their own
        self._log = open(folder / "log", "w+")  # noqa: SIM115  # open until the end
        self.process = self._start({}, "-m", "tests.platform.engines.cluster", engine, "4" if engine == "dask" else "3")
        self._address = self.process.stdout.readline().strip()
        assert self._address, self.log

    @property
    def log(self):
        self._log.seek(0)
        return self._log.read()[-5000:]

    def _start(self, environment, *words):
        options = {
            "env": {**self._environment, **environment},
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self._log,
            "text": True,
            "cwd": ROOT,
        }
        with self.network.trainer.entered() if self.network else contextlib.nullcontext():
            return subprocess.Popen([sys.executable, *words], **options)

    @contextlib.contextmanager
    def start(self, *words, **environment):
        """A training, which ends with the block."""
        with self._start(environment, *words) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise

    def training(self, name):
        """Start a training of the module of that name."""
        return self.start("-m", "tests.platform.engines.trainings", name, self.engine, self._address)

    def result(self, process):
        """The last line that it prints."""
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, self.log
        return output.splitlines()[-1]

    def run(self, name):
        """The result of a training."""
        with self.training(name) as process:
            return json.loads(self.result(process))

    def example(self):
        address = {"RAY_ADDRESS": self._address} if self.engine == "ray" else {}
        with self.start("examples/pools.py", self.engine, **address) as process:
            return self.result(process)

    def add_node(self):
        print(file=self.process.stdin, flush=True)

    def close(self):
        self.process.communicate(timeout=LIMIT)
        self._log.close()
        self._temporary.cleanup()
        if self.network is not None:
            self.network.close()


@pytest.fixture(scope="module", params=["dask", "ray"])
def cluster(request, tmp_path_factory):
    found = Cluster(request.param, tmp_path_factory.mktemp("home"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def loss():
    """What the example prints with workers on this machine."""
    command = [sys.executable, "examples/pools.py", "local"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def test_pool_that_does_not_come_to_be_says_why(cluster):
    refused, too_large = cluster.run("fail")
    assert refused.startswith("ConnectError: 0 of 1 node servers of the pool are ready: a node server has ended with ")
    assert refused.endswith("unrecognized arguments: --no-such-option")
    assert "no more came within 1 s" in too_large


def test_ranks_inside_of_the_engine_share_a_pool(cluster):
    first, second = cluster.run("ranks")
    assert first["indices"] == [*range(0, 400, 2)]
    assert second["indices"] == [*range(1, 400, 2)]
    assert first["servers"] == second["servers"]
    assert len(first["servers"]) == len(first["workers"]) == len(second["workers"]) == 2
    assert set(first["workers"]).isdisjoint(second["workers"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_trainer_ends(cluster, number):
    with cluster.training("end") as process:
        servers = json.loads(process.stdout.readline())
        assert len(servers) == 2
        assert all(map(is_running, servers))
        process.send_signal(number)
        process.communicate(timeout=LIMIT)
    if number == signal.SIGKILL:
        wait_until(lambda: not any(map(is_running, servers)), 30)
    assert not any(map(is_running, servers)), "it has waited for them"


def test_script_loads_the_same_wherever_the_workers_are(cluster, loss):
    assert cluster.example() == loss


def test_node_that_is_lost_in_an_epoch_is_replaced(cluster):
    found = cluster.run("lose_node")
    sys.stdout.write(f"{cluster.engine}: {found}\n")  # for docs/pools.md
    assert found["same"]
    assert found["longest wait"] < 30 * TIMEOUT_SCALE
    assert found["addresses"] == [2, 2, 1]
    assert not found["secret shown"]
    assert found["statuses"] == [0, 2]


def test_pool_follows_what_a_loop_wants(cluster):
    found = cluster.run("follow")
    sys.stdout.write(f"{cluster.engine}: {found}\n")  # for docs/pools.md
    assert found["same"]
    assert found["seconds"] < 60 * TIMEOUT_SCALE


def test_pool_takes_a_node_that_comes_in_an_epoch(cluster):
    if cluster.engine == "dask":
        pytest.skip("there are more nodes from the beginning")
    cluster.add_node()  # in the place of the one that was lost
    with cluster.training("grow") as process:
        assert process.stdout.readline() == "grow\n", cluster.log
        cluster.add_node()
        assert json.loads(cluster.result(process)) == 8
