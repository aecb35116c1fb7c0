"""``python -m rpcdataloader.ssh``: node servers on other hosts, of which nothing is left, however their starter ends.

``ssh`` is a stand-in on the path. Like the real one, together with the sshd of the other side, it gives the command a
session and a standard input of its own, and nothing of the environment that matters here.
"""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rpcdataloader import RPCDataloader, rpc_async
from tests.conftest import TIMEOUT_SCALE, descendants, is_running, wait_until
from tests.support.clocks import in_server
from tests.support.datasets import Numbers, node_server

ROOT = Path(__file__).parents[2]

# The first line of a script that names an interpreter takes no path with blanks, nor a long one.
SSH = """#!/bin/sh
exec {python} -S "$0.py" "$@"
"""

SSH_PY = """import os, socket, subprocess, sys, threading

*_options, host, command = sys.argv[1:]
folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.path.join(folder, "commands"), "a") as file:
    print(host, command, file=file)
env = {name: value for name, value in os.environ.items() if not name.startswith("RPCDATALOADER_")}
env["XDG_CONFIG_HOME"] = "/nonexistent"
ours, theirs = socket.socketpair()
process = subprocess.Popen(["sh", "-c", command], stdin=theirs, start_new_session=True, env=env)
theirs.close()

def carry():
    while data := os.read(0, 4096):
        ours.sendall(data)
    ours.shutdown(socket.SHUT_WR)

threading.Thread(target=carry, daemon=True).start()
os._exit(process.wait())
"""

# Stands for the interpreter of a host, where it runs the node server: without the seconds that torch takes.
PYTHON = """#!/bin/sh
echo "a message of the day"
read secret
echo $$ "$secret" > {folder}/server-$$
case "$*" in *bad*) echo "cannot listen" >&2; exit 3;; esac
strange() {{ echo "rpcdataloader ready stranger.example:$1 num_workers=64 pid=1"; }}  # the words of a peer in the log
strange 1 >&2
echo "rpcdataloader ready 127.0.0.1:$$ num_workers=2 pid=$$"
strange 2 >&2
strange 3
cat > {folder}/beats-$$
echo "draining" >&2
case "$*" in *slow*) cat {folder}/fifo;; esac
"""


class Starter:
    """``python -m rpcdataloader.ssh`` at a terminal."""

    def __init__(self, folder: Path, *options: str, before: str = "pass") -> None:
        self._folder = folder
        self._output = folder / "output"
        self._errors = folder / "errors"
        self.terminal, terminal = pty.openpty()
        take_terminal = "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
        # Whoever runs the tests may have left the terminal behind.
        heed = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"
        run = f"{take_terminal}; {heed}; from rpcdataloader import ssh, starter; {before}; sys.exit(ssh.main())"
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", run, str(folder / "hosts"), *options],
                stdin=terminal,
                stdout=output,
                stderr=errors,
                env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
                cwd=folder,
                start_new_session=True,
            )
        os.close(terminal)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def workers(self) -> str:
        """Wait until all servers are ready; gives what to set RPCDATALOADER_WORKERS to."""
        wait_until(lambda: "\n" in self.output or self.process.poll() is not None, 30, "ready servers")
        name, _, value = self.output.partition("=")
        assert name == "RPCDATALOADER_WORKERS", self.errors
        assert value.count("\n") == 1
        return value.strip()

    def connection_to(self, host: str) -> int:
        """The ssh process of a host."""
        (found,) = [pid for pid in descendants(self.process.pid) if f"\0{host}\0exec ".encode() in command_line_of(pid)]
        return found

    def servers(self) -> dict[int, str]:
        """Process ids of the servers that have been started, each with its secret."""
        found = {}
        for path in self._folder.glob("server-*"):
            pid, _, secret = path.read_text().strip().partition(" ")
            found[int(pid)] = secret
        return found

    def press_ctrl_c(self) -> None:
        os.write(self.terminal, b"\x03")

    def wait(self) -> int:
        return self.process.wait(30 * TIMEOUT_SCALE)

    def close_terminal(self) -> None:
        if self.terminal >= 0:
            os.close(self.terminal)
            self.terminal = -1


