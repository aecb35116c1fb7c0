from __future__ import annotations

import itertools

import pytest

from rpcdataloader.loader import tasks


def nested():
    yield from inner()
    yield 100
    yield from range(3)


def inner():
    yield from [1, 2, 3]
    yield 7


@pytest.mark.parametrize("num_taken", [0, 1, 3])
@pytest.mark.parametrize(
    "make",
    [nested, lambda: iter(range(5, 50, 3)), lambda: iter([*range(20)]), lambda: iter([]), lambda: iter((1, 2, 3))],
)
def test_skipping_is_asking_and_throwing_away(make, num_taken, monkeypatch):
    monkeypatch.setattr(tasks, "_CHUNK_SIZE", 2)
    for count in range(25):
        skipped, asked = make(), make()
        for iterator in skipped, asked:
            list(itertools.islice(iterator, num_taken))
        assert tasks._consume(skipped, count) == len(list(itertools.islice(asked, count)))
        assert list(skipped) == list(asked)
