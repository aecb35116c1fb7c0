"""Workers and nodes that die during an epoch: the same batches come, in the same order, each once."""

from __future__ import annotations

import itertools
import os
import re
import signal

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.client.client import close_client
from rpcdataloader.errors import ConnectionLostError, RPCTimeoutError
from tests.conftest import TIMEOUT_SCALE, is_running, wait_until
from tests.integration import datasets
from tests.integration.crew import wait_for_crew
from tests.integration.datasets import Fields, FieldStream, StatefulFieldStream, draw


class DeadlyStream(IterableDataset):
    """One part kills whoever reads its third sample."""

    def __iter__(self):
        part = get_worker_info().id
        for number in range(6):
            if part == 1 and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield part * 10 + number


@pytest.fixture(autouse=True)
def short_searches(monkeypatch):
    """Nodes that are gone are looked for more often than usual."""
    monkeypatch.setattr("rpcdataloader.plan.roster.MAX_PAUSE", 0.2)


@pytest.fixture
def workers(shared_server):
    return shared_server.address


def loader_of(dataset, workers, **options):
    generator = torch.Generator().manual_seed(3)
    return RPCDataloader(dataset, batch_size=3, workers=workers, generator=generator, **options)


def samples_of(batch):
    return batch[0].tolist()


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize(
    "dataset", [Fields(60), FieldStream(), StatefulFieldStream()], ids=lambda dataset: type(dataset).__name__
)
def test_batches_are_the_same_when_workers_are_killed(workers, caplog, dataset, persistent_workers):
    undisturbed = [samples_of(batch) for batch in loader_of(dataset, workers, num_workers=2)]
    loader = loader_of(dataset, workers, num_workers=2, persistent_workers=persistent_workers)
    batches, victims = [], []
    for number, batch in enumerate(loader):
        batches.append(samples_of(batch))
        pid = int(batch[1][-1])
        if number in (1, 2, 9) and pid not in victims:
            os.kill(pid, signal.SIGKILL)
            victims.append(pid)
            if number == 1:
                news = f"(pid {pid}) on {workers} was killed by SIGKILL"
                wait_until(lambda news=news: any(news in line for line in caplog.messages))
    assert batches == undisturbed
    assert len(victims) >= 2


def test_stream_with_a_state_goes_on_and_is_not_read_again(workers):
    firsts = []
    for number, (_fields, pids, first) in enumerate(loader_of(StatefulFieldStream(), workers, num_workers=1)):
        firsts += first.tolist()
        if number == 3:
            os.kill(int(pids[0]), signal.SIGKILL)
    assert set(firsts[:12]) == {0}
    assert firsts[-1] >= 12


@pytest.mark.parametrize(
    ("how", "reason", "persistent_workers"),
    [
        ("SIGKILL", "was killed by SIGKILL", False),
        ("SIGSEGV", "was killed by SIGSEGV", True),
        ("exit", "exited with status 7", False),
    ],
)
def test_batch_that_kills_every_worker_is_an_error_and_the_others_come(workers, how, reason, persistent_workers):
    loader = RPCDataloader(
        datasets.Deadly(40, 18, how), workers=workers, batch_size=4, persistent_workers=persistent_workers
    )
    for _epoch in range(2):
        iterator = iter(loader)
        seen = list(itertools.chain.from_iterable(next(iterator).tolist() for _ in range(4)))
        with pytest.raises(ConnectionLostError) as caught:
            next(iterator)
        text = str(caught.value)
        assert text.startswith("batch 4 (indices [16, 17, 18, 19]) has ended 3 workers in a row: worker ")
        assert text.count(reason) == 3
        assert text.count(f"on {workers}") == 3
        seen += itertools.chain.from_iterable(batch.tolist() for batch in iterator)
        assert seen == [*range(16), *range(20, 40)]


def test_number_of_retries_can_be_chosen(workers, tmp_path):
    dataset = datasets.Deadly(8, 5, "SIGKILL", str(tmp_path / "marker"))
    with pytest.raises(ConnectionLostError, match="has ended 1 workers in a row"):
        list(RPCDataloader(dataset, workers=workers, max_retries=1))
    assert [int(batch) for batch in RPCDataloader(dataset, workers=workers, max_retries=1)] == list(range(8))
    with pytest.raises(ValueError, match="max_retries must be at least 1, but is 0"):
        RPCDataloader(dataset, workers=workers, max_retries=0)


