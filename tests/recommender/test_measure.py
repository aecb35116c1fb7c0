"""The program that prints the numbers of the recommender's page, on small models."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.recommender.measure import compare, main, parse_arguments
from tests.conftest import TIMEOUT_SCALE
from tests.integration.network import why_not

ROOT = Path(__file__).parents[2]
SMALL = ["--batch-size", "16", "--table-rows", "20", "--steps", "2"]


def read_tables(output):
    """The rows of all tables, by the text of their first column."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")]
    numbers = [cells for cells in rows if cells[1][:1].isdigit()]
    return {cells[0]: [float(cell.replace(",", "")) for cell in cells[1:] if cell] for cells in numbers}


def test_ratios_are_those_within_a_round():
    values = {"slow": iter([10.0, 100.0, 1000.0]), "fast": iter([5.0, 25.0, 500.0])}
    found = compare({name: lambda name=name: next(values[name]) for name in values}, rounds=3)
    assert found == {"slow": (100.0, 1.0), "fast": (25.0, 0.5)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--device", "cuda"], "there is no GPU for --device cuda"),
        (["--parts", "overlap"], "the overlap needs ranks: torchrun --nproc-per-node 2"),
        (["--parts", "everything"], "invalid choice"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, message, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse_arguments(wrong)
    assert message in capsys.readouterr().err


def test_passes_leave_fewer_inputs_and_kernels(capsys):
    main(["--parts", "passes", "--features", "12", "--compile-up-to", "0", *SMALL])
    table = read_tables(capsys.readouterr().out)
    plain, combined, fused = (table[name] for name in ("as it is", "combined", "combined and fused"))
    assert [row[0] for row in (plain, combined, fused)] == [25, 3, 3]  # with the dense columns
    assert fused[2] < plain[2]  # kernels
    assert fused[1] < plain[1]  # nodes
    assert all(len(row) == 7 and min(row) > 0 for row in table.values())


def test_loaders_are_measured_with_both_forms_of_a_batch(capsys, clean_client):  # noqa: ARG001
    main(["--parts", "loading", "--wide", "40", "--rounds", "1", "--seconds", "0.2", *SMALL])
    table = read_tables(capsys.readouterr().out)
    assert [row[0] for row in table.values()] == [82, 82, 4, 4]
    assert all(len(row) == 4 and row[1] > 0 for row in table.values())


def run(*command):
    """Run a module to its end; returns what it prints. The compiler warns of things that are not ours."""
    words = [sys.executable, "-m", *command, *SMALL]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100 * TIMEOUT_SCALE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compiled_models_are_measured():
    # The default backend takes minutes for what this one does in seconds.
    output = run("examples.recommender.measure", "--parts", "passes", "--features", "2", "--backend", "eager")
    names = list(read_tables(output))
    assert re.fullmatch(r"as it is, compiled in \d+ s", names[3])
    assert re.fullmatch(r"combined and fused, compiled in \d+ s", names[4])


@pytest.mark.parametrize("start", ["torchrun", "link"])
def test_overlap_is_measured_with_two_ranks(start):
    small = ["--overlap-features", "4", "--overlap-dim", "8", "--tower", "16"]
    if start == "torchrun":
        options = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        options += ["-m", "examples.recommender.measure", "--parts", "overlap"]
    elif reason := why_not():
        pytest.skip(f"this needs root and network namespaces ({reason})")
    else:
        options = ["tests.benchmark.overlap", "--megabits", "100"]
    output = run(*options, *small)
    assert set(read_tables(output)) == {"all-to-all", "request and wait"}
    assert "2 ranks, 4 features of width 8, 16 rows each" in output
