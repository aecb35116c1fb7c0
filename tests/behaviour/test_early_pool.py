"""The embedded pool begins with the loader, beside the rest of the script, and leaves nothing of a loader unused."""

from __future__ import annotations

import os
import signal

import pytest

from tests.conftest import AT_ONCE, TIMEOUT_SCALE, is_running, wait_until
from tests.support.zygote import FORK_POOLS

BEGIN = """
import contextlib, copy, os, pickle, sys, threading, time
from pathlib import Path
import torch
from torch.utils.data import Dataset
from rpcdataloader import RPCDataloader, RPCDataset

class Variables(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index, os.environ.get("CHOSEN", "nothing"), os.getppid()

def pools():
    # The zygote's own child is no concern of this script.
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # a thread of a pass that has ended
            found += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return found
"""

# Takes no connections: a script that waits for it does not end.
DEAF = 'from rpcdataloader.client import node; node._BOOT = "import signal; signal.pause()"\n'

CLOCK = """
import atexit
atexit.register(lambda: print(time.monotonic() - start))
loader
def begin():
    global start
    start = time.monotonic()
atexit.register(begin)
"""


@pytest.fixture
def script(zygote, tmp_path):
    """Run a script to its end; gives the words that it has printed, and sees to it that nothing is left."""

    def run(body, *, begin=BEGIN):
        source = f'import os; os.environ["TMPDIR"] = {str(tmp_path)!r}\n{begin}{body}'
        ended = zygote.start(source).wait(60 * TIMEOUT_SCALE)
        assert (ended.status, ended.errors) == (0, "")
        wait_until(lambda: not os.listdir(tmp_path), what="folders of pools")
        return ended.output.split()

    return run


@pytest.mark.parametrize("made", ["num_workers=2", 'workers="local:2"'])
def test_pool_begins_with_the_loader_and_is_not_waited_for(script, made):
    words = script(
        f"{DEAF}loader = RPCDataloader(Variables(), {made})\nprint(*pools(), threading.active_count()){CLOCK}"
    )
    pid, num_threads, seconds = words
    assert num_threads == "1"  # so that the script may fork
    assert float(seconds) < AT_ONCE
    assert not is_running(int(pid))


INTERRUPTED = """
import signal
loader = RPCDataloader(Variables(), num_workers=1)
early = pools()
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    list(loader)
except KeyboardInterrupt:
    print("interrupted", len(early), pools() == early)
"""


def test_ctrl_c_while_a_pass_waits_for_its_pool_leaves_that_for_the_next_pass(script):
    assert script(DEAF + INTERRUPTED) == ["interrupted", "1", "True"]


def test_loader_without_a_pool_begins_none(script):
    places = [{"num_workers": 0}, {"workers": "inline"}, {"workers": "host.invalid:1"}]
    body = f"loaders = [RPCDataloader(Variables(), **place) for place in {places}]"
    assert script(f"{body}\nprint(*pools(), threading.active_count())") == ["1"]


def test_pass_uses_the_pool_that_has_begun_and_a_fork_has_one_of_its_own(script):
    loaders = """
loaders = [RPCDataloader(Variables(), num_workers=1) for _ in range(2)]
early = pools()
child = os.fork()
for loader in [*loaders, copy.copy(loaders[0]), pickle.loads(pickle.dumps(loaders[0]))]:
    assert [int(index) for index, _value, _parent in loader] == [0, 1, 2, 3]
if child == 0:
    assert len(pools()) == 1
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert len(list(loaders[0])) == 4
assert pools() == early and len(early) == 1, (early, pools())
"""
    assert script(loaders, begin=FORK_POOLS + BEGIN) == []


WAITED_FOR = """
import warnings
warnings.simplefilter("ignore")  # of Python, about forks of processes with threads

def wait():
    with contextlib.suppress(ConnectError):
        RPCDataset("local:1", Variables)

from rpcdataloader.errors import ConnectError
thread = threading.Thread(target=wait)
thread.start()
while not pools():
    time.sleep(0.001)
for _ in range(50):
    if (child := os.fork()) == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
os.kill(*pools(), 9)
thread.join()
"""


def test_fork_beside_a_thread_that_waits_for_the_pool_does_not_hang(script):
    assert script(DEAF + WAITED_FOR) == []


FORKED_IN_THE_MIDDLE = """
import subprocess, types, warnings
from rpcdataloader.client import node
warnings.simplefilter("ignore")  # of Python, about forks of processes with threads
node._BOOT = "import sys; sys.stdin.read()"

def fork():
    if (child := os.fork()) == 0:
        time.sleep(600)
    print(child)

class SlowPopen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        forking.start()
        forking.join(0.5)  # if a fork does not wait for the end of this

forking = threading.Thread(target=fork)
node.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": SlowPopen})
loader = RPCDataloader(Variables(), num_workers=1)
forking.join()
print(*pools(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_fork_in_the_middle_of_the_start_of_a_pool_does_not_keep_it_alive(zygote, tmp_path):
    trainer = zygote.start(f'import os; os.environ["TMPDIR"] = {str(tmp_path)!r}\n{BEGIN}{FORKED_IN_THE_MIDDLE}')
    child, *children = map(int, trainer.wait(60 * TIMEOUT_SCALE).output.split())
    (pool,) = set(children) - {child}
    try:
        wait_until(lambda: not is_running(pool))
    finally:
        os.kill(child, signal.SIGKILL)


UNGUARDED = """
import multiprocessing, os
from pathlib import Path
from rpcdataloader import RPCDataloader

loader = RPCDataloader(range(4), num_workers=1)

def count():
    print(len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=count)
    child.start()
    child.join()
    assert child.exitcode == 0
"""


def test_script_that_a_child_imports_begins_one_pool(script):
    assert script(UNGUARDED, begin=DEAF) == ["0"]


MODULE = """
import os
from pathlib import Path
from rpcdataloader import RPCDataloader

loader = RPCDataloader(range(4), num_workers=1)

class Children:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        session = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in session]
"""


def test_module_that_a_session_imports_begins_none(script, shared_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "loads_data.py").write_text(MODULE)
    source = f"""
import sys
sys.path.insert(0, {str(folder)!r})
from loads_data import Children
from rpcdataloader import RPCDataset
print(*RPCDataset({shared_server.address!r}, Children)[0])
"""
    assert set(script(source, begin=DEAF)) == {"rpcdl-worker"}
