"""The programs of the benchmark say what they take."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("name", ["__main__", "startup", "scale", "link", "gpu", "pictures.__main__"])
def test_help_is_printed(name, monkeypatch, capsys):
    program = importlib.import_module(f"tests.benchmark.{name}")
    monkeypatch.setattr(sys, "argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out
