"""The table and the plot."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from examples.storage_formats.plan import Format, Link, Loader, Run
from examples.storage_formats.result import Report

LINK = Link(0.01, 20e6, 100e6)


def row(workers, sample_format, rate, reads, step=0.02):
    run = Run(LINK, 1, step, Loader("rpc", workers), Format(*sample_format), 400)
    return run, {"samples_per_second": rate, "reads": reads}


@pytest.fixture
def report():
    rows = [
        row(4, ("objects",), 35.7, 3.9),
        row(4, ("tfrecord", 8), 49.8, None),
        row(16, ("objects",), 61.0, 14.2),
        row(16, ("objects",), 62.0, 15.0, step=0.0),
    ]
    return Report(["python", "-m", "examples.storage_formats"], 1_500_000, 800, 16, rows, ["tf.data, as it is missing"])


def test_table_has_a_row_per_loader_and_a_column_per_format(report):
    lines = report.format_tables("2026-11-22", "2 cores").splitlines()
    assert "(at most 66.7 samples/s)" in "".join(lines)
    assert "| loader, workers per rank | samples | objects | tfrecord-8 |" in lines
    assert "| this loader, 4 | 400 | 35.7 (4) | 49.8 |" in lines
    assert "| this loader, 16 | 400 | 61.0 (14) |  |" in lines
    assert "| this loader, 16 | 400 | 62.0 (15) |" in lines
    assert lines[-1] == "- Left out: tf.data, as it is missing"
    assert lines[0] == "Measured 2026-11-22 on 2 cores, with"


def test_plot_has_a_line_per_format_and_the_bound(report, tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    assert "<!-- objects -->" in text
    assert "<!-- storage -->" in text
    assert "<!-- tfrecord-8 -->" not in text  # how many reads there were is not known
