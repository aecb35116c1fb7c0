"""How programs that use the package end: at once and in silence, and their workers with them, however they end."""

from __future__ import annotations

import os
import select
import signal
import socket
import time

import pytest

from tests.conftest import AT_ONCE, TIMEOUT_SCALE, wait_until
from tests.support.clocks import in_server
from tests.support.quick import quick_server

# The first thing at the end of the program, and the last: between them, the package closes everything.
CLOCK = """
import atexit, sys, time
atexit.register(lambda: print(time.monotonic() - start))
from rpcdataloader import RPCDataloader, rpc_async
"""

STOP_CLOCK = """
def begin():
    global start
    start = time.monotonic()
atexit.register(begin)
"""

IN_AN_EPOCH = """
import torch
dataset = torch.utils.data.TensorDataset(torch.zeros(1_000, 3, 32, 32))
loader = RPCDataloader(dataset, batch_size=4, shuffle=True, workers=[sys.argv[1]], prefetch_factor=8)
for number, batch in enumerate(loader):
    if number == 10:
        break
"""

# With the iterator, a global of the module, still at it.
IN_AN_EPOCH_THAT_GOES_ON = IN_AN_EPOCH.replace("enumerate(loader)", "enumerate(iterator := iter(loader))")

IN_CALLS = """
import torch
futures = [rpc_async(sys.argv[1], torch.zeros, (200_000,), rref=number % 2 == 0) for number in range(200)]
refs = [future.wait() for future in futures[:20]]
"""

IN_CALLS_TO_A_WORKER_THAT_WAS_KILLED = """
import os, signal
from tests.support import tasks
pid = rpc_async(sys.argv[1], os.getpid).wait()
refs = [rpc_async(sys.argv[1], tasks.Probe, rref=True).wait() for _ in range(20)]
futures = [rpc_async(sys.argv[1], time.sleep, (60,)) for _ in range(20)]
os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.parametrize("num_exits", [10, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "bodies",
    [
        pytest.param([IN_AN_EPOCH, IN_AN_EPOCH_THAT_GOES_ON], id="epoch"),
        pytest.param([IN_CALLS, IN_CALLS_TO_A_WORKER_THAT_WAS_KILLED], id="calls"),
    ],
)
def test_exits_in_the_middle_of_things_are_quick_and_silent(zygote, shared_server, bodies, num_exits):
    for _ in range(num_exits // len(bodies)):
        scripts = [zygote.start(CLOCK + body + STOP_CLOCK, shared_server.address) for body in bodies]
        for script in scripts:
            ended = script.wait(30 * TIMEOUT_SCALE)
            assert (ended.status, ended.errors) == (0, "")
            assert float(ended.output) < AT_ONCE
    wait_until(lambda: not shared_server.processes(), what="sessions of programs that have ended")


def test_exit_does_not_wait_for_a_server_that_never_answers(zygote):
    body = "future = rpc_async(sys.argv[1], len, ('abc',))"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = zygote.start(CLOCK + body + STOP_CLOCK, f"127.0.0.1:{listener.getsockname()[1]}")
        ended = script.wait(30 * TIMEOUT_SCALE)
    assert (ended.status, ended.errors) == (0, "")
    assert float(ended.output) < AT_ONCE


def test_exit_ends_the_embedded_pool(zygote, tmp_path):
    body = f"""
import os
os.environ["TMPDIR"] = {str(tmp_path)!r}
{IN_AN_EPOCH_THAT_GOES_ON.replace("[sys.argv[1]]", "'local:2'")}
from pathlib import Path
print(*Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split())
"""
    ended = zygote.start(CLOCK + body + STOP_CLOCK).wait(60 * TIMEOUT_SCALE)
    assert (ended.status, ended.errors) == (0, "")
    pool, seconds = ended.output.split()
    assert float(seconds) < 3 * TIMEOUT_SCALE  # it is a process that ends, too
    assert not os.path.exists(f"/proc/{pool}")
    assert not os.listdir(tmp_path)


FORKED = """
import os, sys, warnings
from rpcdataloader import rpc_async
from tests.support import tasks

