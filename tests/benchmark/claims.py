"""What is claimed of the loaders' speed: each claim is a ratio, measured in one run, with a goal.

Ratios that were recorded on a quiet machine are in ``recorded.json``, and those of a run are compared with them. Ratios
and not rates, so that they mean something on another machine: not the same there, but not half as much either.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .table import format_ratio, format_table

# What was measured in each round, by the number of the round, of each subject and loader.
Found = Mapping[tuple[str, str], Mapping[int, Any]]

RECORDED = Path(__file__).with_name("recorded.json")

# What a ratio may lose: the spread of a machine that does other things, too.
LEAST_LEFT = 0.8


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure of a loader, divided by that of another one, and what is good.

    Attributes:
        work: What is done, for the table.
        against: What the ratio is to, for the table.
        goal: The ratio that is wanted.
        subject: Name of the workload, or of the row of ``startup.py``.
        loader: Name of the loader that the claim is about.
        reference: Name of the one that it is compared with.
        figure: Attribute of what was measured, as ``idle.rate``.
        at_most: Whether less is better.
    """

    work: str
    against: str
    goal: float
    subject: str
    loader: str
    reference: str
    figure: str
    at_most: bool = False

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.goal if self.at_most else ratio >= self.goal

    def loss(self, ratio: float, before: float) -> float:
        """How much is left of what there was before: 1 for as much, 0.5 for half as good."""
        return before / ratio if self.at_most else ratio / before


_IMAGES = "64x3x224x224 float32"
_TORCH = "torch DataLoader"
_TUNED = "torch, malloc as in ours"
_READY = "bare sockets, ready batches"

CLAIMS = {
    "float32-tcp": Claim(_IMAGES, _TORCH, 1.35, "float32", "ours-tcp", "torch", "idle.rate"),
    "float32-local": Claim(f"{_IMAGES}, one machine", _TORCH, 4.0, "float32", "ours-local", "torch", "idle.rate"),
    "uint8-local": Claim(
        "64x3x224x224 uint8, one machine", _TORCH, 5.0, "uint8", "ours-local", "torch", "idle.rate"
    ),
    "float32-malloc": Claim(
        f"{_IMAGES}, one machine", _TUNED, 1.0, "float32", "ours-local", "torch-malloc", "idle.rate"
    ),
    "uint8-malloc": Claim(
        "64x3x224x224 uint8, one machine", _TUNED, 1.0, "uint8", "ours-local", "torch-malloc", "idle.rate"
    ),
    "jpeg-local": Claim(
        "JPEG decode and crop, one machine", _TORCH, 1.15, "jpeg", "ours-local", "torch", "idle.rate"
    ),
    "jpeg-malloc": Claim(
        "JPEG decode and crop, one machine", _TUNED, 1.0, "jpeg", "ours-local", "torch-malloc", "idle.rate"
    ),
    "cpu-local": Claim(
        "trainer CPU per GB, one machine", _TORCH, 0.25, "float32", "ours-local", "torch", "idle.cpu", at_most=True
    ),
    "float32-bare": Claim(
        _IMAGES, "bare sockets, batches made", 0.95, "float32", "ours-tcp", "bare-made", "idle.rate"
    ),
    "float32-moved": Claim(_IMAGES, _READY, 0.95, "float32", "ours-tcp", "bare", "idle.rate"),
    "ready": Claim("38.5 MB that are ready", _READY, 0.95, "ready", "ours-tcp", "bare", "idle.rate"),
    "uint8-tcp": Claim("64x3x224x224 uint8", _TORCH, 1.5, "uint8", "ours-tcp", "torch", "idle.rate"),
    "integer": Claim("one integer per batch", _TORCH, 6.0, "integer", "ours-tcp", "torch", "idle.rate"),
    "tensors": Claim("2,000 small tensors per batch", _TORCH, 60.0, "tensors", "ours-tcp", "torch", "idle.rate"),
    "jpeg": Claim("JPEG decode and crop", _TORCH, 1.05, "jpeg", "ours-tcp", "torch", "idle.rate"),
    "cpu": Claim("trainer CPU per GB", "bare sockets", 1.1, "float32", "ours-tcp", "bare", "idle.cpu", at_most=True),
    "busy": Claim(
        "trainer busy for 10 ms per batch", "original", 2.0, "float32", "ours-tcp", "original", "busy.rate"
    ),
    "step": Claim(
        "CPU time of a busy trainer's thread", "list of ready batches", 1.05, "float32", "ours-tcp", "ready",
        "busy.thread", at_most=True,
    ),
}  # fmt: skip


