"""Workers of this machine descend from the script, by multiprocessing, and leave nothing of a pass behind."""

from __future__ import annotations

import copyreg
import errno
import functools
import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker, shared_memory
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.client import background, local
from rpcdataloader.client.client import get_client
from rpcdataloader.errors import ConnectError, ConnectionLostError, SerializationError
from rpcdataloader.server.local import Inherited
from tests.conftest import TIMEOUT_SCALE, close_client, descendants, is_running, wait_until
from tests.support import datasets
from tests.support.kinds import as_is
from tests.support.zygote import Ended

pytestmark = pytest.mark.usefixtures("clean_client")

METHODS = ["fork", "forkserver", "spawn"]


@pytest.fixture(scope="module", autouse=True)
def helpers():
    """Processes of multiprocessing that stay, begun before and ended after the tests."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


def children():
    return set(descendants(os.getpid()))


# --- when a session is made, and ends


def sessions_of(loader):
    return {int(session) for _index, _worker, session in loader}


def test_each_pass_over_an_instance_has_a_session_and_persistent_workers_have_one():
    before = children()
    passing = RPCDataloader(datasets.Processes(6), num_workers=2)
    first, second = sessions_of(passing), sessions_of(passing)
    assert len(first) == len(second) == 1
    assert first != second
    wait_until(lambda: children() == before, what="the ends of sessions")
    staying = RPCDataloader(datasets.Processes(6), num_workers=2, persistent_workers=True)
    assert sessions_of(staying) == sessions_of(staying)
    del staying
    wait_until(lambda: children() == before, what="the end of a session")


def count_workers(_samples):
    return get_worker_info().num_workers


@pytest.mark.parametrize("given", ["argument", "variable"])
def test_num_workers_replaces_the_number_of_an_address_of_this_machine(given, monkeypatch):
    if given == "variable":
        monkeypatch.setenv("RPCDATALOADER_WORKERS", "local:1")
    loader = RPCDataloader(
        range(6), 6, collate_fn=count_workers, num_workers=2, workers="local:1" if given == "argument" else None
    )
    assert list(loader) == [2]


def test_session_of_an_rpc_dataset_ends_with_it_and_those_of_its_passes_with_these():
    before = children()
    dataset = RPCDataset("local:2", datasets.Processes, 6)
    with_dataset = children()
    loaders = [RPCDataloader(dataset), RPCDataloader(dataset, num_workers=1), RPCDataloader(dataset)]
    assert len(set.union(*map(sessions_of, loaders))) == 3
    wait_until(lambda: children() == with_dataset, what="the ends of the passes' sessions")
    del dataset, loaders
    wait_until(lambda: children() == before, what="the end of the session")


def test_session_of_an_rpc_dataset_that_it_builds_is_that_of_all_its_passes():
    before = children()
    dataset = RPCDataset("local:2", datasets.Processes, 6, env={"SOME": "1"})
    loaders = [RPCDataloader(dataset), RPCDataloader(dataset, num_workers=1), RPCDataloader(dataset)]
    assert len(set.union(*map(sessions_of, loaders))) == 1
    del dataset, loaders
    wait_until(lambda: children() == before, what="the end of the session")


table: dict[int, str] = {}


def look_up(batch):
    return [table.get(int(index)) for index in batch]


@pytest.mark.parametrize("build", ["node", "worker"])
def test_pass_over_an_rpc_dataset_has_the_script_as_it_is_then(build, monkeypatch):
    dataset = RPCDataset("local:1", datasets.Numbers, 2, build=build)
    loader = RPCDataloader(dataset, batch_size=2, collate_fn=look_up)
    assert list(loader) == [[None, None]]
    monkeypatch.setitem(table, 1, "one")
    assert list(loader) == [[None, "one"]]


class Lookups(IterableDataset):
    def __iter__(self):
        return iter([table.get(0), table.get(1)])


def test_samples_of_a_stream_are_of_the_script_as_it_is_then(monkeypatch):
    before = children()
    dataset = RPCDataset("local:1", Lookups)
    assert list(dataset) == [None, None]
    monkeypatch.setitem(table, 1, "one")
    assert list(dataset) == [None, "one"]
    del dataset
    wait_until(lambda: children() == before, what="the ends of sessions")


def test_session_that_begins_while_its_place_is_closed_ends(monkeypatch):
    before, start = children(), local._start

    def start_late(*args):
        node.close()
        return start(*args)

    node = get_client().local_node(None, Inherited(1))
    monkeypatch.setattr(local, "_start", start_late)
    session = node.session()
    assert not session.is_usable
    wait_until(lambda: children() == before, what="the end of the session")
    with pytest.raises(ConnectionLostError):
        node.session()


def test_lost_session_of_an_rpc_dataset_is_forgotten():
    dataset = RPCDataset("local:1", datasets.Numbers, 4)
    lost = dataset._access.local.current
    os.kill(lost.welcome.pid, signal.SIGKILL)
    wait_until(lambda: not lost.is_usable, what="the end of the session")
    assert dataset[1] == 1
    assert list(dataset._access._sessions) == [dataset._access.local.current]


def test_loss_of_a_session_says_once_that_the_next_one_has_what_the_script_has_now(caplog):
    batches = iter(RPCDataloader(datasets.Numbers(100), num_workers=1))
    next(batches)
    session = get_client()._local[-1].current.welcome.pid
    os.kill(session, signal.SIGKILL)
    assert len(list(batches)) == 99
    told = [text for text in caplog.messages if "another one begins, with the dataset and the globals" in text]
    assert [f"(pid {session}) was killed" in text for text in told] == [True]


def test_session_is_none_of_the_children_that_multiprocessing_waits_for():
    batches = iter(RPCDataloader(datasets.Numbers(100), num_workers=1))
    next(batches)
    assert multiprocessing.active_children() == []


def test_only_a_process_that_takes_long_to_begin_is_told_of(monkeypatch, caplog):
    monkeypatch.setattr(background, "FIRST_TOLD", 0.1)
    dataset = RPCDataset("local:1", datasets.Numbers, 4)
    caplog.clear()
    time.sleep(0.3)
    assert caplog.messages == []
    del dataset
    list(RPCDataloader([0], num_workers=1, multiprocessing_context="spawn"))
    assert any(
        "multiprocessing has started for workers of this machine: it imports" in line for line in caplog.messages
    )


class Told(Dataset):
    epoch = 0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.epoch, of_module


of_module = 0


class Together(Dataset):
    """Samples of which the first one of each worker waits until all workers are at theirs."""

    def __init__(self, size, num_workers):
        self.barrier = multiprocessing.Barrier(num_workers)
        self.size = size
        self.has_met = False

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not self.has_met:
            self.barrier.wait(20 * TIMEOUT_SCALE)
            self.has_met = True
        return os.getpid()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_first_samples_of_all_workers_may_wait_for_each_other(batch_size):
    for _ in range(3):
        batches = list(RPCDataloader(Together(4 * batch_size, 4), batch_size, num_workers=4))
        assert len(set(torch.cat(batches).tolist())) == 4


def test_next_pass_sees_what_the_script_has_changed_since_the_last(monkeypatch):
    dataset = Told()
    loader = RPCDataloader(dataset, batch_size=None, num_workers=2)
    for epoch in range(3):
        dataset.epoch = epoch
        monkeypatch.setattr(sys.modules[__name__], "of_module", 10 * epoch)
        assert list(loader) == [[epoch, 10 * epoch]] * 2


class Reader(Dataset):
    """Opens its file where it is unpickled; samples tell whether that was in their process, and are counted."""

    def __init__(self, path, context):
        self.count = context.Value("i", 0)
        self.values = torch.zeros(4).share_memory_()
        self.path = path
        self._open()

    def _open(self):
        self.file, self.opened_by = open(self.path), os.getpid()  # noqa: SIM115

    def __getstate__(self):
        return self.path, self.count, self.values

    def __setstate__(self, state):
        self.path, self.count, self.values = state
        self._open()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with self.count:
            self.count.value += 1
        self.values[index] = 1
        return self.opened_by == os.getpid()

    def collate(self, samples):
        assert samples == [self.opened_by == os.getpid()]
        return samples[0]


@pytest.mark.parametrize(("kind", "method"), [(DataLoader, "spawn"), (RPCDataloader, "forkserver")])
def test_where_a_dataset_is_sent_each_worker_opens_files_of_its_own_and_shares_what_is_made_for_it(method, kind):
    dataset = Reader(__file__, multiprocessing.get_context(method))
    loader = kind(dataset, 1, num_workers=2, multiprocessing_context=method, collate_fn=dataset.collate)
    assert list(loader) == [True] * 4
    assert (dataset.count.value, dataset.values.tolist()) == (4, [1] * 4)
    dataset.file.close()


class ReadByPool(Reader):
    """Keeps its file open, and leaves idle threads in its process, as a library does."""

    def __init__(self, path, context):
        super().__init__(path, context)
        _pools.append(ThreadPoolExecutor(1))
        _pools[-1].submit(int).result()


_pools: list[ThreadPoolExecutor] = []


def test_session_that_follows_one_with_threads_of_a_constructor_is_no_surprise(monkeypatch, caplog):
    monkeypatch.setattr(multiprocessing, "get_context", functools.partial(multiprocessing.get_context, "forkserver"))
    dataset = RPCDataset("local:1", ReadByPool, __file__, multiprocessing.get_context())
    assert list(RPCDataloader(dataset, batch_size=None)) == [True] * 4
    assert any("is built in every worker" in text for text in caplog.messages)
    assert not any("another one begins" in text for text in caplog.messages)


class Sampler:
    """Tells the dataset of each epoch as it begins."""

    epoch = 0

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return 2

    def __iter__(self):
        self.dataset.epoch = self.epoch
        return iter(range(2))


@pytest.mark.parametrize("kind", [DataLoader, RPCDataloader])
def test_workers_see_what_the_sampler_does_as_it_begins(kind):
    dataset = Told()
    sampler = Sampler(dataset)
    loader = kind(dataset, batch_size=None, sampler=sampler, num_workers=1)
    for sampler.epoch in 3, 4:
        assert [epoch for epoch, _ in loader] == [sampler.epoch] * 2


@pytest.mark.parametrize("kind", [DataLoader, RPCDataloader])
def test_workers_inherit_what_belongs_to_the_thread_that_begins_the_pass(kind):
    with torch.no_grad():
        seen = list(kind([0], batch_size=None, num_workers=1, collate_fn=lambda _sample: torch.is_grad_enabled()))
    assert seen == [False]


# --- ends, whatever happens

TRAINER = """
import os, signal, sys, threading, time
from pathlib import Path
from rpcdataloader import RPCDataloader, RPCDataset