@pytest.fixture
def start(tmp_path):
    """Start node servers on hosts, each a line of the host file; stand-ins unless ``python`` is another one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh.py").write_text(SSH_PY)
    ssh = SSH.format(python=shlex.quote(sys.executable))
    for name, text in ("ssh", ssh), ("python", PYTHON.format(folder=shlex.quote(str(tmp_path)))):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o700)
    os.mkfifo(tmp_path / "fifo")
    with contextlib.ExitStack() as stack:

        def start(*hosts, python=str(tmp_path / "bin" / "python"), options=(), **more):
            (tmp_path / "hosts").write_text("\n".join(hosts))
            starter = Starter(tmp_path, "--python", python, *options, **more)
            stack.callback(starter.process.wait)
            stack.callback(starter.process.kill)
            stack.callback(starter.close_terminal)
            return starter

        yield start


@pytest.mark.usefixtures("clean_client")
def test_training_goes_on_without_a_host_that_is_lost_and_ctrl_c_ends_the_others(start):
    hosts = [f"node{number} --host 127.0.0.1" for number in (1, 2)]
    starter = start(*hosts, python=sys.executable, options=("--", "--num-workers", "1"))
    workers = starter.workers()
    servers = [rpc_async(address, node_server).wait() for address in workers.split(",")]
    batches = iter(RPCDataloader(Numbers(800), batch_size=4, workers=workers))
    received = [next(batches)]
    os.kill(starter.connection_to("node2"), signal.SIGKILL)
    received += batches
    assert torch.equal(torch.cat(received), torch.arange(800))
    wait_until(lambda: "[node2] the node server or its connection has ended" in starter.errors)
    wait_until(lambda: sum(map(is_running, servers)) == 1, 30)
    starter.press_ctrl_c()
    assert starter.wait() == 0
    assert not any(map(is_running, servers))
    assert "[node1] " in starter.errors
    assert "draining" in starter.errors


def command_line_of(pid):
    """Empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_secret_goes_through_the_connection_and_is_in_no_command_line(start, tmp_path, token_file):
    starter = start("node1", "me@node2 --num-workers 3", options=("--", "--port", "7000"))
    secret = token_file.read_text().strip()
    addresses = starter.workers().split(",")
    assert starter.servers() == {int(address.rpartition(":")[2]): secret for address in addresses}
    wait_until(lambda: starter.errors.count("a message of the day") == 2)
    commands = (tmp_path / "commands").read_text().splitlines()
    assert sorted(command.split()[0] for command in commands) == ["me@node2", "node1"]
    assert sum(command.endswith(" --port 7000 --num-workers 3") for command in commands) == 1
    for pid in [starter.process.pid, *descendants(starter.process.pid)]:
        assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
        assert secret not in Path(f"/proc/{pid}/environ").read_text()


def test_address_is_in_the_ready_line_of_standard_output_and_nowhere_else(start):
    starter = start("node1", "node2")
    assert len(starter.workers().split(",")) == 2
    wait_until(lambda: starter.errors.count("] rpcdataloader ready stranger.example") == 6)
    assert "stranger" not in starter.output
    assert starter.errors.count("] ready: 127.0.0.1:") == 2


def test_servers_are_told_that_the_starter_is_there_from_the_beginning_and_again(start, tmp_path):
    starter = start("node1", "node2", before=in_server("heartbeat"))
    starter.workers()
    for server in starter.servers():
        wait_until(lambda path=tmp_path / f"beats-{server}": path.exists() and len(path.read_bytes()) > 3)


@pytest.mark.parametrize("end", ["Ctrl-C", "closed terminal", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_when_the_starter_ends(start, end):
    starter = start("node1", "node2")
    starter.workers()
    servers = starter.servers()
    assert len(servers) == 2
    assert all(map(is_running, servers))
    if end == "Ctrl-C":
        starter.press_ctrl_c()
    elif end == "closed terminal":
        starter.close_terminal()
    else:
        starter.process.send_signal(getattr(signal, end))
    assert starter.wait() == (-signal.SIGKILL if end == "SIGKILL" else 0)
    if end == "SIGKILL":
        wait_until(lambda: not any(map(is_running, servers)))
    else:
        assert "ending 2 node servers" in starter.errors
        assert starter.errors.count("draining") == 2
    assert not any(map(is_running, servers)), "it has waited for them"


def test_second_signal_does_not_wait_for_servers_that_are_busy(start, tmp_path):
    starter = start("node1 --preload slow")
    starter.workers()
    connection = starter.connection_to("node1")
    starter.press_ctrl_c()
    wait_until(lambda: "interrupt again" in starter.errors and "draining" in starter.errors)
    assert is_running(connection), "Ctrl-C is not for ssh"
    starter.press_ctrl_c()
    assert starter.wait() == 0
    (server,) = starter.servers()
    assert is_running(server)
    (tmp_path / "fifo").write_text("")
    wait_until(lambda: not is_running(server))


def test_server_that_does_not_start_ends_the_others(start):
    starter = start("node1", "node2 --preload bad")
    assert starter.wait() == 1
    assert "[node2] cannot listen" in starter.errors
    assert "error: the node server on node2 did not start (exit status 3 of ssh)" in starter.errors
    assert starter.output == ""
    assert not any(map(is_running, starter.servers()))


@pytest.mark.parametrize(
    ("hosts", "options", "status", "problem"),
    [
        (["node1 node2"], (), 2, "hosts: line 1 has 'node2' after the host"),
        (["node1"], ("--token", "x"), 2, "unrecognized arguments: --token x"),
        (["node1"], ("--python",), 2, "--python: expected one argument"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(start, tmp_path, hosts, options, status, problem):
    starter = start(*hosts, options=options)
    assert starter.wait() == status
    assert problem in starter.errors
    assert not (tmp_path / "commands").exists()
