from __future__ import annotations

import json

import pytest

from tests.benchmark import recorded
from tests.benchmark.claims import Goal

GOALS = {"faster": Goal("images", "torch", 1.35), "first": Goal("first batch", "torch", 1.0, at_most=True)}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "recorded.json"


def test_nothing_recorded_is_said_and_is_no_success(file, capsys):
    assert recorded.check(GOALS, {"faster": 2.0}, file) == 2
    assert "nothing is recorded yet" in capsys.readouterr().err


def test_recording_one_program_keeps_what_the_other_has_recorded(file):
    recorded.record({"faster": 1.5}, {"text": "2 CPUs"}, file)
    recorded.record({"first": 0.81237}, {"text": "4 CPUs"}, file)
    assert recorded.load(file) == {"faster": 1.5, "first": 0.812}
    assert json.loads(file.read_text())["machines"] == {"faster": "2 CPUs", "first": "4 CPUs"}


def test_check_fails_below_four_fifths_of_what_was_recorded(file, capsys):
    recorded.record({"faster": 2.0, "first": 0.8}, {"text": ""}, file)
    assert recorded.check(GOALS, {"faster": 1.61, "first": 0.99}, file) == 0
    assert recorded.check(GOALS, {"faster": 1.59, "first": 0.99}, file) == 1
    assert "slower than recorded: faster (images, against torch): 1.59, 2.00 recorded" in capsys.readouterr().err


def test_file_with_something_else_is_refused(file):
    file.write_text('{"ratios": {"faster": "much"}}')
    with pytest.raises(ValueError, match="no positive numbers"):
        recorded.load(file)
