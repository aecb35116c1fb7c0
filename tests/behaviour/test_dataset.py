"""RPCDataset: built on its nodes, asked and changed from here, gone with its last reference."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from rpcdataloader import RPCDataloader, RPCDataset, set_random_seeds
from rpcdataloader.errors import ConnectionLostError, RemoteTraceback
from tests.conftest import wait_until
from tests.support import datasets
from tests.support.clocks import shorten
from tests.support.crew import wait_for_crew, workers_of
from tests.support.datasets import State, notes
from tests.support.peers import session_of
from tests.support.streams import Parts

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture
def two_nodes(shared_server, second_server):
    return [shared_server.address, second_server.address]


def items(batches):
    """Samples of batches that the default collate made of tuples."""
    return [tuple(map(int, sample)) for batch in batches for sample in zip(*batch, strict=True)]


def list_of_all(loader):
    """Batches, after all workers have started: otherwise, the first ones may be done before."""
    iterator = iter(loader)
    wait_for_crew(iterator, len(workers_of(iterator)))
    return list(iterator)


def items_of_all(loader):
    """Their samples."""
    return items(list_of_all(loader))


# Built once per node


def test_dataset_is_built_once_per_node_for_all_workers_loaders_and_passes(wide_servers, tmp_path):
    log = str(tmp_path / "log")
    train, validation = (RPCDataset([server.address for server in wide_servers], State, 64, log) for _ in range(2))
    loaders = [RPCDataloader(train, persistent_workers=True), RPCDataloader(train), RPCDataloader(validation)]
    workers = set()
    for _epoch in range(2):
        for loader in loaders:
            samples = items_of_all(loader)
            assert [sample[0] for sample in samples] == list(range(64))
            workers |= {sample[3] for sample in samples}
    builders = [int(line.split()[1]) for line in notes(log)]
    assert len(builders) == 2 * len(set(builders)) == 4
    assert not workers & set(builders)


def test_build_in_workers_builds_in_each_and_not_in_the_session(two_nodes, tmp_path):
    log = str(tmp_path / "log")
    dataset = RPCDataset(two_nodes, State, log=log, build="worker")
    assert notes(log) == []
    loader = RPCDataloader(dataset, persistent_workers=True)
    assert [sample[0] for sample in items(loader)] == list(range(20))
    wait_until(lambda: len(notes(log)) == 5, what="four workers of the loader, and one that answers questions")
    builders = {int(line.split()[1]) for line in notes(log)}
    assert len(builders) == 5
    assert dataset.session not in builders
    assert {sample[3] for sample in items(loader)} <= builders


def test_instance_crosses_the_wire_once(shared_server, second_server, tmp_path):
    servers = shared_server, second_server
    log = str(tmp_path / "log")
    instance = datasets.Copied(log)
    workers = [server.address for server in servers]
    train = RPCDataloader(instance, workers=workers, shuffle=True)
    validation = RPCDataloader(instance, workers=workers, batch_size=3)
    for _epoch in range(3):
        assert sorted(int(batch) for batch in train) == list(range(20))
        assert [number for batch in validation for number in batch.tolist()] == list(range(20))
        wait_until(lambda: all(len(server.processes()) == 1 for server in servers), what="only the sessions left")
    assert len(set(notes(log))) == len(notes(log)) == 2


class Scaled(datasets.Numbers):
    def scale(self, samples):
        return [self.size * sample for sample in samples]


@pytest.mark.parametrize("inline", [True, False])
def test_method_of_the_dataset_collates_where_the_dataset_is(shared_server, inline):
    dataset = RPCDataset("inline" if inline else shared_server.address, Scaled, 4)
    assert list(RPCDataloader(dataset, 2, collate_fn=dataset.scale)) == [[0, 4], [8, 12]]


class Shuffled(datasets.Numbers):
    """Draws random numbers when it is made."""

    def __init__(self, size):
        super().__init__(size)
        self.order = random.sample(range(size), size)
        self.drawn = datasets.draw()

    def __getitem__(self, index):
        return self.order[index]

    def shuffle(self):
        random.shuffle(self.order)
        return self.order


@pytest.mark.parametrize("build", ["node", "worker"])
def test_random_constructor_gives_the_same_dataset_everywhere(two_nodes, build):
    set_random_seeds(7, 0)
    dataset = RPCDataset(two_nodes, Shuffled, 50, build=build)
    found = dataset.order, dataset.drawn
    samples = [int(sample) for sample in RPCDataloader(dataset, None, num_workers=2)]  # one on each node
    set_random_seeds(7, 0)
    local = Shuffled(50)
    assert found == (local.order, local.drawn)
    assert samples == local.order


# A slow build


def test_slow_build_is_logged_with_the_nodes_that_are_waited_for(two_nodes, tmp_path, fifo, monkeypatch, caplog):
    assert len(RPCDataset(two_nodes, datasets.Numbers)) == 20  # the sessions
    shorten(monkeypatch, "told")
    with ThreadPoolExecutor(1) as thread:
        building = thread.submit(RPCDataset, two_nodes, datasets.build_slowly_once, str(tmp_path / "marker"), fifo)
        wait_until(lambda: "is being built" in caplog.text)
        open(fifo, "w").close()
        assert len(building.result()) == 20
    (line,) = [record for record in caplog.records if "is being built" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("still waiting after ")
    assert "for dataset build_slowly_once, which is being built on " in line.getMessage()
    assert sum(address in line.getMessage() for address in two_nodes) == 1


# Questions


def test_length_items_and_attributes_are_those_of_the_remote_dataset(two_nodes):
    dataset = RPCDataset(two_nodes, State, 15)
    assert len(dataset) == 15
    assert dataset[3][0] == 3
    assert dataset[14][3] != os.getpid()
    assert dataset.classes == ("cat", "dog")
    assert dataset.made_in == dataset.session != os.getpid()
    assert hasattr(dataset, "size")
    assert not hasattr(dataset, "sizes")
    assert getattr(dataset, "sizes", "none") == "none"
    assert repr(dataset).startswith("RPCDataset(State, workers=")
    assert [int(number) for number in RPCDataset(two_nodes, datasets.Numbers, 4)] == [0, 1, 2, 3]


def test_errors_of_questions_come_with_the_remote_traceback(shared_server):
    dataset = RPCDataset(shared_server.address, State)
    for question, error, text in [
        (lambda: dataset.sizes, AttributeError, "has no attribute 'sizes'"),
        (lambda: dataset.broken, LookupError, "this property is broken"),
        (lambda: RPCDataset(shared_server.address, datasets.Numbers)[20], IndexError, "index 20 is not below 20"),
    ]:
        with pytest.raises(error, match=text) as caught:
            question()
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "Traceback (most recent call last)" in str(caught.value.__cause__)
        assert socket.gethostname() in str(caught.value.__cause__)


def test_iterable_style_dataset_can_be_iterated_over(shared_server, tmp_path):
    log = str(tmp_path / "log")
    dataset = RPCDataset(shared_server.address, Parts, [30], log)
    for _ in range(2):
        assert list(dataset) == list(range(30))
    iterator = iter(dataset)
    assert [next(iterator), next(iterator)] == [0, 1]
    del iterator
    assert len(notes(log)) < 80  # it was not read to its end
    with pytest.raises(TypeError, match="has no len"):
        len(dataset)
    assert len(list(RPCDataset("inline", datasets.FieldStream, 3))) == 3, "it is told that it is alone"


# Changes


@pytest.mark.parametrize("build", ["node", "worker", "inline"])
def test_setting_an_attribute_reaches_sessions_and_workers_of_today_and_tomorrow(two_nodes, build):
    workers = "inline" if build == "inline" else two_nodes
    dataset = RPCDataset(workers, State, build="node" if build == "inline" else build)
    persistent = RPCDataloader(dataset, batch_size=5, persistent_workers=True)
    loader = RPCDataloader(dataset, batch_size=5)
    for epoch in range(3):
        dataset.epoch = epoch
        assert dataset.epoch == epoch
        assert {sample[1] for sample in items(persistent)} == {epoch}
        assert {sample[1] for sample in items(loader)} == {epoch}
    assert dataset.set_epoch(epoch=5) == 6
    assert {sample[1] for sample in items(loader)} == {5}
    assert dataset.call_all(lambda state: state.size + 1)[0] == 21


def read_table(state, log):
    datasets.note(log, os.getpid())
    state.table = torch.ones(1000)


def test_change_is_made_once_per_node_and_inherited_by_its_workers(two_nodes, tmp_path):
    log = str(tmp_path / "log")
    dataset = RPCDataset(two_nodes, State, 60)
    dataset.call_all(functools.partial(read_table, log=log))
    for _epoch in range(2):
        workers = {sample[3] for sample in items_of_all(RPCDataloader(dataset, batch_size=1))}
    made_in = notes(log)
    assert len(made_in) == len(set(made_in)) == 3, "in two sessions, and in the worker that answers questions"
    assert not workers & set(map(int, made_in))


@pytest.mark.parametrize("build", ["node", "worker"])
def test_change_in_mid_pass_is_for_the_next_one_and_for_each_process_once(two_nodes, build):
    dataset = RPCDataset(two_nodes, State, 60, build=build)
    persistent = iter(loader := RPCDataloader(dataset, batch_size=1, num_workers=2, persistent_workers=True))
    for change in range(1, 4):
        iterator = iter(RPCDataloader(dataset, batch_size=1, num_workers=1))
        samples = [tuple(map(int, next(iterator)))]
        assert dataset.call_all(datasets.increment) == [change]
        assert dataset.changes == change
        os.kill(samples[0][3], signal.SIGKILL)
        samples += items(iterator)
        assert len({pid for *_fields, pid in samples}) == 2
        assert {made for _index, _epoch, made, _pid in samples} == {change - 1}
        assert {made for _index, _epoch, made, _pid in items(persistent)} == {change - 1}
        persistent = iter(loader)


def add_to_epoch(more, samples):
    return [(index, epoch + more[0], *rest) for index, epoch, *rest in samples]


@pytest.mark.parametrize("build", ["node", "worker"])
def test_change_for_another_pass_reaches_no_new_worker_of_this_one(serve, build):
    dataset = RPCDataset(serve("--num-workers", "2", "--max-tasks-per-worker", "4").address, State, build=build)
    dataset.epoch = epoch = np.array(0)
    add = functools.partial(add_to_epoch, more := [0])
    training = iter(RPCDataloader(dataset, num_workers=1, prefetch_factor=1, collate_fn=add))
    first = [next(training) for _ in range(2)]
    more[0] = epoch[()] = 9  # which nobody hears of
    dataset.epoch = 5
    assert {epoch for _index, epoch, _changes, _pid in items(RPCDataloader(dataset, num_workers=1))} == {5}
    dataset.epoch = 6
    trained = [sample for batch in (*first, *training) for sample in batch]
    assert {epoch for _index, epoch, _changes, _pid in trained} == {0}
    assert len({pid for _index, _epoch, _changes, pid in trained}) >= 4
    assert {epoch for _index, epoch, _changes, _pid in items(RPCDataloader(dataset, num_workers=1))} == {6}


@pytest.mark.parametrize("build", ["node", "worker"])
def test_session_that_is_replaced_in_mid_pass_has_what_that_pass_began_with(shared_server, build):
    dataset = RPCDataset(shared_server.address, State, 40, build=build)
    dataset.epoch = 1
    training = iter(RPCDataloader(dataset, num_workers=1, prefetch_factor=1))
    samples = items([next(training)])
    dataset.epoch = 2
    assert {epoch for _index, epoch, _changes, _pid in items(RPCDataloader(dataset, num_workers=1))} == {2}
    os.kill(dataset.session, signal.SIGKILL)
    samples += items(training)
    assert len({pid for *_fields, pid in samples}) == 2
    assert [sample[:2] for sample in samples] == [(index, 1) for index in range(40)]
    assert {epoch for _index, epoch, _changes, _pid in items(RPCDataloader(dataset, num_workers=1))} == {2}


@pytest.mark.parametrize("build", ["node", "worker"])
def test_change_that_fails_raises_and_is_not_applied_later(two_nodes, build):
    dataset = RPCDataset(two_nodes, State, build=build)
    dataset.epoch = 4
    with pytest.raises(ValueError, match="this change is refused") as caught:
        dataset.call_all(datasets.refuse)
    assert "in refuse" in str(caught.value.__cause__)
    assert {sample[1:3] for sample in items(RPCDataloader(dataset))} == {(4, 0)}


# Errors of the constructor


def build_shorter_once(marker):
    return datasets.Numbers(20 - datasets.is_first(marker))


def test_nodes_must_agree_on_the_length(two_nodes, tmp_path):
    with pytest.raises(ValueError, match="dataset build_shorter_once is not the same on all nodes") as caught:
        RPCDataset(two_nodes, build_shorter_once, str(tmp_path / "marker"))
    for address in two_nodes:
        assert re.search(rf"(19|20) on {address}", str(caught.value))


class Chosen(datasets.Numbers):
    """Chooses anew in each process: its order and, if it may be longer, its length."""

    def __init__(self, is_longer):
        super().__init__(50 + is_longer * os.getpid())
        self.order = random.Random(os.getpid()).sample(range(self.size), self.size)

    def __getitem__(self, index):
        return self.order[index % self.size]  # of a length that another process has told


@pytest.mark.parametrize("build", ["node", "worker"])
def test_processes_that_build_another_order_are_named_once(two_nodes, caplog, build):
    dataset = RPCDataset(two_nodes, Chosen, False, build=build)
    for _epoch in range(2):
        list_of_all(RPCDataloader(dataset, 5))
    (text,) = [text for record in caplog.records if "is not the same wherever" in (text := record.getMessage())]
    name = "(worker .* on )?" + "|(worker .* on )?".join(map(re.escape, two_nodes))
    assert re.match(rf"dataset Chosen is not .* is built: order of ({name}) and of ({name}) differ, so samples", text)


def test_workers_that_build_another_length_end_the_pass(shared_server):
    dataset = RPCDataset(shared_server.address, Chosen, True, build="worker")
    with pytest.raises(
        ValueError, match=r"dataset Chosen is not .*: its length is \d+ in worker .*, and \d+ in worker"
    ):
        # Until the second worker is there, too.
        list_of_all(RPCDataloader(dataset, 5, sampler=[0] * 10**6))


def test_workers_that_build_another_length_than_the_one_that_is_asked_end_the_pass(shared_server):
    dataset = RPCDataset(shared_server.address, Chosen, True, build="worker")
    with pytest.raises(ValueError, match=r"dataset Chosen is not .*: its length is"):
        list(RPCDataloader(dataset, 5, num_workers=1))


# Gone with the last reference


def test_dataset_is_let_go_with_its_last_reference(shared_server, gone):
    witness = RPCDataset(shared_server.address, State)
    session = witness.session
    dataset = RPCDataset(shared_server.address, datasets.Holder, gone.path)
    loader = RPCDataloader(dataset, persistent_workers=True)
    assert len(list(loader)) == len(dataset) == 20
    del dataset
    gc.collect()
    assert not gone.nobody_has_it()  # the loader has
    del loader
    gc.collect()
    wait_until(gone.nobody_has_it)
    assert witness.session == session


# Datasets that a fork cannot inherit


def test_dataset_that_starts_threads_is_built_in_every_worker(shared_server, caplog):
    dataset = RPCDataset(shared_server.address, datasets.Threaded)
    loader = RPCDataloader(dataset, batch_size=None)
    for _epoch in range(2):
        assert list(loader) == list(range(0, 40, 2))
    assert dataset[7] == 14
    (record,) = [record for record in caplog.records if "is built in every worker" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert re.match(
        r"dataset Threaded is built in every worker .*: it holds threads, .* on first use$", record.getMessage()
    )


_pool = ThreadPoolExecutor(2)  # as libraries keep one for the whole process


class ReadByPool(datasets.Numbers):
    def __init__(self, path):
        super().__init__(len(list(_pool.map(float, range(20)))))
        self.file = open(path)  # noqa: SIM115  # stays open


def test_workers_can_use_a_pool_of_threads_that_a_session_has_used_before(shared_server, tmp_path):
    (path := tmp_path / "file").touch()
    for _dataset in range(2):
        dataset = RPCDataset(shared_server.address, ReadByPool, str(path))
        for _epoch in range(2):
            assert [int(batch) for batch in RPCDataloader(dataset, num_workers=2)] == list(range(20))


def test_session_in_which_a_constructor_has_left_threads_stays_while_others_need_it(serve, tmp_path, caplog):
    (path := tmp_path / "file").touch()
    address, log = serve("--num-workers", "2").address, str(tmp_path / "log")
    other = RPCDataset(address, State, 10, log)
    RPCDataset(address, ReadByPool, str(path))
    assert len(items(RPCDataloader(other, num_workers=1))) == 10
    assert len(notes(log)) == 1
    assert any("has left threads in a session on" in record.getMessage() for record in caplog.records)


class LeavingThread(datasets.Numbers):
    def __init__(self, path, is_over):
        super().__init__()
        self.file = os.open(path, os.O_RDONLY)
        threading.Thread(target=is_over.wait).start()

    def __del__(self):
        os.close(self.file)


def test_threads_that_a_constructor_leaves_in_the_script_are_told(tmp_path, caplog):
    (path := tmp_path / "file").touch()
    is_over = threading.Event()
    try:
        RPCDataset("local:1", LeavingThread, str(path), is_over)
    finally:
        is_over.set()
    texts = [record.getMessage() for record in caplog.records]
    assert ["the constructor of dataset LeavingThread has left threads in this" in text for text in texts] == [
        False,
        True,
    ]


class Records:
    """Opens its file once, in a cycle, and scales its argument in place."""

    def __init__(self, path, scale, opens):
        self.path, self.scale, self.opens, self.file, self.get = path, scale, opens, None, self.read
        self.scale *= 2
        if opens == "construction":
            self.read(0)

    def read(self, index):
        self.file = self.file or open(self.path, "rb", buffering=0)  # noqa: SIM115  # stays open
        self.file.seek(index)
        time.sleep(0.001)  # let another worker move the position
        return self.file.read(1)[0] * int(self.scale[0])

    def __len__(self):
        return 100 + (self.read(0) if self.opens == "length" else 0)

    def __getitem__(self, index):
        return self.get(index)


@pytest.mark.parametrize("opens", ["construction", "length", "change"])
def test_workers_share_no_file_whenever_it_is_opened(shared_server, tmp_path, caplog, opens):
    (tmp_path / "records").write_bytes(bytes(range(200)))
    for number in range(2):  # the file of the first one may be open yet
        dataset = RPCDataset(shared_server.address, Records, tmp_path / "records", np.ones(9), opens)
        loader = RPCDataloader(dataset, batch_size=None, num_workers=2)
        assert list(loader) == list(range(0, 200, 2))
        assert dataset.read(7) == 14
        assert list(loader) == list(range(0, 200, 2))
        lines = [text for text in caplog.messages if "is built in every" in text]
        assert len(lines) == number + 1
        assert ("after a change, it holds files open" in lines[-1]) == (opens == "change")


@pytest.mark.parametrize("build", ["node", "worker"])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_change_that_draws_random_numbers_is_the_same_everywhere(two_nodes, build, persistent_workers):
    dataset = RPCDataset(two_nodes, Shuffled, 40, build=build)
    loader = RPCDataloader(dataset, batch_size=None, persistent_workers=persistent_workers)
    orders = [list(loader)]
    for _ in range(2):
        orders.append(dataset.shuffle())
        assert list(loader) == orders[-1] not in orders[:-1]


def fail_once(state, *, marker):
    if datasets.is_first(marker):
        raise OSError("the file server is away")
    state.epoch = 7


def test_change_that_failed_once_on_a_node_reaches_workers_that_stay(shared_server, tmp_path):
    dataset = RPCDataset(shared_server.address, State)
    loader = RPCDataloader(dataset, persistent_workers=True)
    assert {sample[1] for sample in items(loader)} == {0}
    (marker := tmp_path / "marker").touch()  # the process that answers does not fail
    dataset.call_all(functools.partial(fail_once, marker=marker))
    marker.unlink()
    with pytest.raises(OSError, match="away"):
        iter(loader)
    assert {sample[1] for sample in items(loader)} == {7}


# Where the workers are


def test_workers_are_those_that_are_named_or_those_of_the_environment(two_nodes, monkeypatch):
    for workers, num_sessions in [(tuple(two_nodes), 2), (iter(two_nodes[:1]), 1), (", ".join(two_nodes), 2)]:
        samples = items_of_all(RPCDataloader(RPCDataset(workers, datasets.Processes), persistent_workers=True))
        assert [sample[0] for sample in samples] == list(range(20))
        assert len({session for _, _, session in samples}) == num_sessions
        monkeypatch.setenv("RPCDATALOADER_WORKERS", two_nodes[0])
    assert RPCDataset(None, State).session == RPCDataset(two_nodes[:1], State).session
    samples = items(RPCDataloader(datasets.Processes()))  # num_workers=0: the environment decides
    assert os.getpid() not in {pid for _, pid, _ in samples}


# Nobody there


def test_dataset_whose_session_has_ended_is_made_again_with_its_changes(shared_server):
    dataset = RPCDataset(shared_server.address, State)
    dataset.epoch = 5
    session, used = dataset.session, session_of(shared_server.address)
    os.kill(session, signal.SIGKILL)
    wait_until(lambda: not used.is_usable, what="news of the end of the session")
    assert dataset.epoch == 5
    assert dataset.session != session
    dataset.epoch = 6
    assert [int(epoch) for _index, epoch, _changes, _pid in RPCDataloader(dataset)] == [6] * 20


def test_arguments_that_the_script_has_changed_are_named(shared_server):
    table = np.zeros((8, 100_000))
    dataset, witness = RPCDataset(shared_server.address, list, table), RPCDataset(shared_server.address, State)
    assert len(dataset) == 8
    table += 1
    os.kill(witness.session, signal.SIGKILL)
    with pytest.raises(ValueError, match="the arguments of dataset list have changed since the first node"):
        list(RPCDataloader(dataset, batch_size=None))


def test_dataset_does_not_change_with_an_equal_one_that_the_script_changes(shared_server):
    address, table, witness = shared_server.address, torch.zeros(8, 3000), RPCDataset(shared_server.address, State)
    batches = iter(RPCDataloader(TensorDataset(table), workers=address))
    next(batches)
    table += 1
    os.kill(witness.session, signal.SIGKILL)
    assert not any(row.any() for (row,) in RPCDataloader(TensorDataset(torch.zeros(8, 3000)), workers=address))


@pytest.mark.usefixtures("impatient")
def test_dataset_whose_nodes_have_gone_says_so(serve):
    server = serve()
    dataset = RPCDataset(server.address, State)
    used = session_of(server.address)
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not used.is_usable, what="news of the end of the session")
    for use in (lambda: dataset[0], lambda: setattr(dataset, "epoch", 1)):
        with pytest.raises(ConnectionLostError, match=f"State is lost with its nodes: {server.address}: .*refused"):
            use()


class Unmeasured:
    def __getitem__(self, index):
        return index


def test_dataset_without_a_length_is_true_as_torchs():
    dataset = RPCDataset("local:1", Unmeasured)
    assert dataset
    with pytest.raises(TypeError, match="has no len"):
        len(dataset)
