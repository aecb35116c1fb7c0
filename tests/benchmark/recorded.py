"""The ratios that were recorded on a quiet machine, in ``recorded.json``, and the comparison with those of a run.

Ratios and not rates, so that they mean something on another machine: not the same there, but not half as much either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .claims import Goal, find_losses

FILE = Path(__file__).with_name("recorded.json")

# What a ratio may lose: the spread of a machine that does other things, too.
LEAST_LEFT = 0.8


def load(file: Path = FILE) -> dict[str, float]:
    """Return the recorded ratios by the name of their claim; none if nothing was recorded.

    Raises:
        ValueError: The file is not what :func:`record` writes.
    """
    if not file.exists():
        return {}
    ratios = json.loads(file.read_text())["ratios"]
    if not all(isinstance(ratio, (int, float)) and ratio > 0 for ratio in ratios.values()):
        raise ValueError(f"{file} holds ratios that are no positive numbers: {ratios}")
    return dict(ratios)


def record(ratios: Mapping[str, float], machine: Mapping[str, Any], file: Path = FILE) -> None:
    """Write these ratios over the recorded ones of the same names, and where they were measured."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"machines": {}, "ratios": {}}
    found["machines"].update(dict.fromkeys(ratios, machine["text"]))
    found["ratios"].update({name: round(ratio, 3) for name, ratio in ratios.items()})
    file.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


def find_known(goals: Mapping[str, Goal], file: Path = FILE) -> list[str]:
    """Return those of these claims that are recorded; says on standard error if there is none."""
    recorded = load(file)
    known = [name for name in goals if name in recorded]
    if not known:
        print(f"nothing is recorded yet in {file.name}: run this with --record, on a quiet machine", file=sys.stderr)
    return known


def check(goals: Mapping[str, Goal], ratios: Mapping[str, float], file: Path = FILE) -> int:
    """Compare with what was recorded; says the result on standard error.

    Returns:
        The exit status: 0 if enough is left of each ratio, 1 if not, 2 if none of them was ever recorded.
    """
    known = find_known(goals, file)
    if not known:
        return 2
    losses = find_losses(goals, ratios, load(file), LEAST_LEFT)
    for line in losses:
        print(f"slower than recorded: {line}", file=sys.stderr)
    if not losses:
        print(f"all of {len(known)} ratios have {LEAST_LEFT:.0%} or more of what was recorded", file=sys.stderr)
    return 1 if losses else 0
