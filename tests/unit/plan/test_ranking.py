from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from rpcdataloader.plan.workers import Pace, Ranking, WorkerPace


def workers(count) -> list[WorkerPace]:
    pace = Pace(16)
    return [WorkerPace(order, None, order, pace, since=0.0) for order in range(count)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from(["put", "discard", "send", "answer", "fail"]),
            st.sampled_from([0.5, 1.0, 7.0]),
        )
    )
)
def test_soonest_is_first_whatever_has_happened(events):
    """Also among workers that have never answered, of which other things are expected with each answer."""
    records = workers(5)
    ranking: Ranking = Ranking()
    ranked: set[WorkerPace] = set()
    for number, (which, event, seconds) in enumerate(events):
        record = records[which]
        if event == "send":
            record.sent(number, 0.0)
        elif event in ("answer", "fail") and record.in_flight:
            record.answered(next(iter(record.in_flight)), None if event == "fail" else seconds, 0.0)
        if event == "discard":
            record.leave_ranking()
            ranked.discard(record)
        elif event == "put" or record in ranked:
            ranking.put(record)
            ranked.add(record)
        assert list(ranking) == sorted(ranked, key=lambda one: (one.expect_finish(), one.order))
        assert bool(ranking) == bool(ranked)