warnings.simplefilter("ignore")  # of Python, about forks of processes with threads
def whereabouts():
    return rpc_async(sys.argv[1], tasks.whereabouts).wait()

ref = rpc_async(sys.argv[1], tasks.Probe, (5,), rref=True).wait()
mine = whereabouts()
child = os.fork()
if child == 0:
    worker, session = whereabouts()
    assert worker != mine[0] and session != mine[1]
    del ref  # is the parent's
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert whereabouts() == mine
assert rpc_async(sys.argv[1], lambda probe: probe.value, (ref,)).wait() == 5
"""


def test_forked_child_is_a_client_of_its_own(zygote, shared_server):
    ended = zygote.start(FORKED, shared_server.address).wait()
    assert (ended.status, ended.errors) == (0, "")
    wait_until(lambda: not shared_server.processes(), what="sessions of programs that have ended")


INTERRUPTED = """
import sys, time
import torch
from rpcdataloader import RPCDataloader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        print("loading", flush=True)
        time.sleep(60)

loader = RPCDataloader(Slow(), workers=[sys.argv[1]])
print("waiting", flush=True)
next(iter(loader))
"""


def test_interrupt_in_the_middle_of_an_epoch_ends_the_program(zygote, shared_server):
    script = zygote.start(INTERRUPTED, shared_server.address)
    wait_until(lambda: "loading" in shared_server.log.partition(f":{script.pid}")[2])
    os.kill(script.pid, signal.SIGINT)
    ended = script.wait()
    assert ended.status == -signal.SIGINT
    assert ended.errors.endswith("KeyboardInterrupt\n")
    assert ended.errors.count("Traceback") == 1
    wait_until(lambda: not shared_server.processes(), what="workers of a program that was interrupted")


# --- killed

KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from rpcdataloader import RPCDataset, rpc_async
from tests.support import tasks

address, fifo, busy, marker, with_child = sys.argv[1:]
refs = [rpc_async(address, tasks.Open, (fifo,), rref=True).wait()]
dataset = threading.Thread(target=RPCDataset, args=([address], tasks.busy_in, marker, busy.partition(" ")[2]))
if busy.startswith("worker"):
    rpc_async(address, tasks.busy_in, (marker, busy.partition(" ")[2]))
elif busy.startswith("session"):
    dataset.start()
else:
    Path(marker).touch()
child = 0
if with_child == "True":
    child = os.fork()
    if child == 0:
        signal.pause()
print(child, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def patient_server(zygote):
    """A server that would wait for ten minutes before it ends the session of a client that has gone."""
    with quick_server(zygote, "--num-workers", "2", before=in_server("end of a session, for ever")) as server:
        yield server


@pytest.mark.parametrize(
    ("busy", "with_child"),
    [
        ("idle", False),
        ("idle", True),
        ("worker sleep", True),
        ("worker hold_gil", False),
        ("session sleep", False),
        ("session hold_gil", True),
    ],
)
def test_objects_of_a_killed_client_are_gone_within_a_second(zygote, patient_server, tmp_path, busy, with_child):
    fifo, marker = tmp_path / "fifo", tmp_path / "marker"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    child = 0
    try:
        script = zygote.start(KILLED, patient_server.address, fifo, busy, marker, with_child)
        wait_until(lambda: marker.exists() and script.output.endswith("\n"), what="something to kill")
        child = int(script.output)
        assert not select.select([reader], [], [], 0)[0]  # somebody has it open

        start = time.monotonic()
        script.kill()
        wait_until(lambda: select.select([reader], [], [], 0)[0], what="the end of the object")
        assert os.read(reader, 1) == b""
        assert time.monotonic() - start < AT_ONCE
        assert script.wait().status == -signal.SIGKILL
        wait_until(lambda: not patient_server.processes(), what="the session of a client that was killed")
    finally:
        os.close(reader)
        if child:
            os.kill(child, signal.SIGKILL)