def test_stream_that_kills_every_worker_ends_with_an_error_and_the_others_go_on(workers):
    loader = RPCDataloader(DeadlyStream(), workers=workers, batch_size=1, num_workers=2)
    iterator = iter(loader)
    seen = [int(next(iterator)) for _ in range(5)]
    with pytest.raises(ConnectionLostError, match="has ended 3 workers in a row"):
        next(iterator)
    seen += [int(batch) for batch in iterator]
    assert seen == [0, 10, 1, 11, 2, 3, 4, 5]
    state = loader.state_dict()
    assert state["finished"]
    assert [num_samples for num_samples, *_ in state["streams"]] == [6, 2]


@pytest.mark.parametrize("dataset", [Fields(60), FieldStream()], ids=lambda dataset: type(dataset).__name__)
def test_node_that_is_lost_costs_no_batch(serve, shared_server, dataset):
    lost = serve("--num-workers", "2")
    addresses = [lost.address, shared_server.address]
    undisturbed = [samples_of(batch) for batch in loader_of(dataset, addresses, num_workers=4)]
    batches = []
    for number, batch in enumerate(loader_of(dataset, addresses, num_workers=4)):
        batches.append(samples_of(batch))
        if number == 3:
            lost.signal(signal.SIGKILL)
    assert batches == undisturbed


def test_changes_of_the_dataset_reach_the_worker_that_takes_over(workers):
    dataset = RPCDataset(workers, datasets.State)
    dataset.epoch = 7
    samples = []
    for number, (index, epoch, _changes, pid) in enumerate(RPCDataloader(dataset, num_workers=1)):
        samples.append((int(index), int(epoch)))
        if number == 4:
            os.kill(int(pid), signal.SIGKILL)
    assert samples == [(index, 7) for index in range(20)]


def port_of(server):
    return server.address.rpartition(":")[2]


@pytest.mark.parametrize("dataset", [Fields(60), FieldStream()], ids=lambda dataset: type(dataset).__name__)
def test_node_that_is_started_again_goes_on_where_it_was(serve, dataset):
    server = serve("--num-workers", "2")
    undisturbed = [samples_of(batch) for batch in loader_of(dataset, server.address, num_workers=2)]
    batches = []
    for number, batch in enumerate(loader_of(dataset, server.address, num_workers=2)):
        batches.append(samples_of(batch))
        if number == 3:
            server.signal(signal.SIGKILL)
            server.wait()
            serve("--num-workers", "2", "--port", port_of(server))
    assert batches == undisturbed


def test_session_that_is_killed_begins_again_with_the_changes_of_the_dataset(workers):
    dataset = RPCDataset(workers, datasets.State)
    dataset.epoch = 7
    samples = []
    for number, (index, epoch, _changes, _pid) in enumerate(RPCDataloader(dataset, num_workers=2)):
        samples.append((int(index), int(epoch)))
        if number == 4:
            os.kill(dataset.session, signal.SIGKILL)
    assert samples == [(index, 7) for index in range(20)]


class Hosted(datasets.Numbers):
    """Which node server a sample comes from."""

    def __getitem__(self, index):
        with open(f"/proc/{os.getppid()}/stat") as file:
            return index, int(file.read().rpartition(")")[2].split()[1])


def take(iterator, count):
    samples = [tuple(map(int, sample)) for sample in itertools.islice(iterator, count)]
    return [index for index, _pid in samples], {pid for _index, pid in samples}


def test_epoch_begins_with_the_nodes_that_are_there_and_takes_in_those_that_come_back(serve):
    lost, other = [serve("--num-workers", "1") for _ in range(2)]
    loader = RPCDataloader(RPCDataset([lost.address, other.address], Hosted, 200))
    iterator = iter(loader)
    wait_for_crew(iterator, 2)
    assert take(iterator, 200) == ([*range(200)], {lost.pid, other.pid})
    lost.signal(signal.SIGKILL)
    lost.wait()
    iterator = iter(loader)
    assert take(iterator, 50) == ([*range(50)], {other.pid})
    again = serve("--num-workers", "1", "--port", port_of(lost))
    wait_for_crew(iterator, 2)
    assert take(iterator, 200) == ([*range(50, 200)], {again.pid, other.pid})


