"""What a pool does with an engine, which is a stand-in here."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import sys
import time
from unittest.mock import Mock

import pytest

from rpcdataloader.client.discovery import Local, Remote, find_workers
from rpcdataloader.errors import AuthenticationError, ConnectError
from rpcdataloader.pools import dask_pool, pool, ray_pool
from rpcdataloader.pools.engines import make_order
from rpcdataloader.pools.pool import Pool, PoolWorkers, ServerOrder, Size
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import Credentials, client_credentials, load_credentials
from rpcdataloader.wire.status import count_wanted
from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.unit.wire.test_status import CLIENT, LOOP, NODE

SECRET = Credentials(b"the secret of a pool 0123456789", "a test")
ORDER = ServerOrder(SECRET, 2, (), str)
LIMIT = 10.0 * TIMEOUT_SCALE


class Node:
    def __init__(self, number):
        self.number = number
        self.answer = None
        self.calls = []
        self.is_cut_off = False

    def poll(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def come(self):
        self.answer = f"10.0.0.{self.number}:6543"

    def stop(self):
        self.calls.append("stop")
        if self.is_cut_off:
            raise ConnectionError("the cluster has gone")
        if self.answer is not None:
            self.answer = RuntimeError("it has drained")
        return self.answer is not None

    def release(self):
        self.calls.append("release")


class Engine:
    """Has room for some nodes, which come at once or not at all."""

    advice = "what to look at"

    def __init__(self, room=8, come=True):
        self.publish, self.withdraw, self.close = Mock(), Mock(), Mock()
        self.reader = lambda: read
        self.nodes = []
        self.room = room
        self.comes = come

    def start(self, order):
        assert order is ORDER
        if sum("release" not in node.calls for node in self.nodes) >= self.room:
            return None
        self.nodes.append(Node(len(self.nodes)))
        if self.comes:
            self.nodes[-1].come()
        return self.nodes[-1]

    @property
    def published(self):
        """The latest addresses."""
        return list(self.publish.call_args.args[0])


def read():
    return ["10.0.0.1:6543", "10.0.0.2:6543"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    for name, value in ("PAUSE", 0.005), ("FIRST_DELAY", 0.005), ("ASK_PAUSE", 0.005):
        monkeypatch.setattr(pool, name, value)


@pytest.fixture
def want(monkeypatch):
    """Let the loops want this number of workers; nothing is known of them before."""
    wanted = [0]
    monkeypatch.setattr(pool, "ask_wanted", lambda _addresses, credentials: wanted[-1] if credentials is SECRET else 0)
    monkeypatch.setattr(pool, "SHRINK_AFTER", 0.0)
    return wanted.append


def addresses_of(*numbers):
    return [f"10.0.0.{number}:6543" for number in numbers]


def test_block_begins_with_the_least_and_takes_what_loops_want_while_there_is_room(want):
    engine = Engine(room=3)
    with Pool(engine, (2, 8), ORDER, LIMIT) as workers:
        assert list(workers) == addresses_of(0, 1)
        want(100)
        wait_until(lambda: len(list(workers)) == 3)
        assert list(workers) == addresses_of(0, 1, 2)
        engine.withdraw.reset_mock()
        engine.room = 20
        wait_until(lambda: len(list(workers)) == 8)
        assert len(engine.nodes) == 8
        wait_until(lambda: engine.withdraw.called)
    assert all(node.calls == ["stop", "release"] for node in engine.nodes)
    engine.close.assert_called_once_with()


def test_latest_nodes_drain_when_loops_want_fewer_and_others_come_when_they_want_more(want):
    engine = Engine()
    with Pool(engine, (1, 8), ORDER, LIMIT) as workers:
        want(8)  # of 2 workers each
        wait_until(lambda: list(workers) == addresses_of(0, 1, 2, 3))
        engine.publish.side_effect = [ConnectionError("the scheduler does not answer"), *[None] * 100]
        want(3)
        wait_until(lambda: list(workers) == addresses_of(0, 1))
        wait_until(lambda: all(node.calls == ["stop", "release"] for node in engine.nodes[2:]))
        assert engine.published == addresses_of(0, 1)
        want(0)  # between two epochs, nothing is known
        want(5)
        wait_until(lambda: list(workers) == addresses_of(0, 1, 4))
        assert not any(node.calls for node in engine.nodes[:2])
    assert all(node.calls == ["stop", "release"] for node in engine.nodes)


def test_nodes_that_are_lost_together_are_replaced_soon_and_though_the_engine_publishes_nothing(caplog):
    engine, pool.FIRST_DELAY = Engine(), 0.3  # until the end of the test, as of others
    with Pool(engine, 6, ORDER, LIMIT) as workers:
        engine.publish.side_effect, began = ConnectionError("the scheduler does not answer"), time.monotonic()
        for node in engine.nodes[:]:
            node.answer = RuntimeError("gone")
        wait_until(lambda: list(workers) == addresses_of(*range(6, 12)))
        assert time.monotonic() - began < 5.0 * TIMEOUT_SCALE  # and not 0.3 * 2**5
    assert caplog.messages.count("cannot look after the pool") == 1


def test_nodes_that_are_lost_as_soon_as_they_have_come_are_replaced_ever_later():
    engine, started = Engine(), []

    def start(order):
        started.append(time.monotonic())
        return Engine.start(engine, order)

    engine.start = start
    with Pool(engine, 1, ORDER, LIMIT) as workers:
        for number in range(7):
            wait_until(lambda number=number: list(workers) == addresses_of(number))
            engine.nodes[-1].answer = RuntimeError("gone")
        wait_until(lambda: len(started) == 8)
    assert started[-1] - started[-2] > 2**5 * pool.FIRST_DELAY


def test_size_follows_what_is_wanted_and_shrinks_when_fewer_have_sufficed_for_a_while():
    size = Size(1, 8, 4)
    limit = pool.SHRINK_AFTER
    assert [size.decide(0.0, wanted) for wanted in (0, 1, 9, 100, 33, 100)] == [1, 1, 3, 8, 8, 8]
    assert size.decide(1.0, 4) == 8
    assert size.decide(2.0, 10) == 8
    assert size.decide(1.0 + limit, 4) == 3  # the most that were wanted meanwhile
    assert size.decide(2.0 + limit, 4) == 3
    assert size.decide(3.0 + limit, 0) == 3
    assert size.decide(2.5 + 2 * limit, 4) == 3  # nothing was known in between
    assert size.decide(2.5 + 3 * limit, 4) == 1
    # Epochs of less than the limit: what is unknown between them does not keep what was needed once.
    size = Size(1, 8, 4)
    assert size.decide(0.0, 100) == 8
    asked = [(number * limit / 4, 0 if number % 4 == 0 else 4) for number in range(1, 16)]
    assert [size.decide(*each) for each in asked] == [8] * 6 + [1] * 9


def test_loops_of_all_clients_count_once_by_their_latest_report():
    def node(*clients):
        return dataclasses.replace(NODE, clients=list(clients))

    def client(pid, seconds, *wanted):
        loops = [dataclasses.replace(LOOP, wanted_workers=number) for number in wanted]
        return dataclasses.replace(CLIENT, pid=pid, loops=loops, loops_seconds=seconds)

    assert count_wanted([node(client(1, 9.0, 40), client(2, 1.0, 5)), node(client(1, 2.0, 3, 4))]) == 3 + 4 + 5
    # Without a report, a client wants those that have loaded for it, and not the one that has answered a question.
    asked = [*CLIENT.workers, dataclasses.replace(CLIENT.workers[0], tasks=0)]
    assert count_wanted([node(dataclasses.replace(client(1, None), workers=asked))] * 2) == 2 * len(CLIENT.workers)
    assert count_wanted([]) == 0


@pytest.mark.parametrize("number", [0, 2.5, "2", (2, 1), (0, 1), (1, 2, 3), (1.0, 2)])
def test_wrong_numbers_of_nodes_are_named(number):
    with pytest.raises(ValueError, match=f"num_nodes must be .* but is {re.escape(str(number))}"):
        Pool(Engine(), number, ORDER, LIMIT)


def test_pool_is_for_one_block():
    engine = Engine()
    nodes = Pool(engine, 1, ORDER, LIMIT)
    with nodes as workers:
        with pytest.raises(RuntimeError, match="for one with block"):
            nodes.__enter__()
        assert len(list(workers)) == 1
    with pytest.raises(RuntimeError, match="for one with block"):
        nodes.__enter__()
    engine.close.assert_called_once_with()


def test_end_of_the_cluster_does_not_make_a_block_fail():
    engine = Engine()
    with Pool(engine, 2, ORDER, LIMIT):
        for node in engine.nodes:
            node.is_cut_off = True
    assert [node.calls for node in engine.nodes] == [["stop", "release"]] * 2
    engine.close.assert_called_once_with()


def test_node_servers_that_never_come_are_not_waited_for():
    engine = Engine(come=False)
    error = "0 of 2 node servers of the pool are ready: no more came within 0.01 s; what to look at"
    with pytest.raises(ConnectError, match=error), Pool(engine, 2, ORDER, 0.01):
        pass
    assert [node.calls for node in engine.nodes] == [["stop", "release"]] * 2
    engine.close.assert_called_once_with()


def test_engine_that_refuses_to_start_node_servers_ends_the_wait(caplog):
    engine = Engine()
    engine.start = Mock(side_effect=ValueError("no such option"))
    error = "0 of 2 node servers of the pool are ready: no such option"
    with pytest.raises(ConnectError, match=error), Pool(engine, 2, ORDER, 600.0):
        pass
    assert set(caplog.messages) == {"replacing the node server that did not start: no such option"}
    engine.close.assert_called_once_with()


def test_workers_can_be_sent_to_other_processes_of_the_engine_and_their_secret_goes_with_the_pool():
    with Pool(Engine(), 2, ORDER, LIMIT) as workers:
        assert list(workers) == ["10.0.0.0:6543", "10.0.0.1:6543"]
        assert client_credentials(Address("10.0.0.0", 6543)) is SECRET
        assert find_workers([workers, "local:2"]) == Remote(lookups=(workers,), local=Local(2))
        for elsewhere in pickle.loads(pickle.dumps(workers)), copy.deepcopy(workers):
            assert list(elsewhere) == read()
        assert client_credentials(Address("10.0.0.2", 6543)) == SECRET
    assert list(workers) == []
    assert client_credentials(Address("10.0.0.0", 6543)) != SECRET


def test_engine_that_does_not_answer_takes_nothing_away():
    answers = [["10.0.0.1:6543"]]
    workers = PoolWorkers(lambda: answers.pop(), SECRET)
    assert list(workers) == ["10.0.0.1:6543"]
    assert list(workers) == ["10.0.0.1:6543"]
    assert workers.problems == {"the pool": "pop from empty list"}


def test_secret_of_a_pool_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_TOKEN_FILE", str(tmp_path / "missing"))
    first, second = (make_order(1, (), str).credentials for _ in range(2))
    assert first.secret != second.secret
    with pytest.raises(AuthenticationError, match="missing does not exist"):
        load_credentials()
    assert PoolWorkers(tuple, first).token.encode() == first.secret


def test_missing_engine_names_the_extra(monkeypatch):
    for package in "ray", "distributed":
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"ray_pool needs ray: pip install 'rpcdataloader\[ray\]'"):
        ray_pool(2)
    with pytest.raises(ImportError, match=r"dask_pool needs distributed: pip install 'rpcdataloader\[dask\]'"):
        dask_pool(None, 2)
