"""Node servers that join and leave in the middle of an epoch."""

from __future__ import annotations

import signal

import pytest

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import ConnectError
from tests.conftest import wait_until
from tests.integration import datasets
from tests.integration.crew import wait_for_crew
from tests.integration.datasets import FieldStream
from tests.integration.test_recovery import Hosted, loader_of, samples_of, take


@pytest.fixture
def register(serve, tmp_path, monkeypatch):
    """Start a server that registers; clients look for those more often than usual."""
    monkeypatch.setattr("rpcdataloader.client.register.Register.pause", 0.05)
    directory = str(tmp_path / "register")

    def start(*options):
        return serve("--num-workers", "2", "--register", directory, *options)

    start.workers = f"@{directory}"
    return start


def test_servers_that_register_in_an_epoch_get_work_and_those_that_drain_lose_nothing(register):
    first = register()
    iterator = iter(RPCDataloader(RPCDataset(register.workers, Hosted, 400)))
    assert take(iterator, 50) == ([*range(50)], {first.pid})
    second = register()
    wait_for_crew(iterator, 4)
    assert take(iterator, 100) == ([*range(50, 150)], {first.pid, second.pid})
    first.signal(signal.SIGTERM)
    wait_until(lambda: not first.processes(), what="end of its workers")
    indices, _pids = take(iterator, 20)
    assert indices == [*range(150, 170)]
    assert take(iterator, 50) == ([*range(170, 220)], {second.pid})
    assert first.wait() == 0
    third = register()
    wait_for_crew(iterator, 4)
    assert take(iterator, 400) == ([*range(220, 400)], {second.pid, third.pid})


def test_next_epoch_begins_with_what_is_registered_then(register):
    first = register()
    loader = RPCDataloader(RPCDataset(register.workers, Hosted, 100))
    assert take(iter(loader), 100)[1] == {first.pid}
    second = register()
    first.signal(signal.SIGKILL)
    first.wait()
    indices, pids = take(iter(loader), 100)
    assert indices == [*range(100)]
    assert pids == {second.pid}


def test_persistent_workers_are_joined_by_others_too(register):
    first = register()
    loader = RPCDataloader(RPCDataset(register.workers, Hosted, 100), persistent_workers=True)
    iterator = iter(loader)
    take(iterator, 100)
    second = register()
    wait_for_crew(iterator, 4)
    assert take(iter(loader), 100) == ([*range(100)], {first.pid, second.pid})


def test_each_rank_gets_its_share_of_a_server_that_joins(register):
    register()
    dataset = RPCDataset(register.workers, Hosted, 300)
    iterators = [iter(RPCDataloader(dataset, partition=(rank, 2))) for rank in range(2)]
    for iterator in iterators:
        wait_for_crew(iterator, 1)
    register()
    for iterator in iterators:
        wait_for_crew(iterator, 2)
        assert take(iterator, 300)[0] == [*range(300)]


def test_number_of_workers_stays_what_was_asked_for(register):
    register()
    iterator = iter(RPCDataloader(RPCDataset(register.workers, Hosted, 300), num_workers=3))
    wait_for_crew(iterator, 2)
    register()
    wait_for_crew(iterator, 3)
    assert take(iterator, 300)[0] == [*range(300)]


def test_streams_of_a_server_that_leaves_go_on_elsewhere(register):
    first = register()
    undisturbed = [samples_of(batch) for batch in loader_of(FieldStream(), register.workers, num_workers=2)]
    batches = []
    for number, batch in enumerate(loader_of(FieldStream(), register.workers, num_workers=2)):
        batches.append(samples_of(batch))
        if number == 3:
            register()
            first.signal(signal.SIGTERM)
    assert batches == undisturbed


def test_workers_can_be_added_and_removed_by_hand(serve):
    servers = [serve("--num-workers", "1") for _ in range(3)]
    loader = RPCDataloader(Hosted(300), workers=servers[0].address)
    iterator = iter(loader)
    assert take(iterator, 20)[1] == {servers[0].pid}
    loader.add_workers([server.address for server in servers[1:]])
    wait_for_crew(iterator, 3)
    assert take(iterator, 100) == ([*range(20, 120)], {server.pid for server in servers})
    loader.remove_workers(f"{servers[0].address}, {servers[1].address}")
    wait_for_crew(iterator, 1)
    take(iterator, 20)
    assert take(iterator, 300) == ([*range(140, 300)], {servers[2].pid})
    assert take(iter(loader), 300) == ([*range(300)], {servers[2].pid})
    loader.add_workers(servers[0].address)
    iterator = iter(loader)
    wait_for_crew(iterator, 2)
    assert take(iterator, 300) == ([*range(300)], {servers[0].pid, servers[2].pid})


def test_directory_that_is_added_is_followed_until_it_is_removed(serve, register):
    named, other = serve("--num-workers", "1"), serve("--num-workers", "1")
    loader = RPCDataloader(Hosted(400), workers=named.address)
    iterator = iter(loader)
    first = register()
    loader.add_workers(register.workers)
    wait_for_crew(iterator, 3)
    second = register()
    wait_for_crew(iterator, 5)
    assert take(iterator, 100) == ([*range(100)], {named.pid, first.pid, second.pid})
    first.signal(signal.SIGTERM)
    wait_for_crew(iterator, 3)
    loader.add_workers(other.address)
    wait_for_crew(iterator, 4)
    loader.remove_workers([other.address, named.address])
    wait_for_crew(iterator, 2)
    take(iterator, 40)
    assert take(iterator, 400) == ([*range(140, 400)], {second.pid})
    loader.add_workers(named.address)
    iterator = iter(loader)
    wait_for_crew(iterator, 3)
    assert take(iterator, 20)[1] == {named.pid, second.pid}
    loader.remove_workers(register.workers)
    wait_for_crew(iterator, 1)
    register()
    take(iterator, 20)
    assert take(iterator, 400) == ([*range(40, 400)], {named.pid})
    assert take(iter(loader), 400) == ([*range(400)], {named.pid})


def test_server_that_was_removed_can_be_added_again_in_the_same_epoch(serve):
    servers = [serve("--num-workers", "1") for _ in range(2)]
    loader = RPCDataloader(Hosted(300), workers=[server.address for server in servers])
    iterator = iter(loader)
    wait_for_crew(iterator, 2)
    loader.remove_workers(servers[1].address)
    wait_for_crew(iterator, 1)
    loader.add_workers(servers[1].address)
    wait_for_crew(iterator, 2)
    assert take(iterator, 300) == ([*range(300)], {server.pid for server in servers})


@pytest.mark.usefixtures("impatient")
def test_wrong_workers_to_add_or_remove_are_named(shared_server):
    address = shared_server.address
    loader = RPCDataloader(datasets.Numbers(), workers=address)
    with pytest.raises(ValueError, match=f"this loader has {address} already"):
        loader.add_workers(address)
    with pytest.raises(ValueError, match=r"does not have node07:1; it has "):
        loader.remove_workers("node07:1")
    with pytest.raises(ValueError, match="would have no workers"):
        loader.remove_workers([address])
    with pytest.raises(ValueError, match="expected node servers as host:port, got local:2"):
        loader.add_workers("local:2")
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1: connection refused"):
        loader.add_workers("127.0.0.1:1")
    assert [int(number) for number in loader] == list(range(20))
    for loader in RPCDataloader(datasets.Numbers()), RPCDataloader(datasets.Numbers(), num_workers=1):
        with pytest.raises(ValueError, match="are not on node servers"):
            loader.add_workers(address)
