"""Training jobs get the same batches, each once, whatever an adversary does to their workers, nodes and network."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re

import pytest

from tests.chaos import driver
from tests.chaos.datasets import Traps
from tests.chaos.driver import ChaosError, Scenario, run
from tests.chaos.plan import Event, Kind, plan
from tests.chaos.pool import Pool
from tests.chaos.ranks import Note, compare
from tests.conftest import wait_until
from tests.support.network import Network, why_not

NO_NETWORK = why_not()
needs_network = pytest.mark.skipif(NO_NETWORK is not None, reason=f"network namespaces cannot be made: {NO_NETWORK}")


@pytest.fixture
def survive(zygote, capsys):
    """Do a run, and show what was survived."""

    def survive(scenario):
        report = run(scenario, zygote)
        with capsys.disabled():
            print(f"\n{report}")  # noqa: T201
        assert report.comparison.is_same
        return report

    return survive


@pytest.mark.chaos
def test_one_rank_survives_everything(survive):
    report = survive(Scenario(seed=10, num_events=20, every=20, registered=True))
    assert report.num_batches >= 20 * 20
    assert sum(report.events.values()) == 20


@pytest.mark.chaos
def test_four_ranks_survive_everything(survive):
    report = survive(Scenario(seed=11, num_ranks=4, num_events=20, num_workers=3))
    assert sum(report.events.values()) == 20


@pytest.mark.chaos
@needs_network
def test_two_ranks_survive_a_network_that_is_cut(survive):
    report = survive(Scenario(seed=12, num_ranks=2, num_events=15, num_workers=2, in_network=True))
    assert report.events[Kind.CUT]


@pytest.mark.chaos
def test_a_quarter_of_the_workers_is_killed_in_the_middle_of_an_epoch(survive):
    kills = tuple(Event(Kind.KILL_WORKER, place, pick) for place in range(2) for pick in (0.0, 0.99))
    # Two hundred of the four hundred batches of the epoch, and then four at once.
    rest = {"records": 0, "images": 1600, "seconds": 0.02}
    report = survive(Scenario(1, num_places=2, num_workers=8, every=200, at_once=4, events=kills, job=rest))
    assert report.events == {Kind.KILL_WORKER: 4}
    assert report.stall < 20


@pytest.mark.slow  # the half minute that it takes to tell a host that is gone from a network that is slow
@needs_network
def test_rank_whose_nodes_are_all_out_of_reach_goes_on_elsewhere(survive):
    events = (Event(Kind.CUT, 0), Event(Kind.KILL_WORKER, 1))
    scenario = Scenario(1, 2, num_places=2, num_workers=2, every=100, in_network=True, cut_seconds=90, events=events)
    # Two ranks that wait for each other: one of them has lost all workers of its own.
    report = survive(dataclasses.replace(scenario, job={"task_timeout": None, "records": 0}))
    assert report.stall < 40


ASK = """
import sys
from rpcdataloader import RPCDataset
from tests.support.datasets import State
dataset = RPCDataset(sys.argv[1], State)
print(dataset.epoch, flush=True)
open(sys.argv[2]).read()
dataset.epoch = 7
"""


@pytest.mark.slow  # as above
@needs_network
def test_question_to_a_node_that_is_out_of_reach_fails(zygote, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with (
        contextlib.closing(Network()) as network,
        contextlib.closing(Pool(zygote, tmp_path, 1, 1, network, Traps(tmp_path))) as pool,
    ):
        script = zygote.start(f"{network.trainer.move_in}\n{ASK}", *pool.addresses, fifo)
        wait_until(lambda: script.output, what="a first answer")
        pool.do(Event(Kind.CUT, 0))
        fifo.write_text("")
        told = f"connection to {pool.addresses[0]} lost: its host no longer answers"
        ended = script.wait(60)
        assert told in ended.errors, ended.errors


def test_failure_tells_how_to_repeat_it(zygote):
    kill = Event(Kind.KILL_WORKER, 0)
    with pytest.raises(ChaosError) as caught:
        run(Scenario(seed=77, num_places=1, num_workers=1, every=1, events=(kill,) * 9, job={"max_retries": 0}), zygote)
    text = str(caught.value)
    assert "max_retries must be at least 1" in text
    assert "Scenario(seed=77," in text


@pytest.mark.chaos
def test_hang_shows_the_stacks(zygote, monkeypatch):
    monkeypatch.setattr(driver, "HANG_TIMEOUT", 2.0)
    stop = Event(Kind.STOP_WORKER, 0)
    job = {"task_timeout": None, "records": 0}
    with pytest.raises(ChaosError, match=r"no batch for 2 s") as caught:
        run(Scenario(seed=78, num_places=1, num_workers=1, every=5, events=(stop,) * 9, job=job), zygote)
    assert "in _wait" in str(caught.value)


@pytest.mark.parametrize("num_places", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_plan_never_takes_away_the_last_node(seed, num_places):
    away = set()
    seen = set()
    for event in itertools.islice(plan(seed, num_places, network=True), 500):
        seen.add(event.kind)
        if re.match("KILL_SERVER|TERM_SERVER|CUT|STOP_SERVER|STOP_SESSION", event.kind.name):
            assert event.place not in away
            away.add(event.place)
        elif re.match("START_SERVER|HEAL|CONTINUE", event.kind.name):
            away.discard(event.place)
        assert len(away) < num_places
    assert len(seen) == len(Kind) or num_places == 1


def notes(*batches):
    return [
        [Note(0.0, f"images 0 {number}", digest, list(samples)) for number, (digest, samples) in enumerate(batches)]
    ]


@pytest.mark.parametrize(
    ("batches", "lost", "duplicated", "num_different"),
    [
        ([("a", "12"), ("b", "34")], 0, 0, 0),
        ([("a", "12")], 2, 0, 1),
        ([("a", "12"), ("b", "34"), ("b", "34")], 0, 2, 1),
        ([("a", "12"), ("a", "12")], 2, 2, 1),
        ([("a", "12"), ("x", "34")], 0, 0, 1),
        ([("b", "34"), ("a", "12")], 0, 0, 1),
    ],
)
def test_batches_that_are_not_the_same_are_found(batches, lost, duplicated, num_different):
    found = compare(notes(*batches), notes(("a", "12"), ("b", "34")))
    assert (found.num_lost, found.num_duplicated, len(found.different)) == (lost, duplicated, num_different)
    assert found.is_same == (num_different == 0)