class Slow:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return index, os.getpid(), os.getppid()

class Hanging(Slow):
    def __init__(self):
        print(os.getpid(), flush=True)
        time.sleep(600)

def load():
    global batches
    batches = iter(RPCDataloader(Slow(), num_workers=1))
    _index, worker, session = next(batches)
    print(int(worker), int(session), flush=True)

def build():
    RPCDataset("local:1", Hanging, env={"A": "b"})  # which the session builds, because of the variable
"""
BEGIN = {
    "in a pass": "load()\ntime.sleep(600)",
    "in a pass of another thread": "threading.Thread(target=load).start()\ntime.sleep(600)",
    "beside a fork": "load()\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\ntime.sleep(600)",
    "in a constructor": "build()",
    "in a constructor, for another thread": "threading.Thread(target=build).start()\ntime.sleep(600)",
}


@pytest.mark.parametrize("where", BEGIN)
def test_processes_end_with_their_trainer_that_is_killed(zygote, where):
    script = zygote.start(TRAINER + BEGIN[where])
    num_processes = 1 if "constructor" in where else 2
    wait_until(lambda: len(script.output.split()) == num_processes + ("fork" in where), what=lambda: script.errors)
    pids = list(map(int, script.output.split()))
    try:
        script.kill()
        for pid in pids[:num_processes]:
            wait_until(lambda pid=pid: not is_running(pid), what="the end of a process")
        assert all(map(is_running, pids[num_processes:]))
    finally:
        for pid in pids[num_processes:]:
            os.kill(pid, signal.SIGKILL)


CTRL_C = """
os.setpgid(0, 0)
load()
try:
    os.killpg(0, signal.SIGINT)
    time.sleep(600)
