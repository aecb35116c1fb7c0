"""What becomes of tasks at which workers have died."""

from __future__ import annotations

import pytest

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.engine import Trouble


@pytest.mark.parametrize(
    ("places", "limit", "left_out", "num_deaths"),
    [
        # Enough at one sample: it goes, and the next one begins anew.
        ([2, 2], 2, {2}, None),
        ([2, 2, 1], 2, {2}, None),
        ([2, 2, 1, 1], 2, {1, 2}, None),
        ([0], 1, {0}, None),
        # Deaths by chance come between.
        ([2, 0, 2], 2, {2}, None),
        ([2, None, 2], 2, {2}, None),
        # There is no one sample: deaths elsewhere than at the most suspect one condemn the task.
        ([None], 1, set(), 1),
        ([None, None], 2, set(), 2),
        ([0, 1, 2], 2, set(), 3),
        ([0, None, 1], 2, set(), 3),
        ([2, 2, None, None], 2, {2}, 2),
        ([0, 1, 0, 1], 3, set(), None),
        ([0, 1, 0, 1, None], 3, set(), 5),
    ],
)
def test_sample_at_which_workers_died_is_left_out(places, limit, left_out, num_deaths):
    trouble, options = Trouble(), PlanOptions(1, max_retries=limit, leaves_out=True)
    died = [trouble.died(f"worker {number} died", place, options) for number, place in enumerate(places)]
    assert died == [False] * (len(places) - 1) + [num_deaths is not None]
    assert trouble.left_out.keys() == left_out
    if num_deaths:
        assert trouble.reason.startswith(f"has ended {num_deaths} workers in a row: ")


def test_reason_names_the_deaths_since_the_last_sample_was_left_out():
    trouble, options = Trouble(), PlanOptions(1, max_retries=2, leaves_out=True)
    for number, place in enumerate((2, 2, 0, 0)):
        trouble.died(f"worker {number} died", place, options)
    assert trouble.left_out == {
        2: "has ended 2 workers in a row: worker 0 died; worker 1 died",
        0: "has ended 2 workers in a row: worker 2 died; worker 3 died",
    }


def test_no_sample_is_left_out_unless_the_user_says_so():
    trouble, options = Trouble(), PlanOptions(1, max_retries=2)
    assert [trouble.died("a worker died", 2, options) for _ in range(2)] == [False, True]
    assert trouble.left_out == {}