def plan(claims: Mapping[str, Claim], order: Sequence[str]) -> dict[str, list[str]]:
    """Return which loaders to measure at which workload, in the order of the claims and of the loaders."""
    wanted: dict[str, set[str]] = {}
    for claim in claims.values():
        wanted.setdefault(claim.subject, set()).update((claim.loader, claim.reference))
    return {subject: [loader for loader in order if loader in loaders] for subject, loaders in wanted.items()}


def median_ratio(found: Found, subject: str, loader: str, reference: str, figure: str) -> float | None:
    """Return the median of the ratios within one round, which a slow minute of the machine changes least.

    None if no round has both.
    """
    get = operator.attrgetter(figure)
    others = found.get((subject, reference), {})
    pairs = [
        (get(one), get(others[number])) for number, one in found.get((subject, loader), {}).items() if number in others
    ]
    ratios = [one / other for one, other in pairs if other]
    return statistics.median(ratios) if ratios else None


def measure_claims(claims: Mapping[str, Claim], found: Found) -> dict[str, float]:
    """Return the ratios of those claims for which there is enough."""
    ratios = {
        name: median_ratio(found, claim.subject, claim.loader, claim.reference, claim.figure)
        for name, claim in claims.items()
    }
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def format_claims(claims: Mapping[str, Claim], ratios: Mapping[str, float]) -> str:
    """Return a table of the claims that were measured, in their order."""
    rows = []
    for name, claim in claims.items():
        if name in ratios:
            wanted = f"{'at most' if claim.at_most else 'at least'} {claim.goal:g}"
            verdict = "yes" if claim.is_met(ratios[name]) else "no"
            rows.append([claim.work, claim.against, format_ratio(ratios[name]), wanted, verdict])
    return format_table(["work", "against", "ratio", "goal", "met"], rows, 2)


def find_losses(claims: Mapping[str, Claim], ratios: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """Return a line for each ratio that has less than ``LEAST_LEFT`` left of what was recorded.

    A claim that is recorded and was not measured is a line, too; one that was never recorded is none.
    """
    lines = []
    for name, claim in claims.items():
        if name not in recorded:
            continue
        what = f"{name} ({claim.work}, against {claim.against})"
        if name not in ratios:
            lines.append(f"{what}: not measured, {recorded[name]:.2f} recorded")
        elif (left := claim.loss(ratios[name], recorded[name])) < LEAST_LEFT:
            lines.append(f"{what}: {ratios[name]:.2f}, {recorded[name]:.2f} recorded: {left:.0%} of that")
    return lines


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a program record ratios, or check them."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--record", action="store_true", help="write the ratios of claims to recorded.json")
    group.add_argument(
        "--check", action="store_true", help=f"fail below {100 * LEAST_LEFT:g} %% of the recorded ratios"
    )


def load() -> dict[str, float]:
    """Return the recorded ratios by the name of their claim."""
    return dict(json.loads(RECORDED.read_text())["ratios"])


def conclude(args: argparse.Namespace, claims: Mapping[str, Claim], ratios: Mapping[str, float], machine: str) -> int:
    """Do what these options say; returns the exit status."""
    if args.record:
        found = json.loads(RECORDED.read_text())
        found["machines"].update(dict.fromkeys(ratios, machine))
        found["ratios"].update({name: round(ratio, 3) for name, ratio in ratios.items()})
        RECORDED.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    losses = find_losses(claims, ratios, load()) if args.check else []
    for line in losses:
        print(f"slower than recorded: {line}", file=sys.stderr)
    return int(bool(losses))
