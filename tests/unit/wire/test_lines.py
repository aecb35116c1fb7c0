"""The limit on lines: what passes in a second, what is left out, and what is said of it."""

from __future__ import annotations

import math

import pytest

from rpcdataloader.wire.messages import MAX_BYTES_PER_SECOND, LineLimit


class Notes:
    def __init__(self):
        self.texts = []
        self.has_room = True

    def take(self, text):
        if self.has_room:
            self.texts.append(text)
        return self.has_room


@pytest.fixture
def notes():
    return Notes()


def test_lines_pass_up_to_the_bytes_of_a_second(notes):
    limit = LineLimit(notes.take)
    for second in 5.0, 6.0, 100.5:
        passed = [limit.admits("é" * 500, second + position / 100) for position in range(99)]
        assert passed == [True] * 61 + [False] * 38  # of 1000 bytes, and 64 besides
    assert notes.texts == ["38 lines left out"] * 2
    assert MAX_BYTES_PER_SECOND // 1064 == 61


def test_empty_lines_count_too(notes):
    limit = LineLimit(notes.take)
    assert sum(limit.admits("", 1.0) for _ in range(5000)) == 1024


def test_short_line_does_not_slip_in_after_a_long_one_that_did_not_pass(notes):
    limit = LineLimit(notes.take)
    assert not limit.admits("x" * MAX_BYTES_PER_SECOND, 1.0)
    assert not limit.admits("x", 1.5)
    assert limit.admits("x", 2.0)
    assert notes.texts == ["2 lines left out"]


def test_note_comes_when_the_second_is_over_though_no_line_comes(notes):
    limit = LineLimit(notes.take)
    assert limit.due == math.inf
    limit.tell(math.inf)
    limit.admits("x" * MAX_BYTES_PER_SECOND, 1.0)
    assert limit.due == 2.0
    limit.tell(1.9)
    assert notes.texts == []
    limit.tell(2.0)
    assert (notes.texts, limit.due) == (["1 lines left out"], math.inf)


def test_note_without_room_comes_later_and_counts_on(notes):
    limit = LineLimit(notes.take)
    notes.has_room = False
    limit.admits("x" * MAX_BYTES_PER_SECOND, 1.0)
    limit.tell(2.0)
    assert limit.due == 3.0
    limit.admits("x", 2.5)
    limit.leave_out()
    notes.has_room = True
    limit.tell(2.9)
    assert notes.texts == []
    limit.tell(3.0)
    assert notes.texts == ["2 lines left out"]
