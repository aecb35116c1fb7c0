"""The systemd unit in examples/systemd: understood by systemd where there is one, and its command runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rpcdataloader import rpc_async
from tests.conftest import READY_LINE, TIMEOUT_SCALE, descendants, is_running, wait_until

FOLDER = Path(__file__).parents[2] / "examples/systemd"
UNIT = FOLDER / "rpcdataloader@.service"


def read_unit() -> dict[str, dict[str, str]]:
    sections: dict[str, dict[str, str]] = {}
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            assert name not in section
            section[name] = value
    return sections


def read_environment() -> dict[str, str]:
    lines = (FOLDER / "example.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_understands_the_unit(tmp_path):
    def complaints(text):
        (tmp_path / UNIT.name).write_text(text)
        verify = ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)]
        done = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=60)
        return [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]

    assert complaints(UNIT.read_text()) == []
    assert "Unknown key" in complaints(UNIT.read_text().replace("KillMode=", "KillMood="))[0]


def test_node_server_has_time_to_drain_before_what_is_left_is_killed():
    service = read_unit()["Service"]
    (grace,) = re.findall(r"--grace (\d+)", service["ExecStart"])
    assert int(grace) + 10 <= int(service["TimeoutStopSec"])
    assert service["KillMode"] == "mixed"


def test_lines_of_the_journal_bear_the_name_of_the_service():
    """Not that of the shell which becomes the interpreter."""
    assert read_unit()["Service"]["SyslogIdentifier"] == "%N"


@pytest.mark.usefixtures("clean_client")
def test_its_command_serves_and_drains(tmp_path):
    """Words are split as systemd does it: ``${NAME}`` is one, ``$NAME`` is as many as there are."""
    environment = read_environment()
    assert environment == {"PYTHON": "/usr/bin/python3", "OPTIONS": "--host 0.0.0.0 --port 6543"}
    python = tmp_path / "lr=0.1, bs=64" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"')
    python.chmod(0o700)
    environment |= {"PYTHON": str(python), "OPTIONS": "--host 127.0.0.1 --port 0 --num-workers 2"}
    words = []
    for word in shlex.split(read_unit()["Service"]["ExecStart"]):
        words += environment[word[1:]].split() if re.fullmatch(r"\$\w+", word) else [word]
    words = [re.sub(r"\$\{(\w+)\}", lambda match: environment[match[1]], word).replace("$$", "$") for word in words]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment}
        )
    with process.stdout:
        try:
            match = READY_LINE.fullmatch(process.stdout.readline())
            assert match, (tmp_path / "log").read_text()
            assert int(match[2]) == 2
            assert int(match[3]) == process.pid, "SIGTERM reaches the node server itself"
            assert rpc_async(match[1], os.getpid).wait() in descendants(process.pid)
            below = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20 * TIMEOUT_SCALE) == 0
            wait_until(lambda: not any(map(is_running, below)))
        finally:
            process.kill()
            process.wait()