except KeyboardInterrupt:
    pass
for number in (signal.SIGTERM, signal.SIGUSR1):  # as job managers send
    signal.signal(number, lambda *_: None)
    os.killpg(0, number)
print(len(list(batches)))
"""


def test_signals_to_the_whole_group_end_no_worker(zygote):
    ended = zygote.start(TRAINER + CTRL_C).wait(60 * TIMEOUT_SCALE)
    assert (ended.status, ended.output.splitlines()[1:], ended.errors) == (0, ["99"], "")


CTRL_C_WHILE_BEGINNING = """
import contextlib, gc, os, signal, sys, threading, time
from multiprocessing import process
from rpcdataloader import RPCDataloader

moment, method = sys.argv[1:]
is_armed = False

def strike():
    global is_armed
    if is_armed:
        is_armed = False
        os.kill(os.getpid(), signal.SIGINT)

def strike_after(owner, name):
    function = getattr(owner, name)
    def changed(*args, **options):
        result = function(*args, **options)
        if threading.current_thread() is threading.main_thread():
            strike()
        return result
    setattr(owner, name, changed)

def main():
    global is_armed
    loader = RPCDataloader(range(8), num_workers=1, multiprocessing_context=method)
    list(loader)  # the fork server is there
    if moment in ("before", "after_in_parent"):
        os.register_at_fork(**{moment: strike})
    else:
        strike_after(*{"process": (process.BaseProcess, "start"), "thread": (threading.Thread, "start")}[moment])
    num = 0
    for _ in range(5):
        is_armed = True
        try:
            iter(loader)
        except KeyboardInterrupt:
            num += 1
    print(num, len(list(loader)), flush=True)
    gc.collect()
    while things_left():
        time.sleep(0.01)

