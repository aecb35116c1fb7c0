"""Workers, sessions and nodes that die, stop or fall silent in a pass: the same batches come, in order, each once.

What is decided then, and in which order, is judged by the simulation; here, the processes and the kernel are real.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import IterableDataset, Subset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.errors import ConnectionLostError, RPCTimeoutError
from tests.conftest import AT_ONCE, TIMEOUT_SCALE, close_client, is_running, stat_of, wait_until
from tests.support import datasets, tasks
from tests.support.clocks import shorten
from tests.support.crew import wait_for_crew, workers_of
from tests.support.differential import Raised, steps
from tests.support.peers import session_of
from tests.support.quick import quick_server


@pytest.fixture(autouse=True)
def short_searches(monkeypatch):
    shorten(monkeypatch, "search")


@pytest.fixture
def workers(server):
    return server.address


def port_of(server):
    return server.address.rpartition(":")[2]


def take(iterator, count):
    """Samples of ``Hosted``: their indices, and which node servers they come from."""
    samples = [tuple(map(int, sample)) for sample in itertools.islice(iterator, count)]
    return [index for index, _pid in samples], {pid for _index, pid in samples}


# One fault in the middle of a pass


def build_for_long(log, fifo):
    """Keeps its session busy."""
    datasets.note(log, os.getpid())
    datasets.wait_for(fifo)
    return datasets.Numbers()


class Scene:
    """Two node servers; the worker that has made the last batch is one of the first."""

    def __init__(self, serve, folder, fifo, stack):
        self.serve, self.folder, self.fifo, self.stack = serve, folder, fifo, stack
        self.first, self.second = serve("--num-workers", "1"), serve("--num-workers", "1")
        self.worker = 0

    def happen(self, fault, worker):
        """To the node of a worker."""
        self.worker = worker
        if worker in self.second.processes():
            self.first, self.second = self.second, self.first
        fault(self)

    def kill_worker(self):
        os.kill(self.worker, signal.SIGKILL)

    def stop_worker(self):
        os.kill(self.worker, signal.SIGSTOP)

    def kill_session(self):
        os.kill(int(stat_of(self.worker)[1]), signal.SIGKILL)

    def kill_node(self):
        self.first.signal(signal.SIGKILL)

    def drain_node(self):
        self.first.signal(signal.SIGTERM)

    def start_node_again(self):
        for server in self.first, self.second:
            server.end(signal.SIGKILL)
        self.serve("--num-workers", "2", "--port", port_of(self.first))

    def freeze_node(self):
        """Its session sees its worker die, and nobody takes the connection of another one."""
        self.first.signal(signal.SIGSTOP)
        self.stack.callback(self.first.signal, signal.SIGCONT)
        self.kill_worker()

    def occupy_session(self):
        """It builds for long, and answers nothing."""
        log = str(self.folder / "constructors")
        thread = threading.Thread(target=RPCDataset, args=(self.first.address, build_for_long, log, self.fifo))
        thread.start()
        self.stack.callback(thread.join)
        self.stack.callback(lambda: open(self.fifo, "w").close())
        wait_until(lambda: datasets.notes(log), what="the constructor")
        self.kill_worker()


FAULTS = [
    Scene.kill_worker,
    Scene.stop_worker,
    Scene.kill_session,
    Scene.kill_node,
    Scene.drain_node,
    Scene.start_node_again,
    Scene.freeze_node,
    Scene.occupy_session,
]
PASSES = [datasets.Fields(60), datasets.FieldStream(), datasets.StatefulFieldStream()]


def loader_of(dataset, workers, **options):
    generator = torch.Generator().manual_seed(3)
    return RPCDataloader(dataset, batch_size=3, num_workers=2, workers=workers, generator=generator, **options)


def fields_of(batch):
    return batch[0].tolist()


@pytest.fixture(scope="module")
def undisturbed(server):
    return {type(each): [fields_of(batch) for batch in loader_of(each, server.address)] for each in PASSES}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("dataset", PASSES, ids=lambda dataset: type(dataset).__name__)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_batches_are_the_same_in_spite_of(fault, dataset, undisturbed, serve, tmp_path, fifo):
    batches, firsts = [], []
    with contextlib.ExitStack() as stack:
        scene = Scene(serve, tmp_path, fifo, stack)
        addresses = [scene.first.address, scene.second.address]
        options = {"persistent_workers": fault in (Scene.kill_worker, Scene.kill_node)}
        options["task_timeout"] = TIMEOUT_SCALE if fault is Scene.stop_worker else None
        for number, batch in enumerate(loader_of(dataset, addresses, **options)):
            batches.append(fields_of(batch))
            firsts += batch[-1].tolist()
            if number == 2:
                scene.happen(fault, int(batch[1][-1]))
    assert batches == undisturbed[type(dataset)]
    if isinstance(dataset, datasets.StatefulFieldStream) and fault is Scene.kill_worker:
        assert max(firsts) > 0, "it goes on at its state, and is not read again"


@pytest.mark.usefixtures("clean_client")
def test_death_of_a_worker_is_told_once_and_a_session_that_is_killed_is_made_again(caplog, capfd):
    iterator = iter(RPCDataloader(datasets.Processes(100), workers="local:1"))
    victim = int(next(iterator)[1])
    os.kill(victim, signal.SIGKILL)
    assert len(list(iterator)) == 99
    iterator = iter(RPCDataloader(datasets.Processes(10**6), workers="local:1"))
    samples = [next(iterator) for _ in range(20)]
    session = int(samples[-1][2])
    os.kill(session, signal.SIGKILL)
    wait_until(lambda: not is_running(session))
    while samples[-1][2] == session:  # also of batches that were here
        samples.append(next(iterator))
    assert [int(index) for index, _worker, _session in samples] == [*range(len(samples))]
    assert f"(pid {session}) was killed by SIGKILL" in caplog.text
    close_client()
    assert sum(f"(pid {victim}) on" in message for message in caplog.messages) == 1
    assert "SIGKILL" not in capfd.readouterr().err


# Nodes that go and come back


def test_loss_of_a_node_and_its_return_are_told_once_with_the_rank(serve, caplog):
    lost, other = [serve("--num-workers", "6") for _ in range(2)]
    loader = RPCDataloader(RPCDataset([lost.address, other.address], datasets.Hosted, 10_000), partition=(1, 3))
    iterator = iter(loader)
    wait_for_crew(iterator, 4)
    next(iterator)
    lost.end(signal.SIGKILL)
    wait_for_crew(iterator, 2)
    wait_until(lambda: "going on" in caplog.text)
    (news,) = [message for message in caplog.messages if "going on" in message]
    assert news.startswith("[rank 1 of 3] going on with 2 of 4 workers: ")
    assert news.count(lost.address) == 1
    later = iter(loader)  # begins with the other one
    assert take(later, 50) == ([*range(50)], {other.pid})
    again = serve("--num-workers", "6", "--port", port_of(lost))
    for each in iterator, later:
        wait_for_crew(each, 4)
    assert take(later, 200) == ([*range(50, 250)], {again.pid, other.pid})
    assert [message for message in caplog.messages if "is back" in message] == [f"[rank 1 of 3] {lost.address} is back"]


def test_datasets_are_made_and_answer_where_a_node_is_while_another_stays_away(serve, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "600")
    close_client()
    servers = [serve() for _ in range(2)]
    addresses = [server.address for server in servers]
    dataset = RPCDataset(addresses, datasets.Numbers, 4)
    sessions = list(map(session_of, addresses))
    for server in servers:
        server.end(signal.SIGKILL)
    wait_until(lambda: not any(session.is_usable for session in sessions))
    serve("--port", port_of(servers[1]))
    assert len(RPCDataset(addresses, datasets.Numbers, 5)) == 5
    assert dataset[3] == 3


def test_without_a_worker_the_error_tells_what_happened_to_each_node(serve):
    servers = [serve("--num-workers", "1") for _ in range(2)]
    iterator = iter(loader_of(datasets.Fields(10**6), [server.address for server in servers], reconnect_timeout=0.5))
    next(iterator)
    for server in servers:
        server.signal(signal.SIGKILL)
    with pytest.raises(ConnectionLostError) as caught:
        list(iterator)
    text = str(caught.value)
    assert "none came back within 0.5 s (reconnect_timeout)" in text
    assert all(f"{server.address}: " in text for server in servers)


def sessions_of(dataset):
    """The sessions that have delivered batches in a pass."""
    return {session for _index, _pid, sessions in RPCDataloader(dataset) for session in sessions.tolist()}


@pytest.mark.usefixtures("impatient")
def test_passes_begin_without_a_node_that_does_not_answer_and_it_joins_later(serve, tmp_path, fifo, caplog):
    addresses = [serve("--num-workers", "1").address for _ in range(2)]
    dataset = RPCDataset(addresses, datasets.build_slowly_once, str(tmp_path / "marker"), fifo)
    try:
        assert "until it answers: it prepares dataset build_slowly_once" in caplog.text
        assert [len(sessions_of(dataset)) for _epoch in range(2)] == [1, 1]
    finally:
        open(fifo, "w").close()
    wait_until(lambda: len(sessions_of(dataset)) == 2)


@pytest.mark.parametrize(("lost", "name"), [("worker", "rpcdl-recv"), ("session", "rpcdl-seek")])
def test_worker_or_node_for_which_there_is_no_thread_is_asked_for_again(workers, monkeypatch, lost, name, caplog):
    start, failed = threading.Thread.start, []

    def refuse_once(thread):
        if thread.name.startswith(name) and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    iterator = iter(RPCDataloader(RPCDataset(workers, datasets.Processes, 10**6), batch_size=None, num_workers=2))
    known, sessions = set(), set()
    while len(known) < 2:
        _index, worker, session = map(int, next(iterator))
        known.add(worker)
        sessions.add(session)
    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    os.kill(min(known if lost == "worker" else sessions), signal.SIGKILL)
    wait_until(lambda: int(next(iterator)[1]) not in known)
    assert failed
    assert "Traceback" not in caplog.text


def test_pass_goes_on_after_workers_were_killed_one_after_the_other_before_they_began(caplog):
    iterator = iter(RPCDataloader(datasets.Numbers(200), None, workers="local:2"))
    delivered = [next(iterator) for _ in range(20)]
    tasks = iterator.driver.engine.table.tasks
    wait_until(lambda: all(task.size_bytes is not None for task in list(tasks.values())), what="idle workers")
    killed = set()

    def kill_all():
        for pid in {worker.pid for worker in workers_of(iterator) if worker.pid} - killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return "waiting up to 300 s (reconnect_timeout)" in caplog.text

    wait_until(kill_all)
    assert [*delivered, *iterator] == list(range(200))


def end_if(flag, how, number, worker):
    """An init function that ends its process once there is a file; perhaps that of one worker alone."""
    if os.path.exists(flag) and number in (None, worker):
        if how == "exit":
            os._exit(7)
        datasets.end_here(how, 0)


def test_workers_that_exit_before_they_begin_are_an_error_soon_though_others_had_begun(tmp_path):
    flag = tmp_path / "flag"
    init = functools.partial(end_if, str(flag), "exit", None)
    iterator = iter(RPCDataloader(datasets.Numbers(200), None, workers="local:2", worker_init_fn=init))
    delivered = [next(iterator) for _ in range(20)]
    flag.touch()
    for worker in workers_of(iterator):
        os.kill(worker.pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(ConnectionLostError, match="exited with status 7"):
        delivered += list(iterator)
    assert time.monotonic() - begun < AT_ONCE


class SlowNumbers(datasets.Numbers):
    def __getitem__(self, index):
        time.sleep(0.01)
        return index


@pytest.mark.parametrize(("how", "most"), [("exit", 3), ("SIGKILL", 8)])
def test_worker_that_ends_before_it_begins_is_not_replaced_without_end_beside_another(tmp_path, caplog, how, most):
    init = functools.partial(end_if, str(tmp_path), how, 1)
    loader = RPCDataloader(SlowNumbers(300), None, workers="local:2", worker_init_fn=init)
    assert list(loader) == list(range(300))
    told = [message for message in caplog.messages if "exited with" in message or "was killed" in message]
    assert 0 < len(told) <= most


# Batches that end every worker: one error for each, however late, and every other sample once


class DeadlyStreams(IterableDataset):
    """Some streams end their process at their third sample."""

    def __init__(self, deadly, seconds):
        self.deadly, self.seconds = deadly, seconds

    def __iter__(self):
        part = get_worker_info().id
        for number in range(6):
            if part in self.deadly and number == 2:
                datasets.end_here("SIGKILL", self.seconds)
            yield part * 10 + number


def consume(loader):
    """Batches that were delivered, and the errors in place of others."""
    *taken, _end = steps(iter(loader))
    errors = [step for step in taken if isinstance(step, Raised)]
    assert {error.type for error in errors} == {ConnectionLostError}
    return [step for step in taken if not isinstance(step, Raised)], [error.line for error in errors]


# More than are ever under way at once, side by side: for some time, there is no answer at all.
MANY = {9, *range(40, 40 + 8 * 10, 8)}


@pytest.mark.parametrize(
    ("deadly", "how", "times_late", "options"),
    [
        ({103}, "SIGSEGV", 0, {"num_workers": 2, "persistent_workers": True}),
        ({103}, "SIGKILL", 1.2, {"num_workers": 4, "in_order": False}),
        (MANY, "SIGKILL", 1.2, {"num_workers": 4}),
    ],
)
def test_batch_that_kills_every_worker_is_one_error(workers, monkeypatch, deadly, how, times_late, options):
    shorten(monkeypatch, "late")
    loader = RPCDataloader(datasets.Deadly(160, deadly, how, 0.1 * times_late), 8, workers=workers, **options)
    for _epoch in range(1 + loader.persistent_workers):
        batches, errors = consume(loader)
        lost = {index // 8 for index in deadly}
        assert sorted(torch.cat(batches).tolist()) == [index for index in range(160) if index // 8 not in lost]
        assert len(errors) == len(lost)
        for text in errors:
            assert re.match(r"batch \d+ \(indices \[[\d, ]+\]\) has ended 3 workers in a row: worker ", text)
            assert text.count(f"was killed by {how}") == 3
            assert text.count(f"on {workers}") == 3


@pytest.mark.parametrize(("deadly", "in_order", "times_late"), [({1}, True, 0), ({0, 1, 2, 3}, False, 1.2)])
def test_streams_that_kill_their_workers_end_with_one_error_each(workers, monkeypatch, deadly, in_order, times_late):
    shorten(monkeypatch, "late")
    loader = RPCDataloader(DeadlyStreams(deadly, 0.1 * times_late), workers=workers, num_workers=4, in_order=in_order)
    batches, errors = consume(loader)
    assert sorted(torch.cat(batches).tolist()) == [
        10 * part + number for part in range(4) for number in range(2 if part in deadly else 6)
    ]
    assert len(errors) == len(deadly)
    state = loader.state_dict()
    assert state["finished"]
    assert [num_samples for num_samples, *_ in state["streams"]] == [2 if part in deadly else 6 for part in range(4)]


# A worker that dies says at which sample, though it cannot say anything any more


class DeadlyBatches(datasets.Deadly):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class DeadlyStream(IterableDataset):
    def __iter__(self):
        yield from range(7)
        os._exit(3)


def die(samples):
    if 7 in samples:
        os._exit(3)
    return samples


KILLED = "was killed by SIGKILL (perhaps out of memory)"
CRASHED = "was killed by SIGSEGV (a crash in compiled code)"
NAMES = ["four", "five", "six", "seven", "eight"]


@pytest.mark.parametrize(
    ("dataset", "options", "how", "where"),
    [
        (datasets.Deadly(12, {7}, "SIGKILL"), {"batch_size": 4}, KILLED, "sample 7"),
        (datasets.Deadly(12, {7}, "SIGSEGV"), {"batch_size": None}, CRASHED, "sample 7"),
        # The sampler decides what an index is; the worker knows its position only.
        (
            datasets.Deadly(12, {"seven"}, "SIGKILL"),
            {"batch_sampler": [NAMES], "collate_fn": list},
            KILLED,
            "sample seven",
        ),
        (Subset(datasets.Deadly(12, {7}, "SIGKILL"), range(12)), {"batch_size": 4}, KILLED, "sample 7"),
        (DeadlyBatches(12, {7}, "SIGKILL"), {"batch_size": 4}, KILLED, "batch 1"),
        (DeadlyStream(), {"batch_size": 3}, "exited with status 3", "sample 7 of its stream"),
    ],
    ids=["sample", "one by one", "names", "Subset", "at once", "stream"],
)
def test_death_names_the_sample(shared_server, caplog, dataset, options, how, where):
    _batches, (text,) = consume(RPCDataloader(dataset, workers=shared_server.address, num_workers=1, **options))
    assert len(re.findall(rf"{re.escape(how)} while it loaded {where}(?:;|$)", text)) == 3, text
    assert len(re.findall(rf"{re.escape(how)} while it loaded {where}; another worker starts", caplog.text)) >= 2


def test_death_after_the_last_sample_is_none_of_a_sample(shared_server):
    loader = RPCDataloader(range(12), 3, workers=shared_server.address, collate_fn=die)
    batches, (text,) = consume(loader)
    assert text.count("exited with status 3 after it had loaded batch 2") == 3
    assert len(batches) == 3


# Batches that take too long


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_that_takes_too_long_is_ended_and_the_batch_given_to_another(workers, tmp_path, num_workers, caplog):
    dataset = datasets.Deadly(40, {3}, "hang", marker=str(tmp_path / "marker"))
    loader = RPCDataloader(dataset, workers=workers, num_workers=num_workers, task_timeout=0.5)
    assert [int(index) for index in loader] == [*range(40)]
    wait_until(lambda: "in end_here" in caplog.text, what="stack in the log")
    text = "batch 3 (indices [3]) took longer than 0.5 s (task_timeout) on worker"
    record = next(one for one in caplog.records if text in one.getMessage() and one.name == "rpcdataloader.loader")
    assert record.threadName == "rpcdl-report", "neither the loop nor a receiver waits for the stack"


class Slow(IterableDataset):
    """Takes 0.1 s for a sample, and has no state."""

    def __iter__(self):
        for number in range(20):
            time.sleep(0.1)
            yield number


def test_time_limit_is_neither_for_an_init_function_nor_for_what_a_stream_takes_again(workers):
    make = functools.partial(RPCDataloader, Slow(), 2, workers=workers, num_workers=1, task_timeout=1.0)
    loader = make(worker_init_fn=lambda _worker: time.sleep(1.2))
    seen = list(itertools.islice(loader, 8))
    rest = make()
    rest.load_state_dict(loader.state_dict())
    assert torch.cat([*seen, *rest]).tolist() == [*range(20)]
    iterator = iter(make(worker_init_fn=len))
    with pytest.raises(TypeError):
        next(iterator)
    assert next(iterator, None) is None, "its stream ends"


class HangsOnce(IterableDataset):
    """Hangs where a marker is found, at the first sample that a worker takes after that."""

    def __init__(self, marker):
        self.marker, self.epoch = marker, 0

    def __iter__(self):
        self.epoch += 1
        for number in range(20):
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.marker)
                threading.Event().wait()
            yield number, os.getpid()


@pytest.mark.parametrize("num_epochs", [0, 2])
def test_stream_goes_on_where_the_samples_that_it_takes_again_hang(workers, tmp_path, caplog, num_epochs):
    """In the samples of the pass, or of those before, which persistent workers begin."""
    marker = tmp_path / "marker"
    loader = RPCDataloader(
        HangsOnce(str(marker)),
        *(2, None),
        workers=workers,
        num_workers=1,
        persistent_workers=num_epochs > 0,
        task_timeout=0.5 * TIMEOUT_SCALE,
        timeout=30 * TIMEOUT_SCALE,
        collate_fn=list,
    )
    for _epoch in range(num_epochs):
        assert len(list(loader)) == 10
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(1 if num_epochs else 8)]
    pid = batches[-1][-1][1]
    os.kill(pid, signal.SIGSTOP)  # or it would find the marker
    wait_until(lambda: stat_of(pid)[:1] == ["T"], what="the worker stopped")
    marker.touch()
    os.kill(pid, signal.SIGKILL)
    batches += iterator
    assert [number for batch in batches for number, _pid in batch] == [*range(20)]
    assert "(its end, or a sample that a stream takes again, took too long)" in caplog.text


def test_batch_that_always_takes_too_long_is_an_error_with_a_stack_and_the_others_come(workers):
    loader = RPCDataloader(datasets.Deadly(40, {3}, "hang"), workers=workers, num_workers=2, task_timeout=0.3)
    iterator = iter(loader)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RPCTimeoutError) as caught:
        next(iterator)
    text = str(caught.value)
    assert text.startswith("batch 3 (indices [3]) has ended 3 workers in a row: ")
    # Where the machine stalls, a worker may end for a batch whose answer is late, while it loads this one.
    assert len(re.findall(r"was ended: batch \d+ \(indices \[\d+\]\) took longer than 0.3 s", text)) == 3
    assert "was ended: batch 3 (indices [3]) took longer than 0.3 s" in text
    assert "in end_here" in text
    assert [int(index) for index in iterator] == [*range(4, 40)]


# Workers that end after a number of batches: the script does not notice

MAX_TASKS = 3
PREFETCH = 2  # the default of loaders


@pytest.fixture(scope="module")
def retiring(zygote):
    # As many connections as the loaders below have workers: each gets its place from the one before it.
    options = ["--num-workers", "2", "--max-connections", "2", "--max-tasks-per-worker", str(MAX_TASKS)]
    with quick_server(zygote, *options) as server:
        yield server
        assert "WARNING" not in server.log
        assert "Traceback" not in server.log


@pytest.mark.usefixtures("clean_client")
@pytest.mark.parametrize(
    ("dataset", "persistent_workers"),
    [(datasets.Fields(48), True), (datasets.FieldStream(18, 3), False), (datasets.StatefulFieldStream(18, 3), True)],
    ids=lambda value: type(value).__name__,
)
def test_batches_are_the_same_when_workers_retire(server, retiring, caplog, dataset, persistent_workers):
    caplog.set_level(logging.WARNING)
    epochs, pids = {}, []
    for address in (server.address, retiring.address):
        loader = loader_of(dataset, address, persistent_workers=persistent_workers)
        epochs[address] = []
        # Another pass may come before the server has noticed that the workers of the last one have gone.
        for _epoch in range(1 + persistent_workers):
            batches = list(loader)
            epochs[address].append([batch[0].tolist() for batch in batches])
            pids = [batch[1].tolist() for batch in batches]
    del loader
    assert epochs[retiring.address] == epochs[server.address]
    assert caplog.messages == []
    # It answers what it has received by then.
    makers = [batch[0] for batch in pids]
    assert all(set(batch) == {maker} for batch, maker in zip(pids, makers, strict=True))
    assert max(makers.count(maker) for maker in makers) <= MAX_TASKS + PREFETCH


def test_worker_for_each_batch_is_no_death_and_a_death_is_still_one(serve, tmp_path, caplog):
    server = serve("--num-workers", "1", "--max-tasks-per-worker", "1")
    dataset = datasets.Deadly(20, {9}, "SIGKILL", marker=str(tmp_path / "marker"))
    assert [int(index) for index in RPCDataloader(dataset, workers=server.address, max_retries=2)] == [*range(20)]
    (message,) = [record.getMessage() for record in caplog.records if record.name == "rpcdataloader.loader"]
    assert "was killed by SIGKILL" in message
    assert "another worker starts there" in message


class Nested(datasets.Deadly):
    """Has a loader of its own, which reads frames, for instance."""

    def __getitem__(self, index):
        assert len(list(RPCDataloader(range(8), 4, workers="inline"))) == 2
        return super().__getitem__(index)


def test_batch_that_ends_workers_is_named_though_their_dataset_has_loaded_batches_with_a_loader(shared_server):
    batches = iter(
        RPCDataloader(Nested(4, {0}, "SIGKILL"), workers=shared_server.address, num_workers=1, max_retries=2)
    )
    with pytest.raises(ConnectionLostError, match=r"batch 0 \(indices \[0\]\) has ended 2 workers"):
        next(batches)
    assert [int(index) for index in batches] == [1, 2, 3]


def test_worker_that_serves_calls_does_not_retire(serve):
    server = serve("--max-tasks-per-worker", "1")
    held = rpc_async(server.address, list, ((1, 2),), rref=True).wait()
    pids = {rpc_async(server.address, tasks.whereabouts).wait() for _ in range(5)}
    assert len(pids) == 1
    assert rpc_async(server.address, len, (held,)).wait() == 2


def test_secret_that_is_away_for_a_moment_ends_no_training(workers, tmp_path, monkeypatch):
    loader = RPCDataloader(datasets.Numbers(4), workers=workers)
    assert len(list(loader)) == 4
    monkeypatch.setenv("RPCDATALOADER_TOKEN_FILE", str(tmp_path / "away"))
    assert len(list(loader)) == 4
