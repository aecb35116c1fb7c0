"""Trainers and node servers that end at bad moments of an epoch: everything of theirs is gone at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.conftest import AT_ONCE, TIMEOUT_SCALE, is_running, stat_of, wait_until


class Gone:
    """A named pipe that datasets hold open, to see when the last one is gone."""

    def __init__(self, path):
        os.mkfifo(path)
        self.path = str(path)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # Or there would be an end of file before the first one has come.
        self._writer = os.open(path, os.O_WRONLY)

    def nobody_has_it(self):
        """Whether there is no dataset any more; from the first call on, this process does not count."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
        return bool(select.select([self._reader], [], [], 0)[0])

    def close(self):
        os.close(self._reader)
        if self._writer >= 0:
            os.close(self._writer)


@pytest.fixture
def gone(tmp_path):
    found = Gone(tmp_path / "gone")
    yield found
    found.close()


@pytest.fixture
def start(zygote):
    """Start trainers, which end with the test."""
    scripts = []

    def start(source, *args):
        scripts.append(zygote.start(source, *args))
        return scripts[-1]

    yield start
    for script in scripts:
        with contextlib.suppress(ProcessLookupError):
            os.kill(script.pid, signal.SIGKILL)
        script.wait()


# --- a trainer or a server that is killed

# What is called last at the end of the program: by then, the package has closed everything. What comes after it is not
# measured, as the interpreter takes torch apart, which needs a second where others are at work on the same machine.
CLOCK = """
import atexit, time
atexit.register(lambda: print(time.monotonic(), flush=True))
"""

TRAINER = (
    CLOCK
    + """
import os, signal, sys, threading, time
import torch
from rpcdataloader import RPCDataloader, RPCDataset
from tests.conftest import wait_until
from tests.support import tasks
from tests.support.datasets import Holder, note

class Busy(Holder):
    # 24 MB, so that a worker is in the middle of sending if nobody receives; not more, as a trainer that ends has to
    # give all of it back.
    def __init__(self, gone, log, how):
        super().__init__(gone)
        self.size = 1_000_000
        self.log, self.how = log, how
    def __getitem__(self, index):
        note(self.log, os.getpid())
        if index < 2 or self.how == "answer":
            return torch.zeros(6_000_000)
        # One that holds the interpreter lets no other thread send the batch before it.
        wait_until(lambda: os.path.exists(self.log + ".delivered"), 30)
        tasks.busy_in(os.devnull, self.how)

address, gone, log, how, building = sys.argv[1:]
loader = RPCDataloader(RPCDataset([address], Busy, gone, log, how), prefetch_factor=4)
iterator = iter(loader)
next(iterator)
open(log + ".delivered", "w").close()
wait_until(lambda: len(set(open(log))) == 2)  # both workers are at work
if building:
    threading.Thread(target=RPCDataset, args=([address], tasks.busy_in, building, "hold_gil"), daemon=True).start()
print("running", flush=True)
while True:
    if how == "answer":
        next(iterator)
    else:
        time.sleep(0.05)  # not pause(2), for which a signal may come a moment too early
"""
)


def start_trainer(start, server, gone, tmp_path, how, building=""):
    """A trainer in the middle of an epoch; gives the workers, too."""
    log = tmp_path / "log"
    script = start(TRAINER, server.address, gone.path, log, how, building)
    wait_until(lambda: "running" in script.output, 30, lambda: script.errors)
    if building:
        wait_until(lambda: os.path.exists(building), 30, "a session that builds")
    wait_until(lambda: log.read_text().count("\n") >= 3)
    assert not gone.nobody_has_it()
    return script, {int(line) for line in log.read_text().split()}


def states_of(pids):
    """What the kernel says of processes: R runs, S sleeps, T is stopped."""
    return {stat_of(pid)[0] for pid in pids}


def is_sending(pid):
    """Whether bytes of a process wait to be received: some of a batch that is larger than the kernel's buffers."""
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    waiting = {f"socket:[{fields[9]}]" for fields in table[1:] if not fields[4].startswith("00000000")}
    opened = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            opened.add(os.readlink(entry))
    return bool(waiting & opened)


