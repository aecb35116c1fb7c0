"""``num_workers="auto"``: workers come and go while a pass goes on, and its batches stay the same.

What is decided is judged in ``tests/simulation/test_demand.py``. Here, a loop with training steps is slow or quick.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import re
import time

import pytest
import torch
from torch.utils.data import DataLoader

from rpcdataloader import RPCDataloader, RPCDataset
from tests.conftest import TIMEOUT_SCALE, is_running, wait_until
from tests.support.clocks import shorten
from tests.support.comparison import assert_same
from tests.support.crew import wait_for_crew, workers_of
from tests.support.datasets import Augmented, Numbers
from tests.support.engine import Engine, pool_on
from tests.support.quick import quick_server
from tests.support.streams import Parts

NUM_OFFERED = 4
SIZE = 300_000  # samples: more than are taken


@pytest.fixture(scope="module")
def workers(zygote):
    """A node server that has room for no more workers than it offers."""
    with quick_server(zygote, "--num-workers", str(NUM_OFFERED), "--max-connections", str(NUM_OFFERED)) as server:
        yield server.address


@pytest.fixture(autouse=True)
def quick_decisions(monkeypatch):
    shorten(monkeypatch, "decisions")


class Sleepy(Augmented):
    """Samples that take no CPU."""

    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


def loader_of(dataset, workers, **options):
    options = {"num_workers": "auto", "shuffle": True, "generator": torch.Generator().manual_seed(3), **options}
    return RPCDataloader(dataset, batch_size=1, workers=workers, **options)


def take(iterator, is_reached, step):
    """Take batches, with training steps of so many seconds, until the number of workers is as it should be."""
    batches = []

    deadline = time.monotonic() + 60 * TIMEOUT_SCALE
    while not is_reached(len(workers_of(iterator))):
        batches.append(next(iterator))
        assert time.monotonic() < deadline
        time.sleep(step)
    return batches


def slow_down(iterator):
    return take(iterator, lambda number: number <= 2, 0.025)


def speed_up(iterator):
    return take(iterator, lambda number: number == NUM_OFFERED, 0.0)


def check(batches, dataset, workers, **options):
    """Check that batches are the first ones of a pass with a fixed number of workers."""
    assert_same(batches, list(itertools.islice(loader_of(dataset, workers, num_workers=2, **options), len(batches))))


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_batches_are_the_same_while_workers_come_and_go(workers, persistent_workers, caplog):
    caplog.set_level(logging.INFO, "rpcdataloader.loader")
    loader = loader_of(Sleepy(SIZE), workers, persistent_workers=persistent_workers)
    iterator = iter(loader)
    wait_for_crew(iterator, NUM_OFFERED)
    batches = slow_down(iterator) + speed_up(iterator)
    slow_down(iterator)
    changes = re.findall(r"^wants (\d+) workers for Sleepy, after (\d+)$", "\n".join(caplog.messages), re.MULTILINE)
    assert changes[0][1] == str(NUM_OFFERED)
    assert all(number != before for number, before in changes)
    assert [number for number, _before in changes[:-1]] == [before for _number, before in changes[1:]]
    # The next pass begins with what the last one wanted.
    del iterator
    assert len(workers_of(iter(loader))) <= 2
    del loader
    check(batches, Augmented(SIZE), workers, persistent_workers=persistent_workers)


def test_number_that_is_set_later_holds_from_the_next_pass_on(workers):
    loader = loader_of(Sleepy(SIZE), workers)
    slow_down(iter(loader))
    loader.num_workers = NUM_OFFERED - 1
    wait_for_crew(iter(loader), NUM_OFFERED - 1)
    loader.num_workers = "auto"
    slow_down(iter(loader))


def test_what_is_given_back_is_free_for_another_loop_and_asked_for_again(workers, caplog):
    """The node server has no room for more workers than it offers."""
    first = iter(loader_of(Sleepy(SIZE), workers))
    wait_for_crew(first, NUM_OFFERED)
    slow_down(first)
    second = iter(loader_of(Numbers(SIZE), workers, num_workers=NUM_OFFERED - 2))
    wait_for_crew(second, NUM_OFFERED - 2)
    # Decides for more, for which the node has no room.
    assert len(list(itertools.islice(first, 100))) == 100
    del second
    speed_up(first)
    assert "is busy" not in caplog.text


def slowly(number):
    time.sleep(0.01)
    return number


def test_transform_follows_the_loop_and_its_source_keeps_its_stream(shared_server):
    options = {"transform": slowly, "shuffle": None, "source_workers": 1}
    iterator = iter(loader_of(Parts([SIZE]), shared_server.address, **options))
    batches = take(iterator, lambda number: number <= 1, 0.025)
    assert [int(batch) for batch in batches] == [*range(len(batches))]


def test_without_named_workers_and_inline_the_word_is_taken():
    assert len(list(RPCDataloader(Numbers(60), num_workers="auto"))) == 60
    assert [int(batch) for batch in RPCDataloader(Numbers(3), workers="inline", num_workers="auto")] == [0, 1, 2]


def test_the_attribute_can_be_compared_given_again_and_pickled(workers):
    loader = loader_of(Numbers(), workers)
    assert str(loader.num_workers) == "auto"
    assert not loader.num_workers > 0
    for number in loader.num_workers, pickle.loads(pickle.dumps(loader.num_workers)):
        assert repr(loader_of(Numbers(), workers, num_workers=number).num_workers) == "auto"
    assert isinstance(loader, DataLoader)


@pytest.mark.usefixtures("clean_client")
def test_a_pool_follows_what_a_loop_wants_in_mid_pass(monkeypatch):
    """The loop hears of the pool's node servers, and the pool of what the loop wants, by way of these."""
    shorten(monkeypatch, "reports", "pool asks", "pool shrinks", "pool is asked")
    engine = Engine()
    with pool_on(engine, (1, 2)) as workers:
        iterator = iter(RPCDataloader(RPCDataset(workers, Sleepy, SIZE), batch_size=None, num_workers="auto"))
        batches = take(iterator, lambda number: (number, len(list(workers))) == (2, 2), 0.0)
        batches += take(iterator, lambda number: (number, len(list(workers))) == (1, 1), 0.05)
        assert [int(batch["index"]) for batch in batches] == [*range(len(batches))]
        wait_until(lambda: sum(map(is_running, engine.pids)) == 1)
        assert is_running(engine.pids[0])
        next(iterator)
