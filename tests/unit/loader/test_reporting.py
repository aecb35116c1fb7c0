"""A diagnosis as a report."""

from __future__ import annotations

import dataclasses
import math

from rpcdataloader.diagnosis.verdict import diagnose
from rpcdataloader.loader.iterator import to_status
from rpcdataloader.wire.status import MAX_REPORT_BYTES, Report
from tests.unit.diagnosis.recorded import make_recorder, records

WAITS = diagnose(records(blocked=0.02, consumer=0.005, num_batches=500))


def test_report_says_what_the_diagnosis_says():
    status = to_status(WAITS, "Images", 3)
    assert WAITS.more_workers is not None
    assert (status.dataset, status.rank, status.bound, status.text) == ("Images", 3, WAITS.bound, WAITS.text)
    assert (round(status.wait_share, 3), status.more_workers) == (0.8, WAITS.more_workers[1])
    assert (status.demand_per_second, status.delivered_per_second) == (200, 40)
    evidence = {value.name: value.value for value in status.evidence}
    assert (evidence["demand_rate"], evidence["workers_rate"]) == (200, 200)
    assert {value.name for value in status.stages} == set(WAITS.stages)
    assert Report.decode(Report.of([status] * 2)).loops == [status] * 2


def test_report_of_what_has_not_begun():
    status = to_status(diagnose(make_recorder().snapshot(waiting=20.0)), "Images", None)
    assert (status.bound, status.stages, status.delivered_per_second) == ("unclear", [], 0)


def test_report_leaves_out_what_is_infinite_and_cuts_what_is_long():
    endless = dataclasses.replace(WAITS, demand=math.inf, evidence={**WAITS.evidence, "demand_rate": math.inf})
    status = to_status(dataclasses.replace(endless, text="x" * 10**5), "x" * 10**5, None)
    assert status.demand_per_second is None
    assert "demand_rate" not in {value.name for value in status.evidence}
    assert len(Report.of([status])) < MAX_REPORT_BYTES / 2


def test_report_leaves_out_what_no_server_takes():
    evidence = {**WAITS.evidence, "large_rate": 9.99999e17, "larger_rate": 1e300, "odd_rate": math.nan}
    many = dataclasses.replace(WAITS, more_workers=(10**4, 10**6, 10**8), demand=1e18, evidence=evidence)
    status = to_status(many, "Images", None)
    assert (status.more_workers, status.demand_per_second) == (100_000, None)
    assert not {value.name for value in status.evidence} & {"large_rate", "larger_rate", "odd_rate"}
    assert Report.decode(Report.of([status])).loops == [status]
