"""Node servers that are not there yet, join, and leave in the middle of an epoch."""

from __future__ import annotations

import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.__main__ import main
from rpcdataloader.errors import AuthenticationError, ConnectError, RemoteProtocolError
from rpcdataloader.wire.register import Register
from tests.behaviour.test_recovery import port_of, take
from tests.conftest import close_client, wait_until
from tests.support.clocks import shorten
from tests.support.crew import wait_for_crew, workers_of
from tests.support.datasets import Hosted
from tests.support.streams import Parts


@pytest.fixture(autouse=True)
def impatient(monkeypatch, clean_client):  # noqa: ARG001  # ends after
    shorten(monkeypatch, "register")


@pytest.fixture
def register(serve, tmp_path):
    """Start a server that registers."""
    directory = str(tmp_path / "register")

    def start(*options):
        return serve("--num-workers", "2", "--register", directory, *options)

    start.workers = f"@{directory}"
    return start


@pytest.fixture
def first(serve):
    return serve("--num-workers", "2")


@pytest.fixture
def absent(tmp_path, monkeypatch):
    """An address at which a server may come."""
    shorten(monkeypatch, "patience")
    return f"unix:{tmp_path}/socket"


def told(caplog, absent):
    return [text for text in caplog.messages if f"going on without {absent}" in text]


# Servers that register


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


def test_loaders_of_a_process_share_their_looks(register, monkeypatch):
    looks, look = [], Register._list
    monkeypatch.setattr(Register, "pause", 0.2)
    monkeypatch.setattr(Register, "_list", lambda self: (looks.append(time.monotonic()), look(self))[1])
    register()
    loaders = [RPCDataloader(RPCDataset(register.workers, Hosted, 8), persistent_workers=True) for _ in range(4)]
    assert [len(list(loader)) for loader in loaders] == [8] * 4
    looks.clear()
    wait_until(lambda: len(looks) > 5)
    assert looks[5] - looks[0] > 4 * 0.2


def test_resumed_stream_goes_on_where_another_server_registers(register):
    loader, resumed = (RPCDataloader(Parts([40]), None, workers=register.workers, num_workers=1) for _ in range(2))
    first = register()
    assert next(iter(loader)) == 0
    resumed.load_state_dict(loader.state_dict())
    iterator = iter(resumed)
    assert next(iterator) == 1
    register()
    assert first.end(signal.SIGTERM) == 0
    assert list(iterator) == list(range(2, 40))


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
    assert first.wait() == 0
    indices, left = take(iterator, 400)
    assert indices == [*range(100, 400)]
    assert left - {first.pid} == pids - {first.pid} | {second.pid}
    iterator = iter(loader)
    wait_for_crew(iterator, 5)
    assert take(iterator, 400) == ([*range(400)], left - {first.pid})


class Resolver:
    """Makes up the answers for the name ``pool``.

    Attributes:
        hosts: Addresses of the next answer.
    """

    def __init__(self, monkeypatch):
        self.hosts, self.num_asked, self._resolve = [], 0, socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, host, *args, **options):
        hosts = [host]
        if host == "pool":
            hosts, self.num_asked = self.hosts, self.num_asked + 1
            if not hosts:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [info for each in hosts for info in self._resolve(each, *args, **options)]

    def say(self, *hosts):
        """Answer so from now on; returns when a pass has taken that in."""
        self.hosts = [*hosts]
        enough = self.num_asked + 3
        wait_until(lambda: self.num_asked >= enough)


@pytest.fixture
def behind_a_name(serve, monkeypatch):
    """A resolver, and two servers at the same port."""
    shorten(monkeypatch, "names")
    first = serve("--num-workers", "1", "--host", "127.0.0.2", "--port", "0")
    second = serve("--num-workers", "1", "--host", "127.0.0.3", "--port", port_of(first))
    return Resolver(monkeypatch), first, second


