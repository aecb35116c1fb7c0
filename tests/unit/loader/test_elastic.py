"""The state that a rank goes on from, of the states of all ranks of another job."""

from __future__ import annotations

import pytest

from rpcdataloader.loader.origin import deal


def state(rank, num_ranks, *, num_batches=3, start=12, in_step=True, num_skipped=0, streams=()):
    """What matters here of a state in the middle of an epoch."""
    origin = {"job": [rank, num_ranks], "partition": [rank, num_ranks], "samplers": []}
    return {
        "epoch": 0, "base_seed": rank, "num_batches": num_batches, "in_step": in_step, "num_skipped": num_skipped,
        "whole": False, "finished": False, "streams": [list(stream) for stream in streams],
        "start": {"origin": origin, "order": {"start": start}},
    }  # fmt: skip


@pytest.mark.parametrize("change", [{"num_batches": 4}, {"start": 16}, {"in_step": False}])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_of_one_order_that_are_not_at_the_same_place_cannot_become_others(change, num_ranks):
    together = [state(0, 2), state(1, 2)]
    assert deal(together, 0, num_ranks, {}, is_iterable=False) == together[0]
    apart = [state(0, 2), state(1, 2, **change)]
    for rank in range(num_ranks):  # on all ranks, or a job would hang
        with pytest.raises(ValueError, match="the ranks were not at the same batch"):
            deal(apart, rank, num_ranks, {}, is_iterable=False)
    assert deal(apart, 1, 2, {}, is_iterable=False) == apart[1]


def test_samples_that_were_skipped_are_charged_to_all_ranks_alike():
    stream = (5, 5, "", None, False)
    states = [state(rank, 4, num_skipped=3, streams=[stream]) for rank in range(4)]
    for rank in range(2):
        assert deal(states, rank, 2, {}, is_iterable=True)["num_skipped"] == 3
