"""Run one scenario after the other for some time, until one fails."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.scenarios import choose_scenario
from tests.simulation.simulator import run


@dataclass
class Report:
    """What was simulated, and what came of it."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    num_passes: int = 0
    failed_seed: int | None = None
    violation: str = ""

    @property
    def num_faults(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        num_violations = int(self.failed_seed is not None)
        simulated = f"{self.num_faults:,} faults in {self.seconds:.0f} s, {self.num_passes:,} passes"
        return f"{simulated}: {num_violations} violations"


def simulate(seconds: float, seed: int = 0, num_seeds: int | None = None) -> Report:
    """Simulate for some time.

    Args:
        seconds: How long, in seconds that this process has one core for itself: others on the machine do not count.
        seed: The first one.
        num_seeds: How many at most; not limited if None.
    """
    report = Report()
    end = None if num_seeds is None else seed + num_seeds
    began = time.process_time()
    gc.collect()
    gc.freeze()
    gc.disable()  # the cycles of one run are few, and are collected after some of them
    try:
        while report.seconds < seconds and seed != end:
            outcome = run(choose_scenario(seed))
            report.counts += outcome.counts
            report.num_passes += outcome.num_passes
            report.seconds = time.process_time() - began
            if outcome.violation:
                report.failed_seed, report.violation = seed, outcome.violation
                break
            seed += 1
            if seed % 100 == 0:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return report
