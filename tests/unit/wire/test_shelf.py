"""Memory that is used again: which piece, and for how long it is kept."""

from __future__ import annotations

import random

import pytest

from rpcdataloader.wire import shelf as shelves
from rpcdataloader.wire.shelf import MAX_SURPLUS_LEASES, MAX_UNUSED_LEASES, Shelf, round_up

UNIT = 4096


@pytest.mark.parametrize("num_blocks", [1, 20, 65, 128, 1000])
def test_pieces_that_take_turns_are_found_again(num_blocks):
    """However many blocks a batch has, and batches are in use."""
    shelf, batches, num_new = Shelf(), [], 0
    for _ in range(40):
        batch = []
        for _ in range(num_blocks):
            if (piece := shelf.take(UNIT)) is None:
                piece, num_new = object(), num_new + 1
            batch.append(piece)
        batches.append(batch)
        if len(batches) > 3:
            for piece in batches.pop(0):
                shelf.put(piece, UNIT)
        assert not shelf.take_unused()
    assert num_new == 4 * num_blocks


@pytest.mark.parametrize(("num_times", "most"), [(1, MAX_SURPLUS_LEASES), (2, MAX_UNUSED_LEASES)])
def test_a_piece_that_others_leave_unused_goes(num_times, most):
    """Sooner if its size was never wanted again."""
    shelf = Shelf()
    for name, size_bytes in ("small", UNIT), *[("giant", 100 * UNIT)] * num_times:
        shelf.take(size_bytes)
        shelf.put(name, size_bytes)
    gone = []
    for _ in range(most + 1):
        assert not gone
        assert shelf.take(UNIT) == "small"
        shelf.put("small", UNIT)
        gone = shelf.take_unused()
    assert gone == ["giant"]
    assert shelf.kept_bytes == UNIT


def test_pieces_that_their_size_does_not_need_go_sooner_than_those_of_a_rare_size():
    shelf = Shelf()
    for _ in range(2):
        shelf.take(8 * UNIT)
        shelf.put("rare", 8 * UNIT)
    for _ in "ab":
        shelf.take(UNIT)
    for name in "ab":
        shelf.put(name, UNIT)
    gone = []
    for _ in range(MAX_SURPLUS_LEASES + 1):
        assert not gone
        shelf.put(shelf.take(UNIT), UNIT)
        gone = shelf.take_unused()
    assert gone == ["a"]
    assert shelf.kept_bytes == 9 * UNIT


def test_what_is_too_much_goes_the_longest_unused_first():
    shelf = Shelf(max_bytes=5 * UNIT)
    for size in (2, 1, 2, 1):
        assert shelf.take(size * UNIT) is None
    for name, size in ("a", 2), ("b", 1), ("c", 2), ("d", 1):
        shelf.put(name, size * UNIT)
    assert shelf.take_unused() == ["a"]
    assert shelf.kept_bytes == 4 * UNIT


def test_a_piece_serves_its_size_and_down_to_half_of_it():
    shelf = Shelf()
    for size in (3, 4, 7):
        shelf.take(size * UNIT)
        shelf.put(size, size * UNIT)
    assert [shelf.take(size * UNIT) for size in (3, 3, 3, 5, 5)] == [3, 4, None, 7, None]


def test_the_last_return_is_lent_first():
    """It is in the processor's cache."""
    shelf = Shelf()
    for _ in range(3):
        shelf.take(UNIT)
    for name in "abc":
        shelf.put(name, UNIT)
    assert [shelf.take(UNIT) for _ in range(3)] == ["c", "b", "a"]


def test_sizes_are_few_and_at_most_a_quarter_larger():
    sizes = {size: round_up(size, UNIT) for size in range(UNIT, 64 * UNIT, 123)}
    assert all(size <= rounded <= max(size * 1.25, size + UNIT) for size, rounded in sizes.items())
    assert all(rounded % UNIT == 0 for rounded in sizes.values())
    assert len({rounded for size, rounded in sizes.items() if 16 * UNIT < size <= 32 * UNIT}) == 4
    assert round_up(1, UNIT) == UNIT


@pytest.mark.parametrize("turns", [0, 2])
def test_any_order(turns, monkeypatch):
    monkeypatch.setattr(shelves, "MAX_UNUSED_LEASES", 5)
    monkeypatch.setattr(shelves, "_TURNS", turns)
    rng, shelf, lent, free, sizes = random.Random(turns), Shelf(max_bytes=200 * UNIT), [], set(), {}
    for number in range(5000):
        if lent and rng.random() < 0.5:
            piece = lent.pop(rng.randrange(len(lent)))
            shelf.put(piece, sizes[piece])
            free.add(piece)
        else:
            size = round_up(rng.randrange(1, 50) * UNIT, UNIT)
            piece = shelf.take(size)
            if piece is None:
                assert not any(size <= sizes[each] <= 2 * size for each in free)
                piece, sizes[number] = number, size
            else:
                free.remove(piece)
            assert size <= sizes[piece] <= 2 * size
            lent.append(piece)
        for piece in shelf.take_unused():
            free.remove(piece)
        assert shelf.kept_bytes == sum(sizes[piece] for piece in free) <= 200 * UNIT
