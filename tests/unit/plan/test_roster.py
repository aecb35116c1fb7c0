from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rpcdataloader.plan.roster import Roster


def fill(roster: Roster[str]) -> dict[int, str]:
    return dict(roster.to_open())


def test_places_are_filled_at_home():
    roster = Roster(["a", "b", "a"])
    assert roster.to_try() == ["a", "b"]
    roster.node_up("a")
    assert fill(roster) == {0: "a", 2: "a"}
    roster.node_up("b")
    assert fill(roster) == {1: "b"}
    assert fill(roster) == {}
    assert roster.to_try() == []
    assert not roster.is_stuck


def test_worker_that_ended_is_replaced_where_it_was():
    roster = Roster(["a", "b"])
    roster.node_up("a")
    roster.node_up("b")
    fill(roster)
    roster.vacated(0, "a")
    assert fill(roster) == {0: "a"}


def test_while_a_home_is_there_the_places_of_another_stay_vacant():
    roster = Roster(["a", "b"], ["c"])
    for node in "abc":
        roster.node_up(node)
    fill(roster)
    roster.node_down("a")
    roster.vacated(0, "a")
    assert fill(roster) == {}
    assert roster.to_try() == ["a"]
    assert not roster.is_stuck
    roster.node_up("a")
    assert fill(roster) == {0: "a"}


def test_when_all_homes_are_gone_others_help_evenly_and_places_go_home_again():
    roster = Roster(["a"] * 4, ["b", "c", "d"])
    roster.node_up("a")
    fill(roster)
    roster.node_down("a")
    for place in range(4):
        roster.vacated(place, "a")
    assert roster.to_try() == ["a", "b", "c", "d"]
    assert roster.is_stuck
    assert roster.is_hopeful
    for node in "bcd":
        roster.node_up(node)
    away = fill(roster)
    assert sorted(away.values()) in (["b", "b", "c", "d"], ["b", "c", "c", "d"], ["b", "c", "d", "d"])
    assert not roster.is_stuck
    roster.node_up("a")
    assert fill(roster) == dict.fromkeys(range(4), "a")
    roster.vacated(0, away[0])  # the one that helped leaves, which is no vacancy
    assert fill(roster) == {}


def test_no_more_nodes_are_asked_for_help_than_there_are_places():
    roster = Roster(["a"], ["b", "c", "d"])
    assert roster.to_try() == ["a", "b"]
    assert roster.to_try() == []
    roster.node_failed("b")
    assert roster.to_try() == ["c"]
    roster.node_hopeless("c")
    assert roster.to_try() == ["d"]


def test_streams_move_as_soon_as_their_home_is_gone_and_stay_there():
    roster = Roster(["a", "b"], needs_all=True)
    roster.node_up("a")
    roster.node_up("b")
    fill(roster)
    roster.node_down("a")
    roster.vacated(0, "a")
    assert roster.is_stuck
    assert fill(roster) == {0: "b"}
    roster.node_up("a")
    assert fill(roster) == {}


def test_refusal_leaves_a_place_vacant_until_the_next_epoch():
    roster = Roster(["a", "a"])
    roster.node_up("a")
    fill(roster)
    roster.vacated(1, "a", was_refused=True)
    assert fill(roster) == {}
    roster.reopen()
    assert fill(roster) == {1: "a"}
    roster.vacated(0, "a", was_refused=True)
    roster.vacated(1, "a", was_refused=True)
    assert roster.is_stuck
    assert not roster.is_hopeful


def test_stream_that_is_refused_goes_to_another_node():
    roster = Roster(["a", "b"], needs_all=True)
    roster.node_up("a")
    roster.node_up("b")
    fill(roster)
    roster.vacated(0, "a", was_refused=True)
    assert fill(roster) == {0: "b"}
    roster.vacated(0, "b", was_refused=True)
    assert roster.is_stuck
    assert not roster.is_hopeful


def test_without_a_node_to_try_there_is_no_hope():
    roster = Roster(["a"], ["b"])
    assert roster.to_try() == ["a", "b"]
    roster.node_hopeless("a")
    assert roster.is_hopeful
    roster.node_hopeless("b")
    assert not roster.is_hopeful
    assert roster.is_stuck


class Cluster(RuleBasedStateMachine):
    """Nodes come and go, workers die; the driver does what the roster says."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = ["a", "b", "c", "d"]
        self.up: set[str] = set()
        self.trying: set[str] = set()
        self.workers: list[tuple[int, str]] = []
        self.homes = ["a", "a", "b"]
        self.needs_all = False
        self.roster: Roster[str] = Roster(self.homes, ["c", "d"])

    @rule()
    def watch_streams(self) -> None:
        if not self.workers and not self.trying and not self.up:
            self.needs_all = True
            self.roster = Roster(self.homes, ["c", "d"], needs_all=True)

    def act(self) -> None:
        new = self.roster.to_try()
        assert not set(new) & self.trying
        self.trying.update(new)
        for place, node in self.roster.to_open():
            assert node in self.up
            assert (place, node) not in self.workers
            # A worker that stood in leaves.
            self.workers = [worker for worker in self.workers if worker[0] != place]
            self.workers.append((place, node))

    @rule(data=st.data())
    @precondition(lambda self: self.trying)
    def node_comes(self, data) -> None:
        node = data.draw(st.sampled_from(sorted(self.trying)))
        self.trying.discard(node)
        self.up.add(node)
        self.roster.node_up(node)
        self.act()

    @rule(data=st.data())
    @precondition(lambda self: self.trying)
    def node_does_not_come(self, data) -> None:
        self.roster.node_failed(data.draw(st.sampled_from(sorted(self.trying))))
        self.act()

    @rule(data=st.data())
    @precondition(lambda self: self.up)
    def node_goes(self, data) -> None:
        node = data.draw(st.sampled_from(sorted(self.up)))
        self.up.discard(node)
        self.roster.node_down(node)
        for place, _node in [worker for worker in self.workers if worker[1] == node]:
            self.roster.vacated(place, node)
            self.workers.remove((place, node))
        self.act()

    @rule(data=st.data())
    @precondition(lambda self: self.workers)
    def worker_dies(self, data) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        self.workers.remove(worker)
        self.roster.vacated(*worker)
        self.act()

    @rule()
    def start(self) -> None:
        self.act()

    @invariant()
    def whoever_can_work_works(self) -> None:
        self.act()
        places = {place for place, _node in self.workers}
        homes_up = self.up & set(self.homes)
        if self.needs_all or not homes_up:
            assert places == ({0, 1, 2} if self.up else set())
        else:
            assert places >= {place for place, home in enumerate(self.homes) if home in self.up}
            # Who is away stays there only while nobody is at home.
            assert all(node == self.homes[place] or self.homes[place] not in self.up for place, node in self.workers)
        assert self.roster.is_stuck == (not self.workers)
        # Somebody always looks for a home that is gone.
        assert set(self.homes) <= self.up | self.trying


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
