from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest

from tests.benchmark import slow_modules, startup
from tests.benchmark.startup_trainer import Start

START = Start(0.1, 0.2, 0.3, 0.05, 80_000_000, 4)


def test_table_and_claims_of_starts():
    slow = replace(START, first_seconds=4.0, second_seconds=None, idle_bytes=400_000_000)
    found = {("paths", "ours"): {0: START, 1: START}, ("paths", "torch-spawn"): {0: slow}}
    lines = startup.make_table([startup.ROWS["paths"]], found).splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert cells[2][2:] == ["ours", "100", "200", "300", "50.0", "80.0", "4"]
    assert cells[3][3] == "failed"
    assert cells[5][4:7] == ["4,000", "300", "-"]
    assert startup.measure_claims(found) == {
        "first-batch-paths": pytest.approx(0.05),
        "idle-memory": pytest.approx(0.2),
    }


def test_claims_name_what_is_measured():
    for claim in startup.CLAIMS.values():
        assert {claim.loader, claim.reference} <= set(startup.ROWS[claim.row].loaders)
        assert hasattr(START, claim.figure)


def test_import_from_the_slow_mount_asks_four_questions_per_module(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "benchmark.slow_modules", slow_modules)
    monkeypatch.setattr(slow_modules, "_ask", lambda: asked.append(1))
    slow_modules.write(tmp_path, 3)
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module(slow_modules.NAME)
    asked.clear()
    modules = [importlib.import_module(f"{package.__name__}.module_{number}") for number in range(3)]
    assert [module.get() for module in modules] == [0, 1, 2]
    assert len(asked) == 3 * 4
    for name in [package.__name__, *(module.__name__ for module in modules)]:
        del sys.modules[name]
