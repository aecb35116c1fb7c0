"""Node servers that join and leave in the middle of an epoch."""

from __future__ import annotations

import signal

import pytest

from rpcdataloader import RPCDataloader, RPCDataset
from tests.conftest import wait_until
from tests.integration.crew import wait_for_crew
from tests.integration.datasets import FieldStream
from tests.integration.test_recovery import Hosted, loader_of, samples_of, take


@pytest.fixture
def register(serve, tmp_path, monkeypatch):
    """Start a server that registers; clients look for those more often than usual."""
    monkeypatch.setattr("rpcdataloader.wire.register.Register.pause", 0.05)
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


def test_mixture_of_places_is_used_and_what_comes_and_goes_is_followed(serve, register):
    named = serve("--num-workers", "1")
    first = register()
    loader = RPCDataloader(Hosted(400), workers=[named.address, register.workers, "local:2"])
    iterator = iter(loader)
    wait_for_crew(iterator, 5)
    indices, pids = take(iterator, 100)
    assert indices == [*range(100)]
    assert len(pids) == 3
    assert pids > {named.pid, first.pid}
    second = register()
    wait_for_crew(iterator, 7)
    first.signal(signal.SIGTERM)
    wait_for_crew(iterator, 5)
    indices, left = take(iterator, 400)
    assert indices == [*range(100, 400)]
    assert left - {first.pid} == pids - {first.pid} | {second.pid}
    iterator = iter(loader)
    wait_for_crew(iterator, 5)
    assert take(iterator, 400) == ([*range(400)], left - {first.pid})


def test_named_server_of_a_mixture_joins_when_it_comes(serve, register, monkeypatch):
    monkeypatch.setattr("rpcdataloader.loader.placement.PATIENCE", 0.1)
    there = register()
    gone = serve("--num-workers", "1")
    gone.stop()
    iterator = iter(RPCDataloader(Hosted(300), workers=f"{gone.address},{register.workers}"))
    wait_for_crew(iterator, 2)
    named = serve("--num-workers", "1", "--port", gone.address.rpartition(":")[2])
    wait_for_crew(iterator, 3)
    assert take(iterator, 300) == ([*range(300)], {there.pid, named.pid})
