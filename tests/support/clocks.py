"""How long the package waits for something, made short: tests would take as long. No other inside of it is changed."""

from __future__ import annotations

import pytest

# By name: the constant, and what tests set it to.
CLOCKS: dict[str, tuple[str, float]] = {
    # Between two looks for a node that is gone; 5 s.
    "search": ("rpcdataloader.plan.roster.MAX_PAUSE", 0.2),
    # Between two looks into a register; 1 s.
    "register": ("rpcdataloader.wire.register.Register.pause", 0.05),
    # For further nodes, when the first one is there; 10 s.
    "patience": ("rpcdataloader.loader.placement.PATIENCE", 0.2),
    # Until a batch is late, and a second copy is sent; 1 s.
    "late": ("rpcdataloader.plan.workers._LATE_SECONDS", 0.1),
    # Until a loop that waits says for what; 60 s.
    "long wait": ("rpcdataloader.plan.engine.REPORT_AFTER", 0.5),
    # Until the build of a dataset is told to be slow; 10 s.
    "slow build": ("rpcdataloader.client.datasets.SLOW_BUILD_SECONDS", 1.0),
    # Between two decisions about the number of workers; 5 s.
    "decisions": ("rpcdataloader.loader.wants.LEAST_SECONDS", 0.5),
    # Between two reports of a trainer; 5 s.
    "reports": ("rpcdataloader.client.client.PERIOD", 0.2),
    # Between two looks of a pool at what loops want, until it gives back, and between two looks of a loop at a pool.
    "pool asks": ("rpcdataloader.pools.pool.ASK_PAUSE", 0.1),
    "pool shrinks": ("rpcdataloader.pools.pool.SHRINK_AFTER", 0.5),
    "pool is asked": ("rpcdataloader.pools.pool.PoolWorkers.pause", 0.05),
}


def shorten(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """For one test."""
    for name in names:
        monkeypatch.setattr(*CLOCKS[name])
