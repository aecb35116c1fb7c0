from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from rpcdataloader.loader.tasks import Progress, Task


@given(order=st.permutations(range(6)), num_delivered=st.integers(0, 6))
def test_progress_is_what_was_delivered_without_a_gap(order, num_delivered):
    progress = Progress(1, 0)
    delivered = order[:num_delivered]
    for number in delivered:
        progress.delivered(Task([], number, 0, 10 + number, f"after {number}"))
    without_gap = next(number for number in range(7) if number not in delivered)
    assert progress.num_batches == without_gap
    assert progress.num_samples == sum(10 + number for number in range(without_gap))
    assert set(progress.ahead) == {number for number in delivered if number > without_gap}
    assert progress.num_yielded == num_delivered
    assert progress.sampler == (f"after {without_gap - 1}" if without_gap else None)


def test_progress_of_streams_keeps_the_last_state_of_each():
    progress = Progress(1, 0, streams=["", ""])
    progress.delivered(Task(None, 0, 0, 1), 1, "state")
    assert (progress.streams, progress.turn, progress.num_batches) == (["", "state"], 2, 1)
    progress.delivered(Task(None, 1, 1, 1), 1)  # an exception
    assert (progress.streams, progress.turn, progress.num_batches) == (["", "state"], 2, 2)
