"""What speeds and sizes mean, and what a report says."""

from __future__ import annotations

import json

import pytest

from rpcdataloader.check.report import (
    Finding,
    Report,
    in_bytes,
    in_digits,
    in_seconds,
    workers_to_feed,
    workers_to_fill,
)


def test_workers_that_fill_a_network():
    assert workers_to_fill(10, 125e6) == 10
    assert workers_to_fill(10, 124e6) == 11
    assert workers_to_fill(1, 1e9) == 1


def test_workers_that_feed_a_trainer():
    assert workers_to_feed(1000, 250) == 4
    assert workers_to_feed(1001, 250) == 5
    assert workers_to_feed(1, 250) == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [(12, "12 bytes"), (999.6, "1 kB"), (1234, "1.23 kB"), (38.5e6, "38.5 MB"), (2.5e9, "2.5 GB"), (4e12, "4,000 GB")],
)
def test_bytes_have_three_digits(number, text):
    assert in_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(11384.2, "11,384"), (412.4, "412"), (9.876, "9.88"), (0.0085, "0.0085"), (1e-9, "0")]
)
def test_numbers_have_no_exponent(number, text):
    assert in_digits(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1234.56, "1,234.6 s"), (0.3, "0.3 s"), (0.012, "12 ms"), (0.0004, "less than 1 ms")]
)
def test_seconds(seconds, text):
    assert in_seconds(seconds) == text


def test_report_shows_findings_as_they_come_and_remembers_what_failed():
    shown: list[Finding] = []
    report = Report(show=shown.append)
    report.ok("size", "3 bytes", bytes_per_sample=3)
    report.note("pickles", "no", ["because"])
    assert not report.failed
    report.fail("repeats", "not")
    report.fail("repeats", "not either")
    assert report.failed == ["repeats"]
    assert shown == report.findings
    assert shown[1].lines() == ["note    pickles   no", "                  because"]
    data = json.loads(json.dumps(report.as_data()))
    assert (data["ok"], data["bytes_per_sample"], len(data["findings"])) == (False, 3, 4)
    assert data["findings"][1] == {"name": "pickles", "level": "note", "text": "no", "details": ["because"]}
