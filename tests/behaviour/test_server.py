"""A node server, its sessions and its workers: who lives how long, who holds what, and who is told of what."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.errors import ConnectError, ConnectionLostError
from rpcdataloader.host.resources import process_use
from tests.conftest import TIMEOUT_SCALE, close_client, descendants, is_running, stat_of, wait_until
from tests.support import tasks
from tests.support.clocks import in_server
from tests.support.datasets import Augmented, Numbers, Processes
from tests.support.forks import status_of_fork
from tests.support.peers import PREAMBLE_SIZE, preamble, session_of, ticket_of
from tests.support.tampering import dial, read_to_the_end

pytestmark = pytest.mark.usefixtures("clean_client")


# The tests may run under nohup, which servers respect.
HEARD = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"

# Of all links between the processes of a node.
SHORT_QUEUES = """
import socket
make_pair = events.Link.pair
def make_short_pair():
    ends = make_pair()
    for end in ends:
        end._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return ends
events.Link.pair = make_short_pair
"""


def call(server, func, *args, **options):
    """Run a function on a server and wait for its result."""
    return rpc_async(server.address, func, args, **options).wait()


def connections_of(pid):
    """Numbers of the TCP connections that a process holds."""
    table = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    tcp = {fields[9] for fields in map(str.split, table) if fields[3] == "01"}
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}")):
                found.add(match[1])
    return found & tcp


# --- processes


def test_every_client_has_a_session_with_its_worker(serve, start_client):
    server = serve()
    worker, session = call(server, tasks.whereabouts)
    _script, other_worker, other_session = start_client(server)
    assert len({worker, session, other_worker, other_session}) == 4
    # Gates may still be there that have handed their connection over.
    wait_until(lambda: sorted(server.processes()) == sorted([worker, session, other_worker, other_session]))
    assert {session, other_session} == {pid for pid in server.processes() if descendants(pid)}
    close_client()
    wait_until(lambda: sorted(server.processes()) == sorted([other_worker, other_session]))


def test_nobody_holds_a_connection_of_somebody_else(serve, start_client):
    """Or the death of one client would go unnoticed while another one lives."""
    server = serve()

    def holders():
        found = {}
        for pid in [server.pid, *server.processes()]:
            with contextlib.suppress(FileNotFoundError):  # a gate that has gone
                for connection in connections_of(pid):
                    found.setdefault(connection, set()).add(pid)
        return sorted(sorted(pids) for pids in found.values() if pids != {server.pid})

    with dial(server.address):  # a stranger, who is the server's alone
        clients = [start_client(server)[1:] for _ in range(3)]
        clients.append(call(server, tasks.whereabouts))
        expected = [{worker} for worker, _ in clients] + [{server.pid, session} for _, session in clients]
        wait_until(lambda: holders() == sorted(map(sorted, expected)))


def test_what_user_code_forks_or_starts_does_not_hold_a_connection(serve):
    """A worker is killed; a process that it has forked, and one that it has started, have sessions of their own."""

    def leave_behind():
        import subprocess

        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(600)
        # Not close_fds=True, which subprocess has as its default and C libraries do not.
        return os.getpid(), [pid, subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True).pid]

    server = serve()
    worker, left = call(server, leave_behind)
    waiting = rpc_async(server.address, time.sleep, (600,))
    try:
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(ConnectionLostError, match="killed by SIGKILL"):
            waiting.wait()
        assert all(map(is_running, left))
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("who", "number", "reason"),
    [
        ("worker 1", signal.SIGSEGV, "was killed by SIGSEGV (a crash in compiled code)"),
        ("session", signal.SIGKILL, "was killed by SIGKILL (perhaps out of memory)"),
    ],
)
def test_death_is_logged_with_its_reason_ends_what_is_below_and_the_next_call_works(serve, who, number, reason):
    server = serve()
    worker, session = call(server, tasks.whereabouts)
    waiting = rpc_async(server.address, time.sleep, (600,))
    os.kill(session if who == "session" else worker, number)
    with pytest.raises(ConnectionLostError):
        waiting.wait()
    wait_until(lambda: not is_running(worker))
    line = f"WARNING rpcdataloader.server[{server.pid}] {who} of client {socket.gethostname()}:{os.getpid()} {reason}"
    wait_until(lambda: line in server.log)
    next_worker, next_session = call(server, tasks.whereabouts)
    assert next_worker != worker
    assert (next_session == session) == (who != "session")


# --- the end


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C", "closed terminal"])
def test_drain_lets_running_calls_finish_and_takes_no_new_session(serve, start_client, fifo, tmp_path, how):
    """Ctrl-C in a terminal, srun and systemd reach workers and sessions, too, which ignore that."""
    server = serve("--register", str(tmp_path / "pool"), before=f"os.setpgid(0, 0)\n{HEARD}")
    _script, worker, session = start_client(server)
    running = rpc_async(server.address, tasks.read_all, (fifo,))
    with open(fifo, "wb") as file:  # the call has begun
        for pid in server.pid, *server.processes():
            with contextlib.suppress(ProcessLookupError):  # a gate that has gone
                # Slurm sends these to all steps of a job, as with --signal=USR1@120, and nobody ends.
                for number in signal.SIGUSR1, signal.SIGUSR2:
                    os.kill(pid, number)
                for number in (signal.SIGTERM, signal.SIGINT) if how == "Ctrl-C" and pid != server.pid else ():
                    os.kill(pid, number)
        if how == "closed terminal":
            os.killpg(server.pid, signal.SIGHUP)
            wait_until(lambda: "draining" in server.log)
            os.killpg(server.pid, signal.SIGTERM)  # as where a login ends
        else:
            os.killpg(server.pid, signal.SIGTERM if how == "SIGTERM" else signal.SIGINT)
        # A client with nothing to do goes at once, and nobody is let in.
        wait_until(lambda: not is_running(worker) and not is_running(session))
        with pytest.raises(ConnectionRefusedError):
            dial(server.address)
        wait_until(lambda: os.listdir(tmp_path / "pool") == [])  # its server does not wait for a file system
        file.write(b"done")
    assert running.wait() == b"done"
    assert server.wait() == 0
    assert "draining: 2 sessions, at most 30 s" in server.log
    assert "WARNING" not in server.log


@pytest.mark.parametrize("grace", ["0.2", "600"])
def test_drain_ends_after_its_grace_or_at_a_second_signal(serve, fifo, grace):
    server = serve("--grace", grace)
    running = rpc_async(server.address, tasks.read_all, (fifo,))
    with open(fifo, "w"):
        server.signal(signal.SIGTERM)
        if grace == "600":
            wait_until(lambda: "draining" in server.log)
            server.signal(signal.SIGTERM)
        assert server.wait(10) == 0
    with pytest.raises(ConnectionLostError):
        running.wait()
    if grace == "0.2":
        assert "ended 1 sessions that were still busy after 0.2 s" in server.log
        assert "was ended: still busy 0.2 s after it was told to drain" in server.log
        assert "memory" not in server.log


def test_drain_reaches_workers_beside_one_that_stands_still_and_has_not_read_what_came_before(serve):
    server = serve(before=SHORT_QUEUES)
    stopped = call(server, os.getpid)
    dataset = RPCDataset(server.address, Processes)
    _index, other, _session = dataset[0]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: stat_of(stopped)[0] == "T")
    for _ in range(50):
        assert "stopped" in session_of(server.address).stack_of(1)
    server.signal(signal.SIGTERM)
    wait_until(lambda: not is_running(other))
    os.kill(stopped, signal.SIGCONT)
    assert server.wait() == 0


def test_drain_reaches_a_session_that_is_busy_when_it_comes_up(serve, fifo):
    """The word waits for it."""
    server = serve()
    with ThreadPoolExecutor(1) as thread:
        building = thread.submit(RPCDataset, [server.address], tasks.read_all, fifo)
        with open(fifo, "wb") as gate:
            server.signal(signal.SIGTERM)
            wait_until(lambda: "draining" in server.log)
            gate.write(b"abc")
        assert len(building.result(20 * TIMEOUT_SCALE)) == 3
    assert server.wait() == 0


@pytest.mark.usefixtures("impatient")  # what is asked for after the end waits for another server in its place
def test_drain_does_not_wait_for_a_client_that_always_wants_more(serve):
    """A worker answers what it has received when it is told, and not what is asked of it meanwhile."""
    server = serve("--num-workers", "1")
    # Longer than workers look the other way while they have something to do.
    futures = collections.deque(rpc_async(server.address, time.sleep, (0.002,)) for _ in range(4))
    futures[0].wait()
    server.signal(signal.SIGTERM)

    def go_on():
        for _ in range(2000):
            futures.append(rpc_async(server.address, time.sleep, (0.002,)))
            futures.popleft().wait()

    # The other one of a client that was not there for a moment, and sends nothing before the server has ended.
    with pytest.raises((ConnectionLostError, ConnectError), match=r"not begun this request|refused"):
        go_on()
    torch.futures.wait_all([future.then(lambda _: None) for future in futures])
    assert server.wait() == 0
    assert "still busy" not in server.log


# --- who gets a worker


def test_full_server_is_waited_for(serve, start_client, caplog):
    server = serve("--num-workers", "1", "--max-connections", "1")
    script, _worker, _session = start_client(server)
    waiting = rpc_async(server.address, os.getpid)
    wait_until(lambda: f"waiting for a worker: {server.address} is busy: all 1 connections are in use" in caplog.text)
    script.kill()
    assert waiting.wait() > 0
    assert server.log.count("gets no further worker: all 1 connections are in use (--max-connections)") == 1


def test_error_of_a_full_server_tells_what_this_process_holds(serve, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "3")
    server = serve("--num-workers", "1", "--max-connections", "2")
    options = {"num_workers": 1, "workers": server.address, "persistent_workers": True}
    under_way = [iter(RPCDataloader(Numbers(30), **options)) for _ in range(2)]
    for iterator in under_way:
        next(iterator)
    what = r"busy: all 2 connections are in use \(--max-connections\); this process holds 2: 2 for Numbers$"
    with pytest.raises(ConnectError, match=what):
        list(RPCDataloader(Augmented(), reconnect_timeout=0, **options))
    assert all(len(list(iterator)) == 29 for iterator in under_way)


def test_sessions_of_a_client_by_several_addresses_count_as_several(serve, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "3")
    server = serve("--host", "0.0.0.0", "--advertise", "127.0.0.1", "--num-workers", "1", "--max-connections", "2")
    port = server.address.rpartition(":")[2]
    *served, refused = [
        RPCDataloader(Numbers(30), workers=f"127.0.0.{number}:{port}", num_workers=1, reconnect_timeout=0)
        for number in (1, 2, 3)
    ]
    under_way = [iter(loader) for loader in served]
    for iterator in under_way:
        next(iterator)
    with pytest.raises(ConnectError, match=r"busy: all 2 connections are in use \(--max-connections\)"):
        next(iter(refused))
    for iterator in under_way:
        list(iterator)


# --- output


def test_output_of_a_session_is_in_the_log_and_its_warnings_reach_the_client(serve, caplog):
    def build():
        os.write(1, b"building\n")
        warnings.warn("the index is old", stacklevel=1)
        logging.getLogger("user.data").warning("the index is large")
        return [0]

    server = serve()
    assert len(RPCDataset([server.address], build)) == 1
    wait_until(lambda: re.search(rf"^\[\S+ client \S+:{os.getpid()}\] building$", server.log, re.MULTILINE))
    wait_until(lambda: "UserWarning: the index is old" in server.log)
    wait_until(lambda: f"{server.address}: user.data: the index is large" in caplog.text)


def test_warnings_and_log_records_reach_the_client(serve, caplog):
    def warn():
        assert status_of_fork(lambda: logging.getLogger("user.data").warning("in a fork")) == 0
        warnings.warn("old format", DeprecationWarning, stacklevel=1)
        logging.getLogger("user.data").info("not this")
        for _ in range(100):
            logging.getLogger("user.data").error("file a.jpg is broken")
        for number in range(1000):
            logging.getLogger("user.data").warning("sample %d", number)

    server = serve(before="import warnings; warnings.simplefilter('always')")
    caplog.set_level(logging.WARNING, "rpcdataloader.worker")
    call(server, warn)
    texts = lambda: [record.getMessage() for record in caplog.records if record.name == "rpcdataloader.worker"]  # noqa: E731
    wait_until(lambda: len(texts()) >= 20)
    call(server, os.getpid)
    wait_until(lambda: "in a fork" in server.log)
    assert "in a fork" not in caplog.text
    assert len(texts()) == 20  # of what a worker says within ten seconds, each text once
    assert re.search(rf"py.warnings: {re.escape(__file__)}:\d+: DeprecationWarning: old format", texts()[0])
    assert texts()[1].endswith("user.data: file a.jpg is broken")
    assert f"worker 1 (pid {call(server, os.getpid)}) on {server.address}" in texts()[0]
    wait_until(lambda: server.log.count("sample") == 0 or "sample 999" in server.log)


def test_full_disk_under_the_log_ends_nobody_and_standard_input_is_empty(serve):
    server = serve(before="os.dup2(os.open('/dev/full', os.O_WRONLY), 2)")
    call(server, lambda: print("lost"))  # noqa: T201
    assert call(server, lambda: os.popen("cat").read()) == ""
    assert call(server, lambda: sys.stdin.read()) == ""


class Impatient(Numbers):
    """Sets what all sockets that Python code makes later in its process have from the beginning."""

    def __init__(self, size, _content):
        super().__init__(size)
        socket.setdefaulttimeout(0.5)


@pytest.mark.parametrize("before", ["", "import socket; socket.setdefaulttimeout(0.5)"], ids=["dataset", "preloaded"])
def test_default_timeout_of_user_code_is_not_for_connections_of_the_server(serve, before):
    server = serve(before=before)
    for size_bytes in 0, 16 << 20:
        dataset = RPCDataset(server.address, Impatient, 3, np.zeros(size_bytes, np.uint8))
        assert [int(sample) for sample in RPCDataloader(dataset, None)] == [0, 1, 2]
    assert server.log.count("Resource temporarily unavailable") == server.log.count("timed out") == 0


# --- strangers and floods


def test_log_of_refused_connections_has_a_limit(serve):
    server = serve(before=in_server("refusals, for long"))
    for number in range(30):  # each with a cause of its own
        with dial(server.address, f"{number:02}".encode() * PREAMBLE_SIZE) as sock:
            assert read_to_the_end(sock) == b""
    wait_until(lambda: not server.processes())
    assert server.log.count("] refused 127.0.0.1:") == 20


def test_silent_strangers_cost_no_process_and_a_worker_at_rest_has_two_threads(serve):
    server = serve()
    session = session_of(server.address).wait().pid
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(dial(server.address))
        worker = call(server, os.getpid)
        assert set(server.processes()) == {session, worker}
        assert len(os.listdir(f"/proc/{worker}/task")) == 2


def test_server_without_descriptors_waits_and_goes_on(serve):
    server = serve(
        before="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (36, 36)); " + in_server("exhausted")
    )
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(dial(server.address))
        told = r"cannot serve a connection now: .*Too many open files"
        wait_until(lambda: re.search(told, server.log))
        cpu_seconds = process_use(server.pid).cpu_seconds
        wait_until(lambda: time.monotonic() - start > 3)
        assert process_use(server.pid).cpu_seconds - cpu_seconds < 1, "it does not spin meanwhile"
    assert len(re.findall(told, server.log)) == 1
    assert call(server, os.getpid) > 0


def limits_of_open_files():
    """Soft limits of this process, and of a program that it starts."""
    program = subprocess.run(["sh", "-c", "ulimit -Sn"], capture_output=True, check=True)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], int(program.stdout)


class Limits:
    def __getitem__(self, index):
        return limits_of_open_files()


def test_workers_have_the_limit_of_open_files_with_which_the_server_was_started(serve):
    """The server itself needs as many as it can get."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    server = serve(before=f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, {hard}))")
    assert call(server, limits_of_open_files) == (200, 200)
    loader = RPCDataloader(Limits(), None, sampler=range(3), workers=server.address, collate_fn=tuple)
    assert list(loader) == [(200, 200)] * 3
    assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def use_up_descriptors():
    """Leave a session none for another connection."""
    descriptor = os.dup(0)
    os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, descriptor))
    return []


def test_session_without_descriptors_goes_on(serve, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "3")
    server = serve()
    session = session_of(server.address).wait().pid
    with pytest.raises(OSError, match="Too many open files"):
        RPCDataset(server.address, use_up_descriptors)
    for _ in range(2):
        with pytest.raises(ConnectError, match="no worker can be forked: Too many open files"):
            call(server, os.getpid)
    assert is_running(session)


def test_session_that_stands_still_stops_nobody_else(serve, start_client):
    """Its queue fills with connections, and those that hand them over wait; the node server does not."""
    limits = "node.PROOF_TIMEOUT = 2; node.MAX_UNPROVED = 16; node.PROOF_PATIENCE = 0.05"
    server = serve(before=SHORT_QUEUES + limits)
    session = session_of(server.address).wait().pid
    assert call(server, os.getpid) > 0
    os.kill(session, signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(dial(server.address, preamble(ticket_of(server.address))))
        wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) > 40)
        _script, worker, other = start_client(server)
        assert {worker, other} <= set(server.processes())
    os.kill(session, signal.SIGCONT)
    assert call(server, os.getppid) == session