def things_left():
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    found = children[2:]  # the fork server and its helper stay
    found += [thread.name for thread in threading.enumerate() if thread.name.startswith("rpcdl-recv")]
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += [name for name in [os.readlink(f"/proc/self/fd/{number}")] if name.startswith("socket:")]
    return found

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("moment", "method"),
    [
        *((moment, "fork") for moment in ("before", "after_in_parent", "process", "thread")),
        *((moment, "forkserver") for moment in ("process", "thread")),
    ],
)
def test_ctrl_c_while_a_process_begins_comes_out_and_leaves_nothing(zygote, tmp_path, moment, method):
    if method == "fork":
        ended = zygote.start(CTRL_C_WHILE_BEGINNING, moment, method).wait(30 * TIMEOUT_SCALE)
    else:  # the fork server runs the script's file again
        path = tmp_path / "train.py"
        path.write_text(CTRL_C_WHILE_BEGINNING)
        command = [sys.executable, path, moment, method]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30 * TIMEOUT_SCALE)
        ended = Ended(done.returncode, done.stdout, done.stderr, time.monotonic())
    errors = [line for line in ended.errors.splitlines() if "still waiting" not in line]  # on a busy machine
    assert (ended.status, ended.output, errors) == (0, "5 8\n", [])


def test_fork_that_does_not_answer_is_ended_and_another_way_is_told(zygote):
    """As where another thread of the trainer held a lock at the moment of the fork."""
    script = """
import os, time
from rpcdataloader import RPCDataloader
os.environ["RPCDATALOADER_CONNECT_TIMEOUT"] = "0.5"
trainer = os.getpid()
def hang():
    if os.getppid() == trainer:
        print(os.getpid(), flush=True)
        time.sleep(600)
os.register_at_fork(after_in_child=hang)
list(RPCDataloader([0], num_workers=1, reconnect_timeout=0))
"""
    ended = zygote.start(script).wait(60 * TIMEOUT_SCALE)
    assert ended.status == 1
    assert "has not answered within 0.5 s" in ended.errors
    assert "multiprocessing_context='forkserver'" in ended.errors
    for pid in ended.output.split():
        assert not is_running(int(pid))


FORKS = """
import os, threading, time, warnings
from rpcdataloader import RPCDataloader
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says so of forks beside threads
list(RPCDataloader([0], num_workers=1))

lock = threading.Lock()  # as a library has one that is imported later
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

def fork():
    while not is_over:
        if not (pid := os.fork()):
            os._exit(0)
        os.waitpid(pid, 0)

is_over = False
thread = threading.Thread(target=fork)
thread.start()
for _ in range(40):
    list(RPCDataloader([0], num_workers=1))
is_over = True
thread.join()
"""


def test_threads_may_fork_as_a_pass_begins_or_ends(zygote):
    ended = zygote.start(FORKS).wait(60 * TIMEOUT_SCALE)
    assert (ended.status, ended.errors) == (0, "")


# --- a system without room