def test_servers_behind_a_name_are_followed(behind_a_name, monkeypatch, capsys):
    resolver, first, second = behind_a_name
    resolver.hosts, port = ["127.0.0.2"], port_of(first)
    pool = f"dns://pool:{port}"
    dataset = RPCDataset(f"pool:{port}", Hosted, 300)
    resolver.hosts = []  # for workers of this session, nobody asks the resolver again
    assert take(iter(RPCDataloader(dataset)), 300) == ([*range(300)], {first.pid})
    resolver.hosts = ["127.0.0.2"]
    iterator = iter(RPCDataloader(RPCDataset(pool, Hosted, 300)))
    assert take(iterator, 50) == ([*range(50)], {first.pid})
    resolver.hosts = ["127.0.0.2", "127.0.0.3"]
    wait_for_crew(iterator, 2)
    assert take(iterator, 150) == ([*range(50, 200)], {first.pid, second.pid})
    resolver.hosts = ["127.0.0.3"]
    first.signal(signal.SIGTERM)
    wait_for_crew(iterator, 1)
    take(iterator, 50)  # what was on its way
    assert take(iterator, 50) == ([*range(250, 300)], {second.pid})
    assert main(["status", pool]) == 0
    told = capsys.readouterr().out
    assert second.address in told
    assert first.address not in told
    resolver.hosts = []
    main(["status", pool])
    assert f"{pool}: no node server found\nignored pool: Name or service not known\n" in capsys.readouterr().out
    close_client()
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "1")
    with pytest.raises(
        ConnectError, match=r"behind the name pool, and none came within 1 s .pool: Name or service not"
    ):
        RPCDataset(pool, Hosted)


def test_server_that_a_resolver_leaves_out_stays_until_it_ends_and_is_then_not_sought(
    behind_a_name, serve, monkeypatch, caplog
):
    """As a pod that is not ready for a moment, and one that is deleted."""
    shorten(monkeypatch, "search")
    resolver, first, second = behind_a_name
    resolver.hosts, port = ["127.0.0.2", "127.0.0.3"], port_of(first)
    iterator = iter(RPCDataloader(RPCDataset(f"dns://pool:{port}", Hosted, 1000)))
    wait_for_crew(iterator, 2)
    for answer in [], ["127.0.0.3"]:
        resolver.say(*answer)
        assert len(workers_of(iterator)) == 2
    assert take(iterator, 100) == ([*range(100)], {first.pid, second.pid})
    assert caplog.messages == []
    assert first.end(signal.SIGTERM) == 0
    wait_until(lambda: f"{first.address} leaves: it is no longer behind the name pool" in caplog.messages)
    other = serve("--num-workers", "1", "--host", "127.0.0.2", "--port", port)
    resolver.say("127.0.0.3")
    assert "has come from" not in other.log
    resolver.say("127.0.0.2", "127.0.0.3")
    wait_for_crew(iterator, 2)
    indices, pids = take(iterator, 900)
    assert indices == [*range(100, 1000)]
    assert pids >= {other.pid, second.pid}


# Servers that have names, and are not there


def test_pass_begins_with_those_that_are_there_and_is_joined_by_the_other(serve, first, absent, caplog):
    loader = RPCDataloader(RPCDataset([absent, first.address], Hosted, 400))
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


@pytest.mark.parametrize("use", ["dataset", "loader", "register"])
def test_enough_workers_are_waited_for(serve, register, first, absent, caplog, use):
    servers, workers = [first], [first.address, absent]
    if use == "register":
        servers, workers = [register()], register.workers

    def begin():
        if use == "dataset":
            return iter(RPCDataloader(RPCDataset(workers, Hosted, 200, min_workers=4)))
        return iter(RPCDataloader(Hosted(200), workers=workers, min_workers=4))

    with ThreadPoolExecutor(1) as thread:
        iterator = thread.submit(begin)
        # Another one comes before or after it was found that the first one has too few.
        servers.append(register() if use == "register" else serve("--num-workers", "2", "--host", absent))
        iterator = iterator.result()
    wait_for_crew(iterator, 4)
    assert take(iterator, 200) == ([*range(200)], {server.pid for server in servers})
    assert told(caplog, absent) == []


def test_server_that_refuses_this_client_is_an_error_and_not_missing(serve, first, other_secret):
    other = serve("--token-file", str(other_secret))
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
