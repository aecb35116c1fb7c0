"""The Containerfile in examples/container: what it says, and that its commands run as a container runs them.

No engine is needed. ``make lint`` has it looked at by hadolint.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rpcdataloader import launch, rpc_async
from rpcdataloader.client.client import close_client
from tests.conftest import READY_LINE, TIMEOUT_SCALE, is_running, occupied, wait_until

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples/container/Containerfile"
PORT = "6543"

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture
def stages(tmp_path):
    """The instructions of each stage, as pairs of instruction and value."""
    parser = pytest.importorskip("dockerfile_parse")
    # It wants a file of this name, which it opens for writing.
    (tmp_path / "Dockerfile").write_text(FILE.read_text())
    stages = []
    for each in parser.DockerfileParser(str(tmp_path)).structure:
        if each["instruction"] == "FROM":
            stages.append([])
        if each["instruction"] not in ("COMMENT", "ARG"):
            stages[-1].append((each["instruction"], each["value"]))
    return stages


@pytest.fixture
def last(stages):
    """Those of the image, by instruction; of several, the last one counts."""
    return dict(stages[-1])


def test_image_is_not_of_root_and_has_no_secret(stages, last):
    assert last["USER"] == "1000:1000"
    position = [instruction for instruction, _value in stages[-1]].index("USER")
    assert not {"RUN", "COPY", "USER"} & {instruction for instruction, _value in stages[-1][position + 1 :]}
    assert last["ENV"] == "RPCDATALOADER_TOKEN_FILE=/run/secrets/rpcdataloader"
    assert "token" not in last["ENTRYPOINT"] + last["HEALTHCHECK"]
    # Both stages run the same Python, of a named version.
    (base,) = {stage[0][1].partition(" ")[0] for stage in stages}
    assert re.fullmatch(r"python:3\.1[0-3]-slim-\w+", base)


def test_commands_need_no_shell_and_agree_about_the_port(last):
    words = json.loads(last["ENTRYPOINT"])
    assert words[:3] == ["python", "-m", "rpcdataloader.launch"]
    options = launch.make_parser().parse_args(words[3:])
    assert (options.host, options.port, last["EXPOSE"]) == ("0.0.0.0", PORT, PORT)
    assert health_check(last)[:3] == ["python", "-m", "rpcdataloader.status"]
    assert health_check(last)[-1] == f"127.0.0.1:{PORT}"


def health_check(last):
    _options, _cmd, words = last["HEALTHCHECK"].partition("CMD ")
    return json.loads(words)


def run_health_check(last, port):
    words = [word.replace(PORT, port) for word in health_check(last)[1:]]
    return subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True, timeout=30).returncode


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def num_zombies_of(pid):
    return sum(not is_running(child) for child in children_of(pid))


def test_server_is_healthy_while_it_serves_and_drains_as_process_1(last, tmp_path):
    """In a namespace of processes, where signals that process 1 does not handle do nothing."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces of processes are not allowed here")
    words = json.loads(last["ENTRYPOINT"])[1:]
    command = [*unshare, sys.executable, *words, "--port=0", "--advertise=127.0.0.1", "--num-workers=1"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            match = READY_LINE.fullmatch(process.stdout.readline())
            assert match, (tmp_path / "log").read_text()
            assert match[3] == "1"
            address, _, port = match[1].rpartition(":")
            assert run_health_check(last, port) == 0
            assert rpc_async(f"{address}:{port}", os.getppid).wait() > 1
            [server] = children_of(process.pid)
            # Nobody else collects orphans: programs that a worker leaves in the background while it stays, and workers
            # that end after their session.
            for _ in range(3):
                rpc_async(f"{address}:{port}", os.system, ("sleep 0.2 &",)).wait()
            wait_until(lambda: num_zombies_of(server), what="programs that have ended")
            wait_until(lambda: not num_zombies_of(server))
            rpc_async(f"{address}:{port}", os.getpid).wait()
            close_client()
            wait_until(lambda: not occupied(server) and not num_zombies_of(server))
            os.kill(server, signal.SIGTERM)
            assert process.wait(20 * TIMEOUT_SCALE) == 0, (tmp_path / "log").read_text()
            assert not is_running(server)
            assert run_health_check(last, port) == 1
        finally:
            process.kill()
