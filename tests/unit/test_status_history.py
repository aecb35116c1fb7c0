"""The last quarter of an hour."""

from __future__ import annotations

import dataclasses

from rpcdataloader.status.report import Answer, make_document
from rpcdataloader.status.serving import SECONDS, History
from tests.unit.wire.test_status import CLIENT, LOOP, NODE


def waiting(pid, share, rank=None):
    return dataclasses.replace(
        CLIENT, pid=pid, rank=rank, loops=[dataclasses.replace(LOOP, wait_share=share, rank=rank)], loops_seconds=1.0
    )


def looks(*clients_of_each):
    before, documents = None, []
    for number, clients in enumerate(clients_of_each):
        node = dataclasses.replace(NODE, uptime_seconds=100 + 2.0 * number, tasks=100 * number, clients=list(clients))
        before = make_document(1000.0 + 2 * number, [Answer("a:1", node)], {}, before)
        documents.append(before)
    return documents


def test_lines_have_a_point_for_each_look_and_rates_from_the_second_one_on():
    history = History(2.0)
    assert history.as_columns() == {
        "interval_seconds": 2.0,
        "time": [],
        "tasks": [],
        "sent_bytes": [],
        "waits": {},
    }
    for document in looks([], [waiting(1, 0.1)], [waiting(1, 0.2), waiting(2, 0.5, rank=7)]):
        history.add(document)
    assert history.as_columns() == {
        "interval_seconds": 2.0,
        "time": [1000, 1002, 1004],
        "tasks": [None, 50, 50],
        "sent_bytes": [None, 0, 0],
        "waits": {"gpu01:1": [None, 0.1, 0.2], "gpu01:2 rank 7": [None, None, 0.5]},
    }


def test_client_that_has_left_has_no_line():
    history = History(2.0)
    for document in looks([waiting(1, 0.1), waiting(2, 0.1)], [waiting(2, 0.1)]):
        history.add(document)
    assert list(history.as_columns()["waits"]) == ["gpu01:2"]


def test_lines_are_as_many_as_can_be_told_apart_and_a_quarter_of_an_hour_long():
    history = History(100.0)
    for document in looks(*[[waiting(pid, pid / 100) for pid in range(50)]] * 20):
        history.add(document)
    columns = history.as_columns()
    assert sorted(columns["waits"]) == [f"gpu01:{pid}" for pid in range(43, 50)]
    assert {len(column) for column in (columns["time"], *columns["waits"].values())} == {SECONDS / 100}
