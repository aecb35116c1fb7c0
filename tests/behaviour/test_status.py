"""What node servers are doing, asked from outside: ``python -m rpcdataloader.status``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, __version__, rpc_async
from rpcdataloader.__main__ import main
from rpcdataloader.errors import ConnectionLostError
from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.support import tasks
from tests.support.datasets import Failing
from tests.support.peers import STATUS_TICKET, MessageType, encode_call, open_channel_to

pytestmark = pytest.mark.usefixtures("clean_client")

PROMPTLY = 20 * TIMEOUT_SCALE
NUM_SAMPLES, BATCH_SIZE = 96, 4


def sleep():
    time.sleep(600)


def fail(error):
    raise error


# --- helpers


def ask_for_status(*arguments):
    """On a machine that is busy with other tests, an answer takes its time."""
    return main(["status", "--timeout", str(PROMPTLY), *arguments])


@pytest.fixture
def look(capsys):
    """Look once; gives the exit status and the JSON document."""

    def look(*arguments):
        status = ask_for_status(*arguments, "--json")
        captured = capsys.readouterr()
        assert captured.err == ""
        return status, json.loads(captured.out)

    return look


@pytest.fixture
def look_at(look):
    """The one node server at an address that is ready."""

    def look_at(server, *arguments):
        status, document = look(server.address, *arguments)
        (node,) = document["nodes"]
        assert (status, node["state"]) == (0, "ready"), node
        return node

    return look_at


def workers_of(node):
    return [worker for client in node["clients"] for worker in client["workers"]]


# --- what is told


def test_counts_after_an_epoch_are_exact(serve, look_at):
    server = serve("--num-workers", "2")
    dataset = RPCDataset([server.address], Failing, NUM_SAMPLES, {50: (LookupError, "a damaged file")})
    loader = RPCDataloader(dataset, batch_size=BATCH_SIZE, persistent_workers=True, on_error="skip")
    assert sum(len(batch) for batch in loader) == NUM_SAMPLES - 1
    node = look_at(server)
    assert (node["tasks"], node["errors"]) == (NUM_SAMPLES // BATCH_SIZE, 0)
    assert node["sent_bytes"] > NUM_SAMPLES * 8
    (client,) = node["clients"]
    workers = workers_of(node)
    for name in "tasks", "calls", "errors", "sent_bytes", "received_bytes":
        assert node[name] == client[name] == sum(worker[name] for worker in workers)
    assert {worker["pid"] for worker in workers} <= set(server.processes())
    assert [worker["number"] for worker in workers] == sorted(worker["number"] for worker in workers)
    assert client["session_pid"] in server.processes()
    assert all(worker["memory_bytes"] > 10**6 and worker["cpu_seconds"] >= 0 for worker in workers)
    for _ in loader:
        pass
    assert look_at(server)["tasks"] == 2 * (NUM_SAMPLES // BATCH_SIZE)


def test_clients_are_named_with_host_process_rank_and_job(serve, start_client, look_at):
    server = serve()
    rpc_async(server.address, os.getpid).wait()
    script, *_processes = start_client(server, RANK="3", WORLD_SIZE="4", SLURM_JOB_ID="4711")
    ours, other = look_at(server)["clients"]
    host = socket.gethostname()
    assert look_at(server)["version"] == __version__
    assert (ours["host"], ours["pid"], ours["rank"], ours["job"]) == (host, os.getpid(), None, "")
    assert (other["host"], other["pid"], other["rank"], other["job"]) == (host, script.pid, 3, "4711")
    # A client that is killed goes, and what it has done does not.
    script.kill()
    wait_until(lambda: len(look_at(server)["clients"]) == 1)
    node = look_at(server)
    assert (node["calls"], node["ended_workers"]) == (2, 1)


def test_what_runs_and_what_waits_is_told_of_a_server_that_is_full(serve, look_at, fifo):
    server = serve("--max-connections", "1")
    pid = rpc_async(server.address, os.getpid).wait()
    call = rpc_async(server.address, tasks.read_all, (fifo,))

    def worker():
        (worker,) = workers_of(look_at(server))
        return worker

    with open(fifo, "w"):  # it has begun
        wait_until(lambda: worker()["process_state"] == "S")
        before = worker()
        assert (before["pid"], before["state"], before["process_state"]) == (pid, "running", "S")
        assert before["queued"] == 0
        assert worker()["state_seconds"] > before["state_seconds"]
    call.wait()
    wait_until(lambda: worker()["state"] == "idle")
    assert (worker()["queued"], worker()["calls"]) == (0, 2)
    assert look_at(server)["max_connections"] == 1
    assert "refused" not in server.log


def test_last_error_of_a_client_is_told(serve, look_at):
    class Awkward(Exception):
        def __str__(self):
            return "a damaged\nfile"

    server = serve()
    rpc_async(server.address, os.getpid).wait()
    (client,) = look_at(server)["clients"]
    assert (client["last_error"], client["last_error_seconds"]) == (None, None)
    for error in ValueError("first"), Awkward():
        with pytest.raises(type(error)):
            rpc_async(server.address, fail, (error,)).wait()
    (client,) = look_at(server)["clients"]
    assert (client["errors"], 0 <= client["last_error_seconds"] < PROMPTLY) == (2, True)
    # It is known when its worker has ended, too.
    (worker,) = client["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    wait_until(lambda: not workers_of(look_at(server)))
    (client,) = look_at(server)["clients"]
    assert client["last_error"].endswith("Awkward: a damaged file")


# --- who is there, and who is not


def test_several_servers_by_list_register_and_environment(serve, tmp_path, look, monkeypatch):
    pool = tmp_path / "pool"
    first = serve("--register", str(pool))
    second = serve("--host", f"unix:{tmp_path}/socket")
    addresses = [first.address, second.address]
    for arguments in addresses, [",".join(addresses)], [f"@{pool}", second.address], [f"@{pool}", *addresses]:
        status, document = look(*arguments)
        assert (status, [node["address"] for node in document["nodes"]]) == (0, addresses)
        assert [node["pid"] for node in document["nodes"]] == [first.pid, second.pid]
    monkeypatch.setenv("RPCDATALOADER_WORKERS", f"@{pool}")
    status, document = look()
    assert (status, [node["address"] for node in document["nodes"]]) == (0, [first.address])


# What a server runs first, to be of another Python.
OLD = "import platform; platform.python_version = lambda: '3.9.1'"


def test_servers_that_cannot_be_asked_are_told_with_the_reason(serve, look, capsys, other_secret, monkeypatch):
    server, gone = serve(), serve()
    gone.stop()
    other, old = serve("--token-file", str(other_secret)), serve(before=OLD)
    status, document = look(server.address, gone.address, other.address, old.address)
    nodes = document["nodes"]
    assert (status, [node["state"] for node in nodes]) == (2, ["ready", "unreachable", "refused", "refused"])
    why = [f"cannot connect to {gone.address}: connection refused", "do not hold the same secret", "runs CPython 3.9, "]
    for node, reason in zip(nodes[1:], why, strict=True):
        assert reason in node["error"]
        assert set(node) == {"address", "state", "error", "interval_seconds"}
    assert os.environ["RPCDATALOADER_TOKEN_FILE"] in nodes[2]["error"]
    assert ask_for_status(server.address, gone.address) == 1
    text = capsys.readouterr().out
    assert any(line.split()[:2] == [server.address, "ready"] for line in text.splitlines())
    assert "all: 1 of 2 ready" in text
    assert f"{gone.address}  unreachable: {why[0]}" in text
    wait_until(lambda: "] refused " in other.log)
    monkeypatch.setenv("RPCDATALOADER_TOKEN_FILE", str(other_secret))
    assert look(other.address)[1]["nodes"][0]["refused_connections"] == 1


def test_server_that_says_nothing_is_not_waited_for_long(look):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        start = time.monotonic()
        status, document = look(address, "--timeout", "0.2")
    assert time.monotonic() - start < PROMPTLY
    (node,) = document["nodes"]
    assert (status, node["state"]) == (1, "unreachable")
    assert "did not" in node["error"]


def test_register_with_files_of_servers_that_are_gone(serve, look, tmp_path):
    pool = tmp_path / "pool"
    status, document = look(f"@{pool}")
    assert (status, document["nodes"]) == (1, [])
    server = serve("--register", str(pool))
    killed = serve("--register", str(pool))
    (path,) = (path for path in pool.iterdir() if f"-{killed.pid}-" in path.name)
    killed.end(signal.SIGKILL)
    status, document = look(f"@{pool}")
    assert status == 1
    assert [node["state"] for node in document["nodes"]] == ["ready", "unreachable"]
    status, document = look(server.address, f"@{tmp_path}/none")
    assert (status, [node["state"] for node in document["nodes"]]) == (1, ["ready"])
    # As clients see it, a file that nobody renews counts for nothing in the end.
    then = path.stat().st_mtime - 200
    os.utime(path, (then, then))
    status, document = look(f"@{pool}")
    assert (status, [node["pid"] for node in document["nodes"]]) == (0, [server.pid])
    assert document["ignored_files"] == [{"path": str(path), "reason": "its server is silent"}]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "name a node server, or set RPCDATALOADER_WORKERS"),
        (["node01"], "node01"),
        (["local:2"], "local:2 belongs to one training process"),
        (["a:1", "--watch", "soon"], "expected a number of seconds above 0 and below 1e+06, got soon"),
        (["a:1", "--watch", "0"], "expected a number of seconds above 0 and below 1e+06, got 0"),
        (["a:1", "--serve", "0", "--json"], "leave --workers, --json and --stacks out"),
        (["a:1", "--serve", "here"], "--serve: cannot read the address 'here': write PORT, HOST:PORT or "),
        (["a:1", "--serve", "no-such-host.invalid:1"], "--serve: cannot serve at no-such-host.invalid:1: "),
        (["a:1", "--timeout", "1e12"], "expected a number of seconds above 0 and below 1e+06, got 1e12"),
    ],
)
def test_wrong_usage(arguments, error, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["status", *arguments])
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(("output", "status"), [("", 1), (">&-", 2)])
def test_output_that_takes_not_all(tmp_path, output, status):
    command = f"{shlex.join([sys.executable, '-m', 'rpcdataloader.status', f'@{tmp_path}/é'])} {output}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == status
    shown = f"{tmp_path}/é".encode("ascii", "backslashreplace").decode()
    said = [f"{shown}: no node server found", "error: standard output is closed"]
    assert said[status - 1] in (ended.stdout, ended.stderr)[status - 1]


# --- stacks


def test_stacks_of_the_workers_of_all_clients(serve, start_client, look_at):
    server = serve()
    pid = rpc_async(server.address, os.getpid).wait()
    hanging = rpc_async(server.address, sleep, timeout=None)
    start_client(server)
    for where in "in sleep", "in _wait":
        wait_until(lambda where=where: where in str(workers_of(look_at(server, "--stacks"))), what=where)
    stacks = {worker["pid"]: worker["stack"] for worker in workers_of(look_at(server, "--stacks"))}
    assert len(stacks) == 2
    assert "in sleep" in stacks.pop(pid)
    assert "in _wait" in stacks.popitem()[1]
    # The log has none of this.
    assert "most recent call first" not in server.log
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: any(worker["process_state"] == "T" for worker in workers_of(look_at(server))))
        stopped, other = workers_of(look_at(server, "--stacks"))
        assert (stopped["pid"], stopped["state"]) == (pid, "running")
        assert "no Python stack: it is stopped" in stopped["stack"]
        assert "in _wait" in other["stack"]
    finally:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ConnectionLostError):
        hanging.wait()


# --- again and again


@contextlib.contextmanager
def watched(*arguments):
    """A terminal in which ``--watch`` runs; gives its process and a function to read on until a text.

    What was read is in the attribute ``text`` of the function.
    """
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [sys.executable, "-m", "rpcdataloader.status", *arguments, "--timeout", str(PROMPTLY)]
    with open(terminal, "rb", buffering=0) as screen, subprocess.Popen(command, stdout=inside) as watching:
        os.close(inside)

        def read_until(done):
            while not done(read_until.text):
                read_until.text += screen.read(65536).decode()

        read_until.text = ""
        try:
            yield watching, read_until
        finally:
            watching.kill()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_watch_draws_on_the_alternate_screen_and_leaves_it(serve, number, status):
    server = serve()
    with watched(server.address, "--watch", "0.05") as (watching, read_until):
        read_until(lambda text: text.count("all: 1 of 1 ready") >= 3)
        watching.send_signal(number)
        read_until(lambda text: "\x1b[?1049l" in text)
        assert watching.wait(PROMPTLY) == status
    text = read_until.text
    assert text.startswith("\x1b[?1049h")
    assert (text.count("\x1b[?1049h"), text.count("\x1b[?1049l")) == (1, 1)
    assert text.rstrip().endswith("\x1b[?1049l")
    assert text.count("\x1b[H") >= 3
    assert text.index("rates: averages since each began") < text.index("rates: over the last ")
    # What the user had in the terminal stays, and so does what can be scrolled back to.
    assert not set(re.findall("\x1b\\[[23]J", text))
    # Long lines are not wrapped, or the top would scroll away; afterwards they are.
    assert text.index("\x1b[?7l") < text.index("all:") < text.index("\x1b[?7h")


def test_probe_imports_no_torch(serve):
    server = serve()
    script = (
        "import sys; from rpcdataloader.__main__ import main; status = main(['status', *sys.argv[1:]]);"
        "print({'torch', 'numpy', 'cloudpickle'} & sys.modules.keys()); sys.exit(status)"
    )
    arguments = [sys.executable, "-c", script, server.address, "--stacks", "--timeout", str(PROMPTLY)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=PROMPTLY, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "set()"), ended.stderr


# --- who knows the secret


@pytest.mark.parametrize("kind", ["call", "call that looks like a question", "nonsense"])
def test_status_connection_runs_nothing(serve, tmp_path, kind):
    """Who knows the secret may run everything, but not here, where nothing keeps it from the node server's memory."""
    server = serve()
    channel = open_channel_to(server.address, STATUS_TICKET)
    with contextlib.closing(channel.transport):
        if kind == "call":
            marker = tmp_path / "was here"
            channel.send(MessageType.CALL, 1, *encode_call(marker.touch))
        elif kind == "nonsense":
            channel.send(MessageType.STATS, 1, b"nonsense")
        else:
            channel.send(MessageType.CALL, 1, b"{}")
        with contextlib.suppress(ConnectionLostError):
            assert channel.recv() is None
    wait_until(lambda: "the status connection of client" in server.log)
    assert not (tmp_path / "was here").exists()