def test_without_a_worker_the_error_tells_what_happened_to_each_node(serve):
    servers = [serve("--num-workers", "1") for _ in range(2)]
    iterator = iter(loader_of(Fields(1_000_000), [server.address for server in servers], reconnect_timeout=0.5))
    next(iterator)
    for server in servers:
        server.signal(signal.SIGKILL)
    with pytest.raises(ConnectionLostError) as caught:
        list(iterator)
    text = str(caught.value)
    assert "none came back within 0.5 s (reconnect_timeout)" in text
    assert all(f"{server.address}: " in text for server in servers)


def test_reconnect_timeout_is_checked(workers):
    with pytest.raises(ValueError, match="reconnect_timeout must be a number of seconds, 0 or more, but is -1"):
        RPCDataloader(datasets.Numbers(), workers=workers, reconnect_timeout=-1)


class Hanging(datasets.Numbers):
    """Some samples take for ever; the first time, or always."""

    def __init__(self, folder, hanging=(), always=()):
        super().__init__(40)
        self.folder = folder
        self.hanging = hanging
        self.always = always

    def __getitem__(self, index):
        if index in self.always or (index in self.hanging and is_first(self.folder, index)):
            hang_in_there()
        return index, os.getpid()


def hang_in_there():
    while True:
        signal.pause()


def is_first(folder, index):
    try:
        os.mkdir(os.path.join(folder, str(index)))
    except FileExistsError:
        return False
    return True


def indices_of(loader):
    return [int(index) for index, _pid in loader]


@pytest.fixture
def soon_late(monkeypatch):
    """A batch is late by far after a tenth of a second."""
    monkeypatch.setattr("rpcdataloader.plan.workers._LATE_SECONDS", 0.1)


@pytest.mark.usefixtures("soon_late")
def test_batch_that_hangs_is_loaded_by_another_worker(workers, tmp_path):
    loader = RPCDataloader(Hanging(str(tmp_path), hanging=[20]), workers=workers, num_workers=2)
    assert indices_of(loader) == [*range(40)]


@pytest.mark.usefixtures("soon_late")
def test_worker_that_is_stopped_holds_nobody_up(workers, tmp_path):
    samples = []
    for index, pid in RPCDataloader(Hanging(str(tmp_path)), workers=workers, num_workers=2):
        samples.append(int(index))
        if index == 15:
            os.kill(int(pid), signal.SIGSTOP)
    assert samples == [*range(40)]
    wait_until(lambda: not is_running(int(pid)), what="end of the stopped worker")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_that_takes_too_long_is_ended_and_the_batch_given_to_another(workers, tmp_path, num_workers, caplog):
    dataset = Hanging(str(tmp_path), hanging=[3])
    loader = RPCDataloader(dataset, workers=workers, num_workers=num_workers, task_timeout=0.5)
    assert indices_of(loader) == [*range(40)]
    wait_until(lambda: "in hang_in_there" in caplog.text, what="stack in the log")
    text = "batch 3 (indices [3]) took longer than 0.5 s (task_timeout) on worker"
    record = next(one for one in caplog.records if text in one.getMessage() and one.name == "rpcdataloader.loader")
    assert record.threadName == "rpcdl-report", "neither the loop nor a receiver waits for the stack"


