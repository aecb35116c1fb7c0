"""Records of any kind: a diagnosis never fails, its numbers are what their names promise, and it can be reported."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.diagnosis.verdict import diagnose
from rpcdataloader.diagnosis.words import WORDS
from rpcdataloader.loader.waits import to_status
from rpcdataloader.wire.messages import Stages
from rpcdataloader.wire.status import Report
from tests.unit.diagnosis.recorded import make_setup, record

# Durations that are equal, none, tiny or long are more likely than others.
seconds = st.sampled_from([0.0, 1e-9, 1e-4, 0.001, 0.002, 0.02, 0.5, 1e4]) | st.floats(0.0, 1.0)
counts = st.sampled_from([1, 2, 8, 10**6]) | st.integers(1, 10**12)
stages = st.builds(Stages, **dict.fromkeys(Stages._fields, seconds))
setups = st.fixed_dictionaries(
    {
        "workers": st.dictionaries(st.integers(0, 5), st.sampled_from(["node07", "node08"]), min_size=1, max_size=5),
        "prefetch_factor": st.integers(1, 4),
        "max_in_flight_bytes": counts,
        "is_persistent": st.booleans(),
        "is_stream": st.booleans(),
    }
)
of_all = "consumer", "blocked", "drawn", "own", "ready", "copy", "stalled", "lock", "first_wait", "latency"
of_replies = "receive", "receive_cpu", "decode_cpu"
parts = st.fixed_dictionaries(
    {"num_batches": st.integers(0, 30), "stages": st.none() | stages},
    optional={
        "size_bytes": st.just(0) | counts,
        "start": st.dictionaries(st.sampled_from(["in_iter", "ready", "opened", "init", "dataset"]), seconds),
        "slow": st.dictionaries(st.integers(0, 5), stages, max_size=2),
        **dict.fromkeys(of_all + of_replies, seconds),
    },
)
BOUNDS = {name.split()[0] for name in WORDS}


@settings(max_examples=200, deadline=None)
@given(setups, parts, parts, st.none() | setups, st.just(0.0) | seconds)
def test_diagnosis_of_any_records_is_one_that_can_be_read_and_reported(setup, first, then, later, waiting):
    recorder = record(record(**first, **setup), **then)
    if later is not None:
        recorder.setup = make_setup(**later)
    diagnosis = diagnose(recorder.snapshot(waiting))
    assert diagnosis.bound in BOUNDS
    assert len(diagnosis.short) <= 30
    assert diagnosis.text.endswith(".")
    assert not {"nan", "inf"} & set(diagnosis.text.split())
    assert 0.0 <= diagnosis.wait_share <= 1.0
    for name, value in diagnosis.evidence.items():
        if isinstance(value, float):
            assert value >= 0.0, name
            assert value <= 1.0 or not name.endswith("_share"), name
            assert value < math.inf or name in {"demand_rate", "needed_rate"}, name
    if diagnosis.more_workers is not None:
        assert all(1 <= few <= many for few, many in pairwise(diagnosis.more_workers))
    status = to_status(diagnosis, "Images", 3, "", 5)
    assert Report.decode(Report.of([status])).loops == [status]