class Refusing:
    """Refuses some forks."""

    def __init__(self, number, times):
        self.error, self.times, self.fork = OSError(number, os.strerror(number)), times, os.fork

    def __call__(self):
        if self.times:
            self.times -= 1
            raise self.error
        return self.fork()


def test_pass_begins_once_there_is_room_for_a_process(monkeypatch, caplog):
    monkeypatch.setattr(os, "fork", Refusing(errno.EAGAIN, 3))
    assert len(list(RPCDataloader([0, 1], num_workers=1))) == 2
    assert ["trying again, for at most" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize(("number", "kind"), [(errno.EAGAIN, ConnectError), (errno.EPERM, PermissionError)])
def test_pass_without_room_for_a_process_says_so(monkeypatch, number, kind):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "0.2")
    close_client()
    monkeypatch.setattr(os, "fork", Refusing(number, 1000))
    with pytest.raises(kind, match=os.strerror(number)):
        list(RPCDataloader([0], num_workers=1))


FULL = """
import errno, os, sys
from rpcdataloader import RPCDataset
from rpcdataloader.errors import ConnectError
from rpcdataloader.server.events import CounterTable

CounterTable.__init__.__defaults__ = (3,)  # of refused workers, of the session, and of one worker
trainer, fork_it = os.getpid(), os.fork

def fork():
    if os.getpid() != trainer and os.path.exists(sys.argv[1]):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork_it()

os.fork = fork
dataset = RPCDataset("local:1", list, range(5, 7))
for _ in range(2):
    try:
        print(dataset[0])
    except ConnectError as error:
        assert os.strerror(errno.EAGAIN) in str(error)
        os.unlink(sys.argv[1])
"""


def test_worker_that_could_not_be_forked_leaves_its_row_of_counters(zygote, tmp_path):
    (tmp_path / "full").touch()
    ended = zygote.start(FULL, str(tmp_path / "full")).wait(60 * TIMEOUT_SCALE)
    assert (ended.status, ended.output) == (0, "5\n"), ended.errors


def test_session_without_a_thread_leaves_no_process_and_no_descriptor(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "0.3")
    close_client()  # it has read the variable
    node, before, open_before = get_client().local_node(None, Inherited(1)), children(), os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ConnectionLostError, match="can't start new thread"):
            node.session()
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == len(open_before)


