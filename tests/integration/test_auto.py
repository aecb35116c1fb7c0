"""``num_workers="auto"``: workers come and go while a pass goes on, and its batches stay the same.

What is decided is tested in ``tests/simulation/test_demand.py``. Here, most tests decide themselves.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.pools.pool import Order, Pool
from tests.conftest import TIMEOUT_SCALE, is_running, wait_until
from tests.integration.comparison import assert_same
from tests.integration.crew import wait_for_crew, workers_of
from tests.integration.datasets import Augmented, FieldStream, Numbers, Processes
from tests.integration.quick import quick_server
from tests.integration.test_pool_node import SECRET, Engine, here

NUM_OFFERED = 4
SIZE = 300_000  # samples: more than are taken


@pytest.fixture(scope="module")
def workers(zygote):
    """A node server that has room for no more workers than it offers."""
    with quick_server(zygote, "--num-workers", str(NUM_OFFERED), "--max-connections", str(NUM_OFFERED)) as server:
        yield server.address


@pytest.fixture
def decide(monkeypatch):
    """Loops decide after each batch that is timed, and want what is in the list; nothing new once that is empty."""
    wanted: list[int] = []

    def decide(demand, _now, _seen):
        demand.wanted = wanted.pop(0) if wanted else demand.wanted
        return demand.wanted

    monkeypatch.setattr("rpcdataloader.plan.demand.Demand.decide", decide)
    for name in "LEAST_SECONDS", "LEAST_BATCHES":
        monkeypatch.setattr(f"rpcdataloader.loader.wants.{name}", 0)
    return wanted


def loader_of(dataset, workers, **options):
    generator = torch.Generator().manual_seed(3)
    options = {"num_workers": "auto", "shuffle": True, **options}
    return RPCDataloader(dataset, batch_size=3, workers=workers, generator=generator, **options)


def take_until(iterator, condition):
    """Take batches until something is true; returns them."""
    taken = []

    def take():
        taken.append(next(iterator))
        return condition()

    wait_until(take)
    return taken


def take_until_there_are(iterator, number):
    """Take batches until there are so many workers."""
    return take_until(iterator, lambda: len(workers_of(iterator)) == number)


def give_back_and_ask_again(iterator, decide):
    """Let a loop want 1 worker, and then all of them again; returns the batches that it got meanwhile."""
    batches = []
    for number in 1, NUM_OFFERED:
        decide.append(number)
        batches += take_until_there_are(iterator, number)
    return batches


def check(batches, loader):
    """Check that batches are the first ones of another loader."""
    assert_same(batches, list(itertools.islice(loader, len(batches))))


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_batches_are_the_same_while_workers_come_and_go(workers, decide, persistent_workers):
    loader = loader_of(Augmented(SIZE), workers, persistent_workers=persistent_workers)
    epochs = [give_back_and_ask_again(iter(loader), decide) for _epoch in range(2)]
    del loader
    undisturbed = loader_of(Augmented(SIZE), workers, num_workers=2, persistent_workers=persistent_workers)
    for batches in epochs:
        check(batches, undisturbed)


def test_out_of_order_nothing_is_lost_or_repeated(workers, decide):
    iterator = iter(loader_of(Numbers(3000), workers, in_order=False))
    decide += [1, NUM_OFFERED, 2]
    assert sorted(torch.cat(list(iterator)).tolist()) == [*range(3000)]


def test_state_of_a_pass_goes_on_with_any_number_of_workers(workers, decide):
    loader = loader_of(Augmented(SIZE), workers)
    iterator = iter(loader)
    decide.append(1)
    batches = take_until_there_are(iterator, 1)
    state = json.loads(json.dumps(loader.state_dict()))
    del iterator, loader
    resumed = loader_of(Augmented(SIZE), workers)
    resumed.load_state_dict(state)
    batches += give_back_and_ask_again(iter(resumed), decide)
    del resumed
    check(batches, loader_of(Augmented(SIZE), workers, num_workers=2))


def test_what_is_given_back_is_free_for_another_loop(workers, decide):
    """The node server has no room for more workers than it offers."""
    first = iter(loader_of(Numbers(SIZE), workers))
    wait_for_crew(first, NUM_OFFERED)
    decide.append(1)
    take_until_there_are(first, 1)
    second = iter(loader_of(Numbers(SIZE), workers, num_workers=NUM_OFFERED - 1))
    wait_for_crew(second, NUM_OFFERED - 1)
    next(first)


def test_a_place_that_another_loop_has_taken_is_asked_for_again(serve, decide, caplog):
    server = serve("--num-workers", "2", "--max-connections", "2")
    first = iter(loader_of(Numbers(SIZE), server.address))
    wait_for_crew(first, 2)
    decide.append(1)
    take_until_there_are(first, 1)
    second = iter(loader_of(Numbers(SIZE), server.address, num_workers=1))
    wait_for_crew(second, 1)
    decide.append(2)
    take_until_there_are(first, 2)
    take_until_there_are(first, 1)  # the node had no room
    del second
    take_until(first, lambda: first.driver.engine.num_workers == 2)
    assert "is busy" not in caplog.text


def test_the_next_pass_begins_with_what_the_last_one_wanted(workers, decide):
    loader = loader_of(Numbers(SIZE), workers)
    iterator = iter(loader)
    decide.append(2)
    take_until(iterator, lambda: not decide)
    del iterator
    iterator = iter(loader)
    assert len(workers_of(iterator)) == 2
    # A copy, such as that of replay(), decides for itself.
    assert len(workers_of(iter(copy.copy(loader)))) == NUM_OFFERED


def test_a_fixed_number_of_workers_stays(workers, decide):
    iterator = iter(loader_of(Numbers(SIZE), workers, num_workers=3))
    decide.append(1)
    take_until(iterator, lambda: not decide)
    wait_for_crew(iterator, 3)
    # What it would use is told, for those who count nodes.
    assert iterator.report().wanted_workers == 1


@pytest.mark.parametrize("number", ["auto", 0, 3])
def test_wanted_workers_are_reported_up_to_the_fixed_number(workers, decide, number):
    iterator = iter(loader_of(Numbers(SIZE), workers, num_workers=number))
    decide.append(9)
    take_until(iterator, lambda: not decide)
    assert iterator.report().wanted_workers == (number if number == 3 else 9)


def test_streams_want_the_workers_that_they_have(workers, decide):
    iterator = iter(loader_of(Whole(SIZE), workers, num_workers=2, shuffle=None))
    wait_for_crew(iterator, 2)
    decide.append(1)
    take_until(iterator, lambda: not decide)
    assert iterator.report().wanted_workers == 2


def test_each_rank_decides_for_itself(workers, decide):
    first, second = [iter(loader_of(Numbers(SIZE), workers, partition=(rank, 2))) for rank in range(2)]
    for iterator in first, second:
        wait_for_crew(iterator, 2)
    decide.append(1)
    take_until_there_are(first, 1)
    next(second)
    assert len(workers_of(second)) == 2


def test_workers_that_retire_meanwhile_are_replaced_where_they_are_wanted(serve, decide):
    server = serve("--num-workers", "3", "--max-tasks-per-worker", "20")
    iterator = iter(loader_of(Augmented(SIZE), server.address))
    batches = []
    for number in 1, 3, 2:
        decide.append(number)
        batches += take_until_there_are(iterator, number)
    del iterator
    check(batches, loader_of(Augmented(SIZE), server.address, num_workers=1))


def test_transform_follows_the_loop_and_its_source_keeps_its_streams(workers, decide):
    options = {"transform": abs, "shuffle": None, "source_workers": 1}
    iterator = iter(loader_of(Whole(SIZE), workers, **options))
    decide += [1] * 100  # of which the loader of the source takes some
    batches = take_until_there_are(iterator, 1)
    del iterator
    check(batches, loader_of(Whole(SIZE), workers, num_workers=1, **options))


class Whole(torch.utils.data.IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def test_streams_need_a_number(workers):
    with pytest.raises(ValueError, match=r"num_workers='auto' cannot be used with an iterable-style .* shards"):
        loader_of(FieldStream(), workers, shuffle=None)


@pytest.mark.parametrize("number", ["automatic", 1.5, None])
def test_other_words_are_refused(workers, number):
    with pytest.raises(TypeError, match="num_workers must be a whole number or 'auto', but is"):
        loader_of(Numbers(), workers, num_workers=number)


def test_the_attribute_can_be_compared_given_again_and_pickled(workers):
    loader = loader_of(Numbers(), workers)
    assert str(loader.num_workers) == "auto"
    assert not loader.num_workers > 0
    for number in loader.num_workers, pickle.loads(pickle.dumps(loader.num_workers)):
        assert repr(loader_of(Numbers(), workers, num_workers=number).num_workers) == "auto"
    assert isinstance(loader, DataLoader)


def test_without_named_workers_it_is_one_for_each_cpu_at_most(decide):
    iterator = iter(RPCDataloader(Processes(600), num_workers="auto"))
    decide.append(1)
    batches = take_until_there_are(iterator, 1)
    assert len([*batches, *iterator]) == 600


def test_inline_takes_the_word_and_loads_in_this_process():
    assert [int(batch) for batch in RPCDataloader(Numbers(3), workers="inline", num_workers="auto")] == [0, 1, 2]


@pytest.mark.usefixtures("clean_client")
def test_a_pool_follows_what_a_loop_wants_in_mid_pass(decide, monkeypatch):
    """The loop hears of the pool's node servers, and the pool of what the loop wants, by way of these."""
    monkeypatch.setattr("rpcdataloader.client.client.PERIOD", 0.2)
    monkeypatch.setattr("rpcdataloader.pools.pool.ASK_PAUSE", 0.1)
    monkeypatch.setattr("rpcdataloader.pools.wants.SHRINK_AFTER", 0.5)
    monkeypatch.setattr("rpcdataloader.pools.pool.PoolWorkers.pause", 0.05)
    engine = Engine()
    with Pool(engine, (1, 3), Order(SECRET, 1, (), here), 60.0 * TIMEOUT_SCALE) as workers:
        loader = RPCDataloader(RPCDataset(workers, Numbers, SIZE), num_workers="auto")
        iterator = iter(loader)
        batches = []
        for number in 3, 1:
            decide.append(number)
            while (len(list(workers)), len(workers_of(iterator))) != (number, number):
                batches.append(next(iterator))
        assert torch.cat(batches).tolist() == [*range(len(batches))]
        wait_until(lambda: sum(map(is_running, engine.pids)) == 1)
        assert is_running(engine.pids[0])
        next(iterator)


class Sleepy(Dataset):
    """Samples that take no CPU."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return index


def test_a_loop_gives_back_what_it_does_not_need_and_asks_for_more(zygote, monkeypatch):
    """Bounds are wide, as this machine may be busy."""
    monkeypatch.setattr("rpcdataloader.loader.wants.LEAST_SECONDS", 0.5)
    with quick_server(zygote, "--num-workers", "8") as server:
        iterator = iter(RPCDataloader(RPCDataset([server.address], Sleepy, 0.05), num_workers="auto"))
        seen = itertools.count()
        wait_for_crew(iterator, 8)

        def is_reached(condition, step):
            assert int(next(iterator)) == next(seen)
            time.sleep(step)  # a training step
            return condition(len(workers_of(iterator)))

        wait_until(lambda: is_reached(lambda number: number <= 4, 0.04))
        wait_until(lambda: is_reached(lambda number: number >= 7, 0.0))