def stop_while_sending(trainer, workers):
    """Stop a trainer, so that its workers stand in the middle of a batch; False if one has nothing left to send."""
    os.kill(trainer, signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT_SCALE
    while time.monotonic() < deadline:
        if all(map(is_sending, workers)):
            return True
    os.kill(trainer, signal.SIGCONT)
    return False


@pytest.mark.parametrize(
    ("busy", "end"),
    [
        ("sleep", signal.SIGKILL),
        ("hold_gil", signal.SIGKILL),
        ("sending", signal.SIGKILL),
        ("building", signal.SIGKILL),
        ("sending", signal.SIGINT),
        ("building", signal.SIGINT),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_nothing_is_left_of_a_trainer_that_ends_in_the_middle_of_a_batch(serve, start, gone, tmp_path, busy, end):
    server = serve("--num-workers", "2")
    how = {"sending": "answer", "building": "sleep"}.get(busy, busy)
    building = str(tmp_path / "building") if busy == "building" else ""
    script, workers = start_trainer(start, server, gone, tmp_path, how, building)
    if busy == "sending":
        wait_until(lambda: stop_while_sending(script.pid, workers), 30)
    begun = time.monotonic()
    if end == signal.SIGINT:  # which one that is stopped cannot handle
        os.kill(script.pid, signal.SIGCONT)
    os.kill(script.pid, end)
    ended = script.wait()
    assert ended.status == -end
    if end == signal.SIGINT:
        assert float(ended.output.split()[-1]) - begun < AT_ONCE
    wait_until(lambda: gone.nobody_has_it() and not server.processes())
    assert time.monotonic() - ended.time < AT_ONCE


@pytest.mark.parametrize("state", ["stopped worker", "stopped session", "building", "twice interrupted"])
def test_nothing_is_left_of_a_server_that_ends(serve, start, gone, tmp_path, state):
    server = serve("--num-workers", "2")
    building = str(tmp_path / "building") if state in ("building", "twice interrupted") else ""
    _script, workers = start_trainer(start, server, gone, tmp_path, "hold_gil", building)
    wait_until(lambda: len(server.processes()) == 3)
    processes = server.processes()
    assert workers <= set(processes)
    stopped = workers if state in ("stopped worker", "twice interrupted") else set()
    if state == "stopped session":
        stopped = set(processes) - workers
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: states_of(stopped) <= {"T"})
    if state == "twice interrupted":
        server.signal(signal.SIGINT)
        wait_until(lambda: "draining" in server.log)
        server.signal(signal.SIGINT)
    else:
        server.signal(signal.SIGKILL)
    begun = time.monotonic()
    server.wait()
    wait_until(lambda: gone.nobody_has_it() and not any(map(is_running, processes)))
    assert time.monotonic() - begun < AT_ONCE


# --- a trainer that ends by itself, at a bad moment

ENDING = (
    CLOCK
    + """
import os, signal, sys, threading, time
import torch
from rpcdataloader import RPCDataloader, RPCDataset
from tests.support.datasets import Numbers, Processes
from tests.conftest import wait_until

def sought():
    return any(thread.name.startswith("rpcdl-seek") for thread in threading.enumerate())

workers, marker = sys.argv[1:]
loader = RPCDataloader(Processes(100_000), workers=workers, persistent_workers=True)
iterator = iter(loader)
seen = [next(iterator) for _ in range(20)]
print(*{int(pid) for _, pid, _ in seen}, flush=True)
wait_until(lambda: os.path.exists(marker), 30)
"""
)
SOUGHT = ENDING + "wait_until(lambda: next(iterator) and sought(), 30)\n"
END = """
print(time.monotonic(), flush=True)
"""
END_BY_INTERRUPT = END + "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"


def assert_ends_at_once(script, *, interrupted=False):
    ended = script.wait(30 * TIMEOUT_SCALE)
    assert ended.status == (-signal.SIGINT if interrupted else 0), ended.errors
    assert "Exception" not in ended.errors.replace("KeyboardInterrupt", "")
    assert "Traceback" not in ended.errors or interrupted
    begun, closed = map(float, ended.output.split()[-2:])
    assert closed - begun < AT_ONCE


@pytest.mark.parametrize(
    ("how", "end"),
    [("refuses", END_BY_INTERRUPT), ("is silent", END), ("is silent", END_BY_INTERRUPT)],
    ids=["refuses", "is silent", "is silent and interrupted"],
)
def test_trainer_ends_at_once_while_a_node_is_sought(serve, start, tmp_path, how, end):
    servers = [serve("--num-workers", "1") for _ in range(2)]
    lost = servers[1]
    script = start(SOUGHT + end, ",".join(server.address for server in servers), tmp_path / "marker")
    wait_until(lambda: "\n" in script.output, 30, lambda: script.errors)
    with contextlib.ExitStack() as stack:
        lost.signal(signal.SIGKILL)
        lost.wait()
        if how == "is silent":
            port = int(lost.address.rpartition(":")[2])
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        (tmp_path / "marker").touch()
        assert_ends_at_once(script, interrupted=end is END_BY_INTERRUPT)
    wait_until(lambda: not servers[0].processes(), what="workers of a trainer that has ended")


def test_trainer_ends_at_once_while_its_workers_are_stopped(serve, start, tmp_path):
    server = serve("--num-workers", "2")
    script = start(ENDING + END, server.address, tmp_path / "marker")
    wait_until(lambda: "\n" in script.output, 30, lambda: script.errors)
    for pid in script.output.split():
        os.kill(int(pid), signal.SIGSTOP)
    (tmp_path / "marker").touch()
    assert_ends_at_once(script)
    wait_until(lambda: not server.processes(), what="workers of a trainer that has ended")