@pytest.mark.parametrize("name", ["rpcdl-recv local", "rpcdl-send local"])
def test_pass_begins_once_there_is_room_for_a_thread(monkeypatch, caplog, name):
    start, refused = threading.Thread.start, []

    def refuse(thread):
        if thread.name == name and len(refused) < 3:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert torch.cat(list(RPCDataloader(range(8), 2, num_workers=1))).tolist() == list(range(8))
    assert len(refused) == 3
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("lacking", ["process", "thread"])
def test_signal_handler_acts_while_a_pass_waits_for_room(monkeypatch, lacking):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(20 * TIMEOUT_SCALE))
    close_client()  # it has read the variable
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "rpcdl-recv local":
            raise RuntimeError("can't start new thread")
        start(thread)

    if lacking == "process":
        monkeypatch.setattr(os, "fork", Refusing(errno.EAGAIN, 10**6))
    else:
        monkeypatch.setattr(threading.Thread, "start", refuse)

    def handle(_number, _frame):
        raise TimeoutError("the script has waited long enough")

    before, began = signal.signal(signal.SIGALRM, handle), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        with pytest.raises(TimeoutError, match="waited long enough"):
            list(RPCDataloader(range(8), 2, num_workers=1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 10 * TIMEOUT_SCALE


# --- what arrives, by each start method

ARRIVES = """
import contextlib, json, multiprocessing, sys, threading
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.collate import default_collate_fn_map
from rpcdataloader import RPCDataloader

class Everything(Dataset):
    table = {}
    def __init__(self, context):
        self.epoch = torch.zeros(1).share_memory_()
        self.counts = context.Array("i", 4)
        self.lock = context.Lock()
        self.manager = multiprocessing.Manager()
        self.shared = self.manager.dict()
        self.reader, self.writer = context.Pipe(duplex=False)
    def __getstate__(self):
        return {**self.__dict__, "manager": None}
    def __len__(self):
        return 4
    def __getitem__(self, index):
        with self.lock:
            self.counts[index] += 1
        self.shared[index] = index
        self.writer.send(index)
        return index + int(self.epoch)

def note(worker):
    Everything.table["worker"] = worker

def collate(samples):
    return [*samples, Everything.table["worker"]]

def run(kind, method):
    context = multiprocessing.get_context(method)
    dataset = Everything(context)
    options = {"multiprocessing_context": context, "persistent_workers": True, "worker_init_fn": note}
    loader = kind(dataset, 2, num_workers=1, collate_fn=collate, **options)
    seen = []
    for epoch in range(2):
        dataset.epoch.fill_(10 * epoch)
        seen.append(list(loader))
    received = [dataset.reader.recv() for _ in range(8)]
    return [seen, list(dataset.counts), dict(dataset.shared), received, Everything.table]

if __name__ == "__main__":
    print(json.dumps([run(kind, sys.argv[1]) for kind in (DataLoader, RPCDataloader)]))
"""


@pytest.mark.parametrize("method", METHODS)
def test_what_multiprocessing_can_share_is_shared_as_with_torch(zygote, method):
    ended = zygote.start(ARRIVES, method).wait(100 * TIMEOUT_SCALE)
    assert ended.status == 0, ended.errors
    theirs, ours = json.loads(ended.output)
    assert theirs == ours
    assert ours[0] == [[[0, 1, 0], [2, 3, 0]], [[10, 11, 0], [12, 13, 0]]]


DEFAULT = """
import multiprocessing
from torch.utils.data import DataLoader
from rpcdataloader import RPCDataloader

state = "as the script is imported"

def tell(_samples):
    return state

if __name__ == "__main__":
    state = "as the script is"
    for kind in DataLoader, RPCDataloader:
        print(multiprocessing.get_start_method(), *kind([0], num_workers=1, collate_fn=tell), flush=True)
"""


def test_default_start_method_is_pythons(tmp_path):
    (tmp_path / "script.py").write_text(DEFAULT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100 * TIMEOUT_SCALE)
    default = multiprocessing.get_all_start_methods()[0]
    state = "as the script is" if default == "fork" else "as the script is imported"
    assert (ended.returncode, ended.stdout) == (0, f"{default} {state}\n" * 2), ended.stderr


@pytest.mark.parametrize("method", METHODS)
def test_lambdas_and_local_classes_arrive_by_each_start_method(method):
    class Local(Dataset):
        def __init__(self):
            self.double = lambda index: 2 * index

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.double(index)

    loader = RPCDataloader(
        Local(), 2, num_workers=1, collate_fn=lambda samples: sum(samples), multiprocessing_context=method
    )
    assert list(loader) == [2, 10]


class Locked(Told):
    def __init__(self, lock):
        self.lock = lock


def locked_by(lock, samples):
    with lock:
        return samples


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda lock: RPCDataloader(Locked(lock), num_workers=1), r"dataset\.lock"),
        (
            lambda lock: RPCDataloader(Told(), num_workers=1, collate_fn=functools.partial(locked_by, lock)),
            r"collate_fn\.args\[0\]",
        ),
        (lambda lock: RPCDataset("local:1", Locked, lock=lock), r"kwargs\['lock'\]"),
    ],
)
def test_what_cannot_be_sent_to_a_new_process_is_named_in_words_of_the_user(monkeypatch, make, path):
    monkeypatch.setattr(multiprocessing, "get_context", functools.partial(multiprocessing.get_context, "spawn"))
    with pytest.raises(SerializationError, match=rf"^{path} is a _thread\.lock, which cannot be pickled"):
        list(make(threading.Lock()))


NOTEBOOK = """
import sys
sys.argv = [""]
del sys.modules["__main__"].__file__  # as in a notebook

class Cell:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return index + offset

offset = 5
from rpcdataloader import RPCDataloader
for method in "fork", "forkserver", "spawn":
    print([int(sample) for sample in RPCDataloader(Cell(), num_workers=1, multiprocessing_context=method)], flush=True)
"""


def test_classes_of_a_notebook_arrive_by_each_start_method(zygote):
    ended = zygote.start(NOTEBOOK).wait(100 * TIMEOUT_SCALE)
    assert (ended.status, ended.output) == (0, "[5, 6]\n" * 3), ended.errors


