"""Trainers and node servers that end, at whatever moment: at once, in silence, and with all that is theirs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import pytest

from tests.conftest import AT_ONCE, TIMEOUT_SCALE, is_running, stat_of, wait_until
from tests.support.clocks import in_server

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
from rpcdataloader import RPCDataloader, RPCDataset
from tests.conftest import wait_until
from tests.support import tasks
from tests.support.datasets import Holder, note

class Busy(Holder):
    def __init__(self, gone, log, how):
        super().__init__(gone)
        self.size = 1_000_000
        self.log, self.how = log, how
    def __getitem__(self, index):
        note(self.log, os.getpid())
        if index < 2 or self.how == "idle":
            return index
        # One that holds the interpreter lets no other thread send the batch before it.
        wait_until(lambda: os.path.exists(self.log + ".delivered"), 30)
        tasks.busy_in(os.devnull, self.how)

address, gone, log, how, building, has_child = sys.argv[1:]
loader = RPCDataloader(RPCDataset([address], Busy, gone, log, how), prefetch_factor=4)
iterator = iter(loader)
next(iterator)
open(log + ".delivered", "w").close()

def are_both_at_work():
    if how == "idle":  # one of them may have loaded all that is in flight
        next(iterator)
    return len(set(open(log))) == 2

wait_until(are_both_at_work)
if building:
    threading.Thread(target=RPCDataset, args=([address], tasks.busy_in, building, "hold_gil"), daemon=True).start()
child = os.fork() if has_child else 0
if has_child and child == 0:
    time.sleep(60)
    os._exit(0)
print("running", child, flush=True)
while True:
    if how == "idle":
        time.sleep(0.05)  # not pause(2), for which a signal may come a moment too early
    else:
        next(iterator)
"""
)


def start_trainer(zygote, server, gone, tmp_path, how, building="", has_child=""):
    """A trainer in the middle of an epoch; gives the workers, too."""
    log = tmp_path / "log"
    script = zygote.start(TRAINER, server.address, gone.path, log, how, building, has_child)
    wait_until(lambda: script.output.endswith("\n"), 30, lambda: script.errors)
    if building:
        wait_until(lambda: os.path.exists(building), 30, "a session that builds")
    wait_until(lambda: log.read_text().count("\n") >= 3)
    assert not gone.nobody_has_it()
    return script, {int(line) for line in log.read_text().split()}


