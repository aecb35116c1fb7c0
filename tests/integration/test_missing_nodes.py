"""Named node servers that are not there: the others begin, and those join when they come."""

from __future__ import annotations

import re
import time

import pytest

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.client.client import close_client
from rpcdataloader.errors import AuthenticationError, ConnectError, RemoteProtocolError
from tests.conftest import AT_ONCE, wait_until
from tests.integration.crew import wait_for_crew
from tests.integration.datasets import FieldStream
from tests.integration.test_recovery import Hosted, loader_of, samples_of, take


@pytest.fixture(autouse=True)
def impatient(monkeypatch, clean_client):  # noqa: ARG001  # ends after
    monkeypatch.setattr("rpcdataloader.loader.placement.PATIENCE", 0.2)


@pytest.fixture
def first(serve):
    return serve("--num-workers", "2")


@pytest.fixture
def absent(tmp_path):
    """An address at which a server may come."""
    return f"unix:{tmp_path}/socket"


def told(caplog, absent):
    return [text for text in caplog.messages if f"going on without {absent}" in text]


def test_pass_begins_with_those_that_are_there_and_is_joined_by_the_other(serve, first, absent, caplog):
    dataset = RPCDataset([absent, first.address], Hosted, 400)
    loader = RPCDataloader(dataset, workers=None)
    iterator = iter(loader)
    assert take(iterator, 50) == ([*range(50)], {first.pid})
    second = serve("--num-workers", "3", "--host", absent)
    wait_for_crew(iterator, 5)
    assert take(iterator, 150) == ([*range(50, 200)], {first.pid, second.pid})
    assert len(told(caplog, absent)) == 1
    # From then on it is one of them.
    iterator = iter(loader)
    wait_for_crew(iterator, 5)
    assert take(iterator, 400) == ([*range(400)], {first.pid, second.pid})


def test_it_is_waited_for_once(first, absent, caplog):
    workers = [first.address, absent]
    for number in range(3):
        began = time.monotonic()
        loader = RPCDataloader(Hosted(10), workers=workers)
        assert take(iter(loader), 10) == ([*range(10)], {first.pid})
        assert number == 0 or time.monotonic() - began < AT_ONCE
    assert len(told(caplog, absent)) == 1


def test_server_that_comes_in_time_is_no_warning(serve, first, absent, caplog, monkeypatch):
    monkeypatch.setattr("rpcdataloader.loader.placement.PATIENCE", 600.0)
    second = serve("--num-workers", "1", "--host", absent)
    iterator = iter(RPCDataloader(Hosted(200), workers=[absent, first.address]))
    wait_for_crew(iterator, 3)
    assert take(iterator, 200)[1] == {first.pid, second.pid}
    assert told(caplog, absent) == []


def test_each_rank_takes_its_share_of_what_comes(serve, first, absent):
    loaders = [RPCDataloader(Hosted(200), workers=[first.address, absent], partition=(rank, 2)) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        wait_for_crew(iterator, 1)
    serve("--num-workers", "4", "--host", absent)
    for iterator in iterators:
        wait_for_crew(iterator, 3)
        assert take(iterator, 200)[0] == [*range(200)]


def test_streams_are_as_many_as_the_workers_at_the_beginning(serve, first, absent):
    undisturbed = [samples_of(batch) for batch in loader_of(FieldStream(), first.address)]
    batches = []
    for number, batch in enumerate(loader_of(FieldStream(), [first.address, absent])):
        batches.append(samples_of(batch))
        if number == 1:
            serve("--num-workers", "4", "--host", absent)
    assert batches == undisturbed


@pytest.mark.parametrize("use", ["dataset", "loader"])
def test_enough_workers_are_waited_for(serve, first, absent, caplog, use):
    begun = []

    def start():
        begun.append(serve("--num-workers", "2", "--host", absent))

    monkey = pytest.MonkeyPatch()
    # When the first one is there, and found to be too few.
    monkey.setattr("rpcdataloader.loader.placement.share_of", _and_then(start))
    with monkey.context():
        workers = [first.address, absent]
        if use == "dataset":
            dataset = RPCDataset(workers, Hosted, 200, min_workers=4)
            iterator = iter(RPCDataloader(dataset))
        else:
            iterator = iter(RPCDataloader(Hosted(200), workers=workers, min_workers=4))
    monkey.undo()
    wait_for_crew(iterator, 4)
    assert take(iterator, 200) == ([*range(200)], {first.pid, begun[0].pid})
    assert told(caplog, absent) == []


def _and_then(start):
    from rpcdataloader.client.sharing import share_of

    def share(*args, **options):
        nonlocal start
        found = share_of(*args, **options)
        start, begin = None, start
        if begin is not None:
            begin()
        return found

    return share


@pytest.mark.parametrize("use", ["dataset", "loader"])
def test_too_few_workers_are_an_error_with_numbers(first, absent, monkeypatch, use):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "0.5")
    close_client()
    text = r"min_workers=3, but 2 workers were there for this process within 0.5 s; missing: " + absent
    workers = [first.address, absent]
    with pytest.raises(ConnectError, match=text):
        iter(RPCDataloader(Hosted(10), workers=workers, min_workers=3)) if use == "loader" else RPCDataset(
            workers, Hosted, 10, min_workers=3
        )