REBOUND = """
import multiprocessing
from rpcdataloader import RPCDataset

shared = multiprocessing.Array("i", 1)

def share(_dataset):
    shared[0] += 1

class Thing:
    def __init__(self, number):
        self.number = number

script, names = vars(), [f"thing{number}" for number in range(100)]
script.update({name: Thing(1) for name in names})
dataset = RPCDataset("local:1", list, range(4))
places = {id(script[name]): name for name in names}
for name in names:
    del script[name]
others = [Thing(2) for _ in range(1000)]  # threads may have taken some of the places
thing = next(other for other in others if id(other) in places)
name = places[id(thing)]
script[name] = thing
assert dataset.call_all(eval(f"lambda _dataset: {name}.number")) == [2]
dataset.call_all(share)
assert shared[0] == 1
"""


def test_session_has_what_it_was_born_with_and_nothing_that_has_got_the_memory_of_that(zygote):
    ended = zygote.start(REBOUND).wait(60 * TIMEOUT_SCALE)
    assert ended.status == 0, ended.errors


FAILS = """
import sys
from rpcdataloader import RPCDataloader

class Here:
    def __init__(self):
        self.value = Unknown()
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return index

class Unknown:
    def __reduce__(self):
        return fail, ()

def fail():
    raise LookupError("not here")

{guard}list(RPCDataloader(Here(), num_workers=1, multiprocessing_context=sys.argv[1]))
"""


@pytest.mark.parametrize("method", METHODS[1:])
def test_process_that_cannot_begin_is_an_error_at_once(zygote, method):
    ended = zygote.start(FAILS.format(guard="if __name__ == '__main__': "), method).wait(60 * TIMEOUT_SCALE)
    assert ended.status == 1
    assert "LookupError: not here" in ended.errors
    ended = zygote.start(FAILS.format(guard=""), method).wait(60 * TIMEOUT_SCALE)
    assert ended.status == 1
    assert "has ended, and says why" in ended.errors or "exited with status 1 before it was ready" in ended.errors
    assert "LocalProtocolError" in ended.errors
    assert "a script must be a file, and needs `if __name__ == '__main__':` around what it does" in ended.errors


# --- what a constructor makes


class Counted(datasets.Numbers):
    """Notes each construction and each load."""

    def __init__(self, log):
        super().__init__(20)
        self.log = Path(log)
        self.note("built")

    def note(self, word):
        with self.log.open("a") as file:
            file.write(word + "\n")


class Cache(Counted):
    def __init__(self, log):
        super().__init__(log)
        self.values = multiprocessing.Array("q", 20)

    def __getitem__(self, index):
        if not self.values[index]:
            self.note("loaded")
            self.values[index] = index + 1
        return self.values[index] - 1


class Named(Counted):
    def __init__(self, log):
        super().__init__(log)
        self.memory = shared_memory.SharedMemory(create=True, size=8)
        self.memory.unlink()