@pytest.mark.parametrize(
    ("busy", "has_child", "end"),
    [
        ("idle", "child", signal.SIGKILL),
        ("sleep", "", signal.SIGKILL),
        ("hold_gil", "child", signal.SIGKILL),
        ("building", "child", signal.SIGKILL),
        ("sleep", "", signal.SIGINT),
        ("building", "", signal.SIGINT),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_nothing_is_left_of_a_trainer_that_ends_in_the_middle_of_a_batch(
    serve, zygote, gone, tmp_path, busy, has_child, end
):
    """Whatever its workers and its session do, and though a fork of it lives on."""
    # The server does not kill sessions that take long to end.
    server = serve("--num-workers", "2", before=in_server("end of a session, for ever"))
    building = str(tmp_path / "building") if busy == "building" else ""
    how = "sleep" if building else busy
    script, _workers = start_trainer(zygote, server, gone, tmp_path, how, building, has_child)
    begun = time.monotonic()
    os.kill(script.pid, end)
    ended = script.wait()
    assert ended.status == -end
    if end == signal.SIGINT:
        assert float(ended.output.split()[-1]) - begun < AT_ONCE
        assert building or ended.errors.count("Traceback") == 1
        assert building or ended.errors.endswith("KeyboardInterrupt\n")
    wait_until(lambda: gone.nobody_has_it() and not server.processes())
    assert time.monotonic() - ended.time < AT_ONCE
    if has_child:
        os.kill(int(ended.output.split()[1]), signal.SIGKILL)


@pytest.mark.parametrize("state", ["stopped worker", "stopped session", "building", "twice interrupted"])
def test_nothing_is_left_of_a_server_that_ends(serve, zygote, gone, tmp_path, state):
    server = serve("--num-workers", "2")
    building = str(tmp_path / "building") if state in ("building", "twice interrupted") else ""
    script, workers = start_trainer(zygote, server, gone, tmp_path, "hold_gil", building)
    wait_until(lambda: len(server.processes()) == 3)
    processes = server.processes()
    assert workers <= set(processes)
    stopped = workers if state in ("stopped worker", "twice interrupted") else set()
    if state == "stopped session":
        stopped = set(processes) - workers
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: {stat_of(pid)[0] for pid in stopped} <= {"T"})
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
    script.kill()  # it waits for another server


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


def assert_ends_at_once(script, *, interrupted=False, silent=False, limit=AT_ONCE):
    ended = script.wait(30 * TIMEOUT_SCALE)
    assert ended.status == (-signal.SIGINT if interrupted else 0), ended.errors
    assert not silent or ended.errors == ""
    assert "Exception" not in ended.errors.replace("KeyboardInterrupt", "")
    assert "Traceback" not in ended.errors or interrupted
    begun, closed = map(float, ended.output.split()[-2:])
    assert closed - begun < limit


IN_AN_EPOCH = """
import sys, torch
from rpcdataloader import RPCDataloader
dataset = torch.utils.data.TensorDataset(torch.zeros(1_000, 3, 32, 32))
iterator = iter(RPCDataloader(dataset, batch_size=4, shuffle=True, workers=sys.argv[1], prefetch_factor=8))
for _ in range(10):
    next(iterator)
"""

IN_CALLS = """
import sys, torch
from rpcdataloader import rpc_async
futures = [rpc_async(sys.argv[1], torch.zeros, (200_000,), rref=number % 2 == 0) for number in range(200)]
refs = [future.wait() for future in futures[:20]]
"""

IN_CALLS_TO_A_WORKER_THAT_WAS_KILLED = """
import os, signal, sys, time
from rpcdataloader import rpc_async
from tests.support import tasks
pid = rpc_async(sys.argv[1], os.getpid).wait()
refs = [rpc_async(sys.argv[1], tasks.Probe, rref=True).wait() for _ in range(20)]
futures = [rpc_async(sys.argv[1], time.sleep, (60,)) for _ in range(20)]
os.kill(pid, signal.SIGKILL)
"""

# As in Python from 3.12 on, once the script is over.
IN_A_CALL_WHERE_NO_THREAD_CAN_START = """
import sys, threading, time
from rpcdataloader import rpc_async
called = []
atexit.register(lambda: called or print("the callback was not called", file=sys.stderr))
rpc_async(sys.argv[1], len, ("abc",)).wait()
future = rpc_async(sys.argv[1], time.sleep, (60,)).then(called.append)
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
atexit.register(setattr, threading.Thread, "start", refuse)
"""

# It was registered before the package has registered its own, and so is called after that.
IN_AN_EARLY_EXIT_FUNCTION = """
import sys
from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.errors import ConnectionLostError
from tests.support.datasets import Numbers

def clean_up():
    for use in lambda: rpc_async(sys.argv[1], len, ("abc",)).wait(), lambda: list(loader):
        try:
            use()
        except ConnectionLostError as error:
            assert f"{sys.argv[1]} can no longer be used: this process ends" in str(error)
        else:
            raise AssertionError

atexit.register(clean_up)
loader = RPCDataloader(RPCDataset(sys.argv[1], Numbers, 2))
assert len(list(loader)) == 2
"""

EXITS = [
    IN_AN_EPOCH,
    IN_AN_EPOCH + "del iterator\n",
    IN_CALLS,
    IN_CALLS_TO_A_WORKER_THAT_WAS_KILLED,
    IN_A_CALL_WHERE_NO_THREAD_CAN_START,
    IN_AN_EARLY_EXIT_FUNCTION,
]


@pytest.mark.parametrize("num_rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_exits_in_the_middle_of_things_are_quick_and_silent(zygote, shared_server, num_rounds):
    for _ in range(num_rounds):
        for script in [zygote.start(CLOCK + body + END, shared_server.address) for body in EXITS]:
            assert_ends_at_once(script, silent=True)
    wait_until(lambda: not shared_server.processes(), what="sessions of programs that have ended")


def test_exit_does_not_wait_for_a_server_that_never_answers(zygote):
    call = "import sys\nfrom rpcdataloader import rpc_async\nfuture = rpc_async(sys.argv[1], len, ('abc',))\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = zygote.start(CLOCK + call + END, f"127.0.0.1:{listener.getsockname()[1]}")
        assert_ends_at_once(script, silent=True)


def test_exit_ends_the_session_of_this_machine(zygote):
    children = "print(open(f'/proc/self/task/{os.getpid()}/children').read())"
    script = zygote.start("import os\n" + CLOCK + IN_AN_EPOCH + children + END, "local:2")
    assert_ends_at_once(script, silent=True, limit=4.5)  # it is not waited for in vain
    assert not os.path.exists(f"/proc/{script.output.split()[0]}")


@pytest.mark.parametrize(
    ("how", "end"),
    [("refuses", END_BY_INTERRUPT), ("is silent", END), ("is silent", END_BY_INTERRUPT)],
    ids=["refuses", "is silent", "is silent and interrupted"],
)
def test_trainer_ends_at_once_while_a_node_is_sought(serve, zygote, tmp_path, how, end):
    servers = [serve("--num-workers", "1") for _ in range(2)]
    lost = servers[1]
    script = zygote.start(SOUGHT + end, ",".join(server.address for server in servers), tmp_path / "marker")
    wait_until(lambda: "\n" in script.output, 30, lambda: script.errors)
    with contextlib.ExitStack() as stack:
        lost.end(signal.SIGKILL)
        if how == "is silent":
            port = int(lost.address.rpartition(":")[2])
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        (tmp_path / "marker").touch()
        assert_ends_at_once(script, interrupted=end is END_BY_INTERRUPT)
    wait_until(lambda: not servers[0].processes(), what="workers of a trainer that has ended")


def test_trainer_ends_at_once_while_its_workers_are_stopped(serve, zygote, tmp_path):
    server = serve("--num-workers", "2")
    script = zygote.start(ENDING + END, server.address, tmp_path / "marker")
    wait_until(lambda: "\n" in script.output, 30, lambda: script.errors)
    for pid in script.output.split():
        os.kill(int(pid), signal.SIGSTOP)
    (tmp_path / "marker").touch()
    assert_ends_at_once(script)
    wait_until(lambda: not server.processes(), what="workers of a trainer that has ended")
