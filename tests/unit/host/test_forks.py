"""The order in which parts of the package act at a fork."""

from __future__ import annotations

import functools
import threading

import pytest

from rpcdataloader.host import forks
from rpcdataloader.host.forks import Part
from rpcdataloader.host.sources import recorder
from tests.support.forks import status_of_fork

MOMENTS = {"before": forks._before, "in parent": forks._in_parent, "in child": forks._in_child}


@pytest.fixture
def told(monkeypatch):
    """What each part does in place of its work: it notes the moment."""
    notes = []
    for moment, functions in MOMENTS.items():
        for part in Part:
            monkeypatch.setitem(functions, part, functools.partial(notes.append, (moment, part)))
    return notes


def order(moment):
    return [("before", part) for part in Part] + [(moment, part) for part in reversed(Part)]


def test_parts_act_in_the_order_of_the_list_and_back(told):
    def check():
        assert told == order("in child")

    assert status_of_fork(check) == 0
    assert told == order("in parent")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_parts_act_beside_one_that_fails(told, monkeypatch):
    failed = ("before", Part.SESSIONS), ("in parent", Part.POOLS)
    for moment, part in failed:
        monkeypatch.setitem(MOMENTS[moment], part, lambda: 1 / 0)
    assert status_of_fork(lambda: None) == 0
    assert told == [each for each in order("in parent") if each not in failed]


def test_child_looks_at_modules_though_a_thread_of_its_parent_was_about_to():
    taken, over = threading.Event(), threading.Event()

    def hold():
        with recorder._lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        assert status_of_fork(recorder.look) == 0
    finally:
        over.set()
        thread.join()
