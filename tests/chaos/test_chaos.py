"""Training jobs get the same batches, each once, whatever an adversary does to their workers, nodes and network."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.chaos import driver
from tests.chaos.driver import ChaosError, Scenario, run
from tests.chaos.plan import Event, Kind, plan
from tests.chaos.ranks import Note, compare
from tests.support.network import why_not


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
@pytest.mark.skipif(bool(reason := why_not()), reason=f"network namespaces cannot be made: {reason}")
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
        if re.match("KILL_SERVER|TERM_SERVER|CUT|STOP_SERVER|STOP_SESSION|TAKE_ROOM", event.kind.name):
            assert event.place not in away
            away.add(event.place)
        elif re.match("START_SERVER|HEAL|CONTINUE|GIVE_ROOM", event.kind.name):
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