def test_workers_of_a_register_are_waited_for_too(serve, tmp_path, monkeypatch):
    where, begun = f"{tmp_path}/register", []
    options = "--num-workers", "2", "--register", where
    begun.append(serve(*options))
    monkeypatch.setattr("rpcdataloader.loader.placement.share_of", _and_then(lambda: begun.append(serve(*options))))
    iterator = iter(RPCDataloader(Hosted(200), workers=f"@{where}", min_workers=4))
    wait_for_crew(iterator, 4)
    assert take(iterator, 200) == ([*range(200)], {server.pid for server in begun})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": "local:2", "min_workers": 2}, "name them in workers="),
        ({"min_workers": 2}, "name them in workers="),
        ({"workers": "host:1", "min_workers": -1}, "min_workers must be 0 or more, but is -1"),
        ({"workers": "host:1", "min_workers": 4, "num_workers": 2}, "num_workers=2 and min_workers=4 contradict"),
    ],
)
def test_numbers_that_contradict_the_rest_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RPCDataloader([1, 2, 3], **options)


def test_server_that_refuses_this_client_is_an_error_and_not_missing(serve, first, tmp_path):
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("another secret of sixteen characters")
    other = serve("--token-file", str(token))
    with pytest.raises(AuthenticationError, match=other.address):
        iter(RPCDataloader(Hosted(10), workers=[first.address, other.address]))


def test_server_of_another_python_is_left_out_with_a_warning(serve, first, caplog):
    other = serve(before="import platform; platform.python_version = lambda: '3.9.1'")
    loader = RPCDataloader(Hosted(10), workers=[other.address, first.address])
    for _epoch in range(2):
        assert take(iter(loader), 10) == ([*range(10)], {first.pid})
    [text] = [text for text in caplog.messages if "going on without" in text]
    assert re.search(
        f"going on without {other.address}: the node server .* runs CPython 3.9, .*; use the same minor", text
    )
    assert not [text for text in caplog.messages if "is no longer used" in text]
    with pytest.raises(RemoteProtocolError, match=r"runs CPython 3\.9"):
        iter(RPCDataloader(Hosted(10), workers=other.address))


def test_nothing_is_left_of_the_search_when_the_pass_is_over(first, absent):
    iterator = iter(RPCDataloader(Hosted(100), workers=[first.address, absent]))
    next(iterator)
    del iterator
    wait_until(lambda: len(first.processes()) == 1, what="the end of its workers")


def test_only_server_may_come_when_the_time_is_over(monkeypatch):
    # The session itself still has its own time to connect.
    monkeypatch.setattr("rpcdataloader.loader.placement.connect_timeout", lambda: 0.0)
    loader = RPCDataloader(RPCDataset("local:1", Hosted, 4))
    assert len(list(loader)) == 4
