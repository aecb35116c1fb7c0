"""Who gets a worker when there are not enough."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.server.sessions import Admission


def admitted(admission, client, tries):
    return sum(admission.admit(client) is None for _ in range(tries))


def test_one_client_may_have_all():
    assert admitted(Admission(8), "a", 20) == 8


def test_without_a_cap_everybody_gets_everything():
    admission = Admission(None)
    assert admitted(admission, "a", 1000) == 1000
    assert admission.admit("b") is None


def test_full_server_says_so():
    admission = Admission(1)
    assert admission.admit("a") is None
    assert admission.admit("a") == "all 1 connections are in use (--max-connections)"
    assert admission.admit("b") == "all 1 connections are in use (--max-connections), 1 of them by other clients"


def test_client_beyond_its_share_is_told_the_share():
    admission = Admission(8)
    assert admitted(admission, "a", 1) == admitted(admission, "b", 1) == 1
    assert admitted(admission, "a", 20) == 3
    assert admission.admit("a") == "this client has its share of 4 of 8 connections (--max-connections)"
    assert admitted(admission, "b", 20) == 3


def test_late_client_gets_its_share_as_workers_end():
    admission = Admission(8)
    assert admitted(admission, "early", 8) == 8
    assert admission.admit("late") is not None
    for _ in range(4):
        admission.release("early")
        # Both ask; the early one has more than its share.
        assert admission.admit("late") is None
        assert admission.admit("early") is not None
    assert (admission.held["early"], admission.held["late"]) == (4, 4)


def test_more_clients_than_connections_get_one_each_while_there_are_any():
    admission = Admission(2)
    assert [admission.admit(client) is None for client in "aabcb"] == [True, True, False, False, False]
    admission.release("a")
    assert [admission.admit(client) is None for client in "abc"] == [True, False, False]


def test_client_that_has_gone_does_not_count():
    admission = Admission(4)
    assert admitted(admission, "a", 4) == 4
    admission.release("a", 4)
    assert admission.held["a"] == 0
    assert admitted(admission, "b", 9) == 4


def test_cap_on_one_client_holds_also_while_it_is_alone():
    admission = Admission(8, 3)
    assert admitted(admission, "a", 20) == 3
    assert admission.admit("a") == "this client has its 3 connections (--max-connections-per-client)"
    assert admitted(admission, "b", 20) == 3
    admission.release("a")
    assert admission.admit("a") is None


def test_cap_on_one_client_needs_none_on_all():
    admission = Admission(None, 2)
    assert admitted(admission, "a", 20) == admitted(admission, "b", 20) == 2


def test_share_below_the_cap_on_one_client_is_what_counts():
    admission = Admission(4, 3)
    assert admitted(admission, "b", 1) == 1
    assert admitted(admission, "a", 20) == 2
    assert admission.admit("a") == "this client has its share of 2 of 4 connections (--max-connections)"


@settings(max_examples=200, deadline=None)
@given(
    cap=st.integers(1, 12),
    own_cap=st.integers(1, 12) | st.none(),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60),
)
def test_invariants(cap, own_cap, steps):
    """The caps hold, nobody takes more than its share while others are there, nobody starves below it for no reason."""
    admission = Admission(cap, own_cap)
    for client, wants_more in steps:
        held = {name: admission.held[name] for name in "abc"}
        num_clients = sum(count > 0 for name, count in held.items() if name != client) + 1
        if wants_more:
            reason = admission.admit(client)
            assert (reason is None) == (
                sum(held.values()) < cap and held[client] < min(max(1, cap // num_clients), own_cap or cap)
            )
        elif held[client]:
            admission.release(client)
        assert sum(admission.held[name] for name in "abc") <= cap