def test_batch_that_always_takes_too_long_is_an_error_with_a_stack_and_the_others_come(workers, tmp_path):
    loader = RPCDataloader(Hanging(str(tmp_path), always=[3]), workers=workers, num_workers=2, task_timeout=0.3)
    iterator = iter(loader)
    assert [int(next(iterator)[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RPCTimeoutError) as caught:
        next(iterator)
    text = str(caught.value)
    assert text.startswith("batch 3 (indices [3]) has ended 3 workers in a row: ")
    # Where the machine stalls, a worker may end for a batch whose answer is late, while it loads this one.
    assert len(re.findall(r"was ended: batch \d+ \(indices \[\d+\]\) took longer than 0.3 s", text)) == 3
    assert "was ended: batch 3 (indices [3]) took longer than 0.3 s" in text
    assert "in hang_in_there" in text
    assert indices_of(iterator) == [*range(4, 40)]


class HangingStream(IterableDataset):
    def __init__(self, folder):
        self.folder = folder

    def __iter__(self):
        part = get_worker_info().id
        for number in range(10):
            if part == 1 and number == 4 and is_first(self.folder, number):
                hang_in_there()
            yield part * 10 + number


def test_stream_that_hangs_goes_on_in_another_worker(workers, tmp_path):
    loader = RPCDataloader(HangingStream(str(tmp_path)), workers=workers, num_workers=2, task_timeout=0.5)
    assert [int(sample) for sample in loader] == list(itertools.chain(*zip(range(10), range(10, 20), strict=True)))


class Unreliable(datasets.Numbers):
    """Samples that raise so many times before they are there."""

    def __init__(self, folder, failures):
        super().__init__(12)
        self.folder = folder
        self.failures = failures

    def __getitem__(self, index):
        for attempt in range(self.failures.get(index, 0)):
            if is_first(self.folder, f"{index}-{attempt}"):
                raise ConnectionResetError(f"sample {index}, attempt {attempt}")
        return index, draw()


def test_exceptions_that_may_pass_are_tried_again_with_the_same_random_numbers(workers, tmp_path):
    def samples(failures):
        dataset = Unreliable(str(tmp_path), failures)
        return [
            [int(index), *map(float, drawn)] for index, drawn in loader_of_one(dataset, workers, retry_on=[OSError])
        ]

    assert samples({2: 1, 5: 2, 11: 1}) == samples({})


def loader_of_one(dataset, workers, **options):
    return RPCDataloader(dataset, workers=workers, num_workers=2, generator=torch.Generator().manual_seed(1), **options)


def test_exception_that_does_not_pass_is_raised_after_some_tries(workers, tmp_path):
    iterator = iter(loader_of_one(Unreliable(str(tmp_path), {4: 99}), workers, retry_on=OSError, max_retries=1))
    for _ in range(4):
        next(iterator)
    with pytest.raises(ConnectionResetError, match="sample 4, attempt 1"):
        next(iterator)
    assert int(next(iterator)[0]) == 5


def test_other_exceptions_are_raised_at_once(workers, tmp_path):
    iterator = iter(loader_of_one(Unreliable(str(tmp_path), {0: 99}), workers, retry_on=LookupError))
    with pytest.raises(ConnectionResetError, match="sample 0, attempt 0"):
        next(iterator)


@pytest.mark.usefixtures("clean_client")
def test_death_in_an_embedded_pool_is_told_once_and_a_pool_that_is_killed_is_started_again(caplog, capfd):
    iterator = iter(RPCDataloader(datasets.Processes(100), workers="local:1"))
    victim = int(next(iterator)[1])
    os.kill(victim, signal.SIGKILL)
    assert len(list(iterator)) == 99
    iterator = iter(RPCDataloader(Hosted(100), workers="local:1"))
    indices, (server,) = take(iterator, 20)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not is_running(server))
    indices += take(iterator, 100)[0]
    assert indices == [*range(100)]
    assert "the embedded pool has ended (exit status -9); starting it again" in caplog.text
    close_client()  # so that the pool has said everything
    assert sum(f"(pid {victim}) on" in message for message in caplog.messages) == 1
    assert "SIGKILL" not in capfd.readouterr().err


def test_loss_of_a_node_and_its_return_are_told_once_with_the_rank(serve, caplog):
    lost, other = [serve("--num-workers", "6") for _ in range(2)]
    iterator = iter(RPCDataloader(RPCDataset([lost.address, other.address], Hosted, 10_000), partition=(1, 3)))
    wait_for_crew(iterator, 4)
    next(iterator)
    lost.signal(signal.SIGKILL)
    lost.wait()
    wait_for_crew(iterator, 2)
    (news,) = [message for message in caplog.messages if "going on" in message]
    assert news.startswith("[rank 1 of 3] going on with 2 of 4 workers: ")
    assert news.count(lost.address) == 1
    serve("--num-workers", "6", "--port", port_of(lost))
    wait_for_crew(iterator, 4)
    assert [message for message in caplog.messages if "is back" in message] == [f"[rank 1 of 3] {lost.address} is back"]


def test_node_server_that_does_not_answer_any_more_costs_no_batch(serve, monkeypatch):
    frozen, other = [serve("--num-workers", "1") for _ in range(2)]
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(1.5 * TIMEOUT_SCALE))
    addresses = [frozen.address, other.address]
    undisturbed = [samples_of(batch) for batch in loader_of(FieldStream(), addresses)]
    batches, victims = [], []
    try:
        for batch in loader_of(FieldStream(), addresses):
            batches.append(samples_of(batch))
            worker = int(batch[1][-1])
            if not victims and worker in frozen.processes():
                # Its session sees its worker die, and nobody takes the connection of another one.
                frozen.signal(signal.SIGSTOP)
                os.kill(worker, signal.SIGKILL)
                victims.append(worker)
    finally:
        frozen.signal(signal.SIGCONT)
    assert victims
    assert batches == undisturbed