class Mapped(Counted):
    def __init__(self, log):
        super().__init__(log)
        np.save(f"{log}.npy", np.arange(20))
        self.values = np.load(f"{log}.npy", mmap_mode="r")
        with open(f"{log}.npy", "rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getitem__(self, index):
        return int(self.values[index])


POOL = ThreadPoolExecutor(1)  # as libraries keep one for the whole process


class Pooled(Counted):
    def __init__(self, log):
        super().__init__(log)
        self.values = list(POOL.map(int, range(20)))


class Held(Counted):
    def __init__(self, log):
        super().__init__(log)
        self.parts = [{"pool": ThreadPoolExecutor(1)}]
        self.parts[0]["pool"].submit(int)


class Reading(Counted):
    def __init__(self, log):
        super().__init__(log)
        self.file = self.log.open("rb")


class Counting(Counted):
    """Opens its file when it is asked for its length."""

    def __init__(self, log):
        super().__init__(log)
        self.file = None

    def __len__(self):
        self.file = self.file or self.log.open("rb")
        return 20


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of what is built again in each worker
@pytest.mark.parametrize("where", ["local", "node"])
@pytest.mark.parametrize("kind", [Cache, Named, Mapped, Pooled, Held, Reading, Counting])
def test_dataset_is_built_in_every_worker_only_if_it_holds_threads_or_files(kind, where, shared_server, tmp_path):
    place = "local:2" if where == "local" else shared_server.address
    loader = RPCDataloader(RPCDataset(place, kind, tmp_path / "log"), batch_size=None, num_workers=2)
    for _epoch in range(2):
        assert list(loader) == list(range(20))
    words = (tmp_path / "log").read_text().split()
    assert (words.count("built") == 1) == (kind not in (Held, Reading, Counting))
    assert words.count("loaded") == (20 if kind is Cache else 0)


def test_fork_inherits_what_the_script_has_built_with_its_threads():
    """A constructor that runs in a fork of a process whose pool has been used would wait for ever."""
    POOL.submit(int).result()
    loader = RPCDataloader(RPCDataset("local:1", lambda: list(POOL.map(int, range(3)))), batch_size=None)
    assert list(loader) == [0, 1, 2]


class Drawn(datasets.Numbers):
    def __init__(self):
        self.number = float(torch.rand(1))

    def __getitem__(self, _index):
        return self.number


@pytest.mark.parametrize("place", ["local:1", "node"])
def test_constructor_of_an_rpc_dataset_leaves_the_generators_of_the_script_alone(place, shared_server):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    dataset = RPCDataset(shared_server.address if place == "node" else place, Drawn)
    assert torch.equal(torch.rand(1), expected)
    assert dataset[0] == float(expected)


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((1 << 17,), float(index))


def test_memory_that_the_script_holds_is_not_kept_back_for_a_session():
    loader = RPCDataloader(Images(), 16, num_workers=1, persistent_workers=True)
    held = list(loader)
    other = iter(RPCDataloader(datasets.Numbers(100), num_workers=1))
    next(other)
    borrowers = [worker.connection._borrower for worker in loader._pass.driver.workers]
    assert not any(borrower._children for borrower in borrowers if borrower is not None)
    assert len(held) == 4


class HeldHere(Dataset):
    """Has a tensor in shared memory. The first sample of a worker of this machine waits for the FIFO, others for it."""

    def __init__(self, epoch, fifo, log):
        self.epoch, self.fifo, self.log, self.script = epoch, fifo, log, os.getpid()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if datasets.node_server() != self.script:
            wait_until(lambda: datasets.notes(self.log), what="the worker of the trainer's machine is at a sample")
        elif not datasets.notes(self.log):
            datasets.note(self.log, index)
            datasets.wait_for(self.fifo)
        return index


def test_tensor_that_a_worker_shares_is_not_set_back_beside_workers_of_a_node(shared_server, fifo, tmp_path):
    epoch, log = torch.zeros(1).share_memory_(), str(tmp_path / "log")
    workers = ["local:1", shared_server.address]
    loader = RPCDataloader(HeldHere(epoch, fifo, log), workers=workers, num_workers=2, persistent_workers=True)
    iter(loader)
    wait_until(lambda: datasets.notes(log), what="the worker of this machine is at its first sample")
    epoch.fill_(1)
    batches = iter(loader)  # which tells workers of the node
    epoch.fill_(2)
    open(fifo, "w").close()
    assert sorted(map(int, batches)) == list(range(8))
    assert int(epoch) == 2


def test_other_threads_may_make_globals_as_a_pass_begins(monkeypatch):
    tell, script = local._teller, local.main_globals()

    def meanwhile(value):
        monkeypatch.setitem(script, f"made meanwhile {len(script)}", 1)
        return tell(value)

    with monkeypatch.context() as patch:
        patch.setattr(local, "_teller", meanwhile)
        assert [batch.tolist() for batch in RPCDataloader([1, 2], batch_size=2, num_workers=1)] == [[1, 2]]


class Handle:
    """Only what the script has registered can take it apart."""

    def __init__(self, number):
        self.number, self.stream = number, iter(lambda: number, None)

    def __reduce__(self):
        raise TypeError("a handle cannot be pickled")


class Handles(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return Handle(index)


@pytest.mark.parametrize("register", [ForkingPickler.register, copyreg.pickle])
def test_replies_use_what_the_script_has_registered_to_take_objects_apart(register, monkeypatch):
    monkeypatch.setattr(ForkingPickler, "_extra_reducers", {**ForkingPickler._extra_reducers})
    register(Handle, lambda handle: (Handle, (handle.number + 10,)))
    try:
        loader = RPCDataloader(Handles(), None, num_workers=1, collate_fn=as_is, multiprocessing_context="fork")
        assert [handle.number for handle in loader] == [10, 11, 12]
    finally:
        copyreg.dispatch_table.pop(Handle, None)
