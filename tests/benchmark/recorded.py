"""The ratios that were recorded on a quiet machine, in ``recorded.json``, and the comparison with those of a run.

Ratios and not rates, so that they mean something on another machine: not the same there, but not half as much either.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from .claims import Claim, find_losses

FILE = Path(__file__).with_name("recorded.json")

# What a ratio may lose: the spread of a machine that does other things, too.
LEAST_LEFT = 0.8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a program record ratios, or check them."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--record", action="store_true", help="write the ratios of claims to recorded.json")
    group.add_argument(
        "--check", action="store_true", help=f"fail below {100 * LEAST_LEFT:g} %% of the recorded ratios"
    )


def load() -> dict[str, float]:
    """Return the recorded ratios by the name of their claim."""
    return dict(json.loads(FILE.read_text())["ratios"])


def record(ratios: Mapping[str, float], machine: str) -> None:
    """Write these ratios over the recorded ones of the same names, and where they were measured."""
    found = json.loads(FILE.read_text())
    found["machines"].update(dict.fromkeys(ratios, machine))
    found["ratios"].update({name: round(ratio, 3) for name, ratio in ratios.items()})
    FILE.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


def check(claims: Mapping[str, Claim], ratios: Mapping[str, float]) -> bool:
    """Return whether enough is left of each ratio that was recorded; says so on standard error."""
    losses = find_losses(claims, ratios, load(), LEAST_LEFT)
    for line in losses:
        print(f"slower than recorded: {line}", file=sys.stderr)
    if not losses:
        print(f"all ratios have {LEAST_LEFT:.0%} or more of what was recorded", file=sys.stderr)
    return not losses


def conclude(args: argparse.Namespace, claims: Mapping[str, Claim], ratios: Mapping[str, float], machine: str) -> int:
    """Do what these options say; returns the exit status."""
    if args.record:
        record(ratios, machine)
    return int(args.check and not check(claims, ratios))
