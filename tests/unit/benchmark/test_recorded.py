from __future__ import annotations

import json

import pytest

from tests.benchmark import recorded
from tests.benchmark.claims import Claim

CLAIMS = {
    "faster": Claim("images", "torch", 1.35, "images", "ours", "torch", "idle.rate"),
    "first": Claim("first batch", "torch", 1.0, "small", "ours", "torch", "first_seconds", at_most=True),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recorded.json"
    path.write_text('{"machines": {}, "ratios": {}}')
    return path


def test_recording_one_program_keeps_what_the_other_has_recorded(file):
    recorded.record({"faster": 1.5}, "2 CPUs", file)
    recorded.record({"first": 0.81237}, "4 CPUs", file)
    assert recorded.load(file) == {"faster": 1.5, "first": 0.812}
    assert json.loads(file.read_text())["machines"] == {"faster": "2 CPUs", "first": "4 CPUs"}


def test_check_fails_below_four_fifths_of_what_was_recorded(file, capsys):
    recorded.record({"faster": 2.0, "first": 0.8}, "", file)
    assert recorded.check(CLAIMS, {"faster": 1.61, "first": 0.99}, file)
    assert not recorded.check(CLAIMS, {"faster": 1.59, "first": 0.99}, file)
    assert "slower than recorded: faster (images, against torch): 1.59, 2.00 recorded" in capsys.readouterr().err
