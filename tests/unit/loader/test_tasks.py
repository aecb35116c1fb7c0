"""The progress of a pass whose batches come in another order."""

from __future__ import annotations

import tracemalloc

import pytest

from rpcdataloader import RPCDataloader
from rpcdataloader.loader.tasks import Progress, Returned, Task


def deliver(progress, numbers):
    for number in numbers:
        progress.returned += (Returned(Task([number], number, number, 1), None, None, None),)
        progress.settle()


@pytest.mark.parametrize("order", [[2, 1, 0, 3], [3, 1, 0, 2], [1, 2, 3, 0]])
def test_progress_does_not_depend_on_the_order(order):
    progress, expected = Progress(0, 0), Progress(0, 0)
    deliver(progress, order)
    deliver(expected, range(4))
    assert progress == expected


class Stateful:
    """A sampler whose state cannot be had, by a mistake."""

    def __iter__(self):
        return iter([1, 2])

    def state_dict(self):
        return next(iter([]))

    def load_state_dict(self, state):
        pass


def test_state_of_a_sampler_that_raises_stop_iteration_ends_no_epoch():
    loader = RPCDataloader([0, 10, 20], batch_size=None, sampler=Stateful(), workers="inline")
    with pytest.raises(RuntimeError, match=r"state_dict\(\) of the sampler raised StopIteration"):
        list(loader)


def test_batch_past_a_missing_one_costs_the_same_after_thousands():
    progress = Progress(0, 0)
    deliver(progress, range(1, 10_000))
    tracemalloc.start()
    try:
        deliver(progress, range(10_000, 10_010))
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - current < 10_000, "something is copied"
    deliver(progress, [0])
    assert progress.num_batches == 10_010
    assert not progress.ahead
