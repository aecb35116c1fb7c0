"""What is claimed of the loaders' speed: each claim is a ratio, measured in one run, with a goal. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .table import format_ratio, format_table


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio, and what is good.

    Attributes:
        work: What is done, for the table.
        against: What the ratio is to, for the table.
        ratio: The goal.
        at_most: Whether less is better.
    """

    work: str
    against: str
    ratio: float
    at_most: bool = False

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.ratio if self.at_most else ratio >= self.ratio

    def loss(self, ratio: float, before: float) -> float:
        """How much is left of what there was before: 1 for as much, 0.5 for half as good."""
        return before / ratio if self.at_most else ratio / before


def median_ratio(values: Mapping[int, float], references: Mapping[int, float]) -> float | None:
    """Return the median of the ratios within one round, which a slow minute of the machine changes least.

    None if no round has both.
    """
    ratios = [value / references[number] for number, value in values.items() if references.get(number)]
    return statistics.median(ratios) if ratios else None


def format_claims(goals: Mapping[str, Goal], ratios: Mapping[str, float]) -> str:
    """Return a table of the claims that were measured, in the order of the goals."""
    rows = []
    for name, goal in goals.items():
        if name in ratios:
            wanted = f"{'at most' if goal.at_most else 'at least'} {goal.ratio:g}"
            verdict = "yes" if goal.is_met(ratios[name]) else "no"
            rows.append([goal.work, goal.against, format_ratio(ratios[name]), wanted, verdict])
    return format_table(["work", "against", "ratio", "goal", "met"], rows, 2)


def find_losses(
    goals: Mapping[str, Goal], ratios: Mapping[str, float], recorded: Mapping[str, float], least: float
) -> list[str]:
    """Return a line for each ratio that has less than ``least`` left of what was recorded.

    A claim that is recorded and was not measured is a line, too; one that was never recorded is none.
    """
    lines = []
    for name, goal in goals.items():
        if name not in recorded:
            continue
        what = f"{name} ({goal.work}, against {goal.against})"
        if name not in ratios:
            lines.append(f"{what}: not measured, {recorded[name]:.2f} recorded")
        elif (left := goal.loss(ratios[name], recorded[name])) < least:
            lines.append(f"{what}: {ratios[name]:.2f}, {recorded[name]:.2f} recorded: {left:.0%} of that")
    return lines


@dataclass(frozen=True, slots=True)
class Claim:
    """One that the harness can measure: two loaders at one workload.

    Attributes:
        goal: What is good.
        workload: Name.
        loader: Name of the one that the claim is about.
        reference: Name of the one that it is compared with.
        figure: Name of the figure that is compared, see ``report.py``.
    """

    goal: Goal
    workload: str
    loader: str
    reference: str
    figure: str


_IMAGES = "64x3x224x224 float32"
_TORCH = "torch DataLoader"

CLAIMS = {
    "float32-tcp": Claim(Goal(_IMAGES, _TORCH, 1.35), "float32", "ours-tcp", "torch", "rate"),
    "float32-unix": Claim(Goal(f"{_IMAGES}, one machine", _TORCH, 4.0), "float32", "ours-unix", "torch", "rate"),
    "uint8-unix": Claim(Goal("64x3x224x224 uint8, one machine", _TORCH, 5.0), "uint8", "ours-unix", "torch", "rate"),
    "jpeg-unix": Claim(Goal("JPEG decode and crop, one machine", _TORCH, 1.15), "jpeg", "ours-unix", "torch", "rate"),
    "cpu-unix": Claim(
        Goal("trainer CPU per GB, one machine", _TORCH, 0.25, True), "float32", "ours-unix", "torch", "cpu"
    ),
    "float32-bare": Claim(
        Goal(_IMAGES, "bare sockets, batches made", 0.95), "float32", "ours-tcp", "bare-made", "rate"
    ),
    "float32-moved": Claim(Goal(_IMAGES, "bare sockets, ready batches", 0.95), "float32", "ours-tcp", "bare", "rate"),
    "ready": Claim(
        Goal("38.5 MB that are ready", "bare sockets, ready batches", 0.95), "ready", "ours-tcp", "bare", "rate"
    ),
    "uint8-tcp": Claim(Goal("64x3x224x224 uint8", _TORCH, 1.5), "uint8", "ours-tcp", "torch", "rate"),
    "integer": Claim(Goal("one integer per batch", _TORCH, 6.0), "integer", "ours-tcp", "torch", "rate"),
    "tensors": Claim(Goal("2,000 small tensors per batch", _TORCH, 60.0), "tensors", "ours-tcp", "torch", "rate"),
    "jpeg": Claim(Goal("JPEG decode and crop", _TORCH, 1.05), "jpeg", "ours-tcp", "torch", "rate"),
    "cpu": Claim(Goal("trainer CPU per GB", "bare sockets", 1.1, True), "float32", "ours-tcp", "bare", "cpu"),
    "busy": Claim(
        Goal("trainer busy for 10 ms per batch", "original", 2.0), "float32", "ours-tcp", "original", "busy rate"
    ),
    "step": Claim(
        Goal("CPU time of a busy trainer's thread", "list of ready batches", 1.05, True),
        "float32",
        "ours-tcp",
        "ready",
        "busy thread",
    ),
}


def plan(claims: Mapping[str, Claim], order: Sequence[str]) -> dict[str, list[str]]:
    """Return which loaders to measure at which workload, in the order of the claims and of the loaders."""
    wanted: dict[str, set[str]] = {}
    for claim in claims.values():
        wanted.setdefault(claim.workload, set()).update((claim.loader, claim.reference))
    return {workload: [loader for loader in order if loader in loaders] for workload, loaders in wanted.items()}


def measure_claims(
    claims: Mapping[str, Claim], get: Callable[[str, str, str], Mapping[int, float]]
) -> dict[str, float]:
    """Return the ratios of those claims for which there is enough.

    Args:
        claims: By name.
        get: Called with workload, loader and figure; returns the figure in each round, by number.
    """
    ratios = {}
    for name, claim in claims.items():
        ratio = median_ratio(
            get(claim.workload, claim.loader, claim.figure), get(claim.workload, claim.reference, claim.figure)
        )
        if ratio is not None:
            ratios[name] = ratio
    return ratios
