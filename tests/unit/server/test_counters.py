"""Rows of numbers in shared memory."""

from __future__ import annotations

import os

import pytest

from rpcdataloader.server.counters import NUM_ROWS, CounterTable


def test_writes_of_a_fork_are_seen():
    table = CounterTable()
    row = table.row(table.open())
    pid = os.fork()
    if pid == 0:
        row.tasks[0] += 5
        row.traffic[1] = 2**40
        row.error = "LookupError: ein beschädigtes Bild"
        os._exit(0)
    os.waitpid(pid, 0)
    assert row.work() == {"tasks": 5, "calls": 0, "errors": 0, "received_bytes": 0, "sent_bytes": 2**40}
    assert row.error == "LookupError: ein beschädigtes Bild"


@pytest.mark.parametrize(("text", "read"), [("x" * 500, "x" * 192), ("é" * 500, "é" * 96), ("x" + "é" * 500, None)])
def test_text_that_is_too_long_is_cut(text, read):
    row = CounterTable(2).row(1)
    row.error = text
    assert row.error == (read or "x" + "é" * 95)


def test_rows_are_used_again_in_turn_and_begin_at_zero():
    """The one that was freed last comes last: its process may be about to end."""
    table = CounterTable(4)
    places = [table.open() for _ in range(3)]
    for place in places:
        row = table.row(place)
        row.calls[0], row.error = 7, "bad"
    table.close(places[1])
    table.close(places[0])
    again = [table.open(), table.open()]
    assert again == [places[1], places[0]]
    assert [(table.row(place).calls[0], table.row(place).error) for place in again] == [(0, "")] * 2


def test_full_table_has_no_room():
    table = CounterTable(3)
    assert sorted(table.open() for _ in range(2)) == [1, 2]
    with pytest.raises(OSError, match="no room for another process"):
        table.open()
    table.close(1)
    assert table.open() == 1
    assert NUM_ROWS == 8192


def test_row_of_nobody_is_given_to_nobody():
    table = CounterTable(3)
    assert 0 not in {table.open(), table.open()}
