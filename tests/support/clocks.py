"""How long the package waits for something, and other limits, made small: tests would take as long, or as much."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from rpcdataloader.wire import transport

# By name: the constant, and what tests set it to.
CLOCKS: dict[str, tuple[str, float]] = {
    # Between two looks for a node that is gone; 5 s.
    "search": ("rpcdataloader.plan.roster.MAX_PAUSE", 0.2),
    # Between two looks into a register; 5 s.
    "register": ("rpcdataloader.wire.register.Register.pause", 0.05),
    # Between two questions for the addresses of a name; 2 s.
    "names": ("rpcdataloader.client.discovery.Names.pause", 0.1),
    # For further nodes, when the first one is there; 10 s.
    "patience": ("rpcdataloader.loader.placement.PATIENCE", 0.2),
    # Until a batch is late, and a backup task is sent; 1 s.
    "late": ("rpcdataloader.plan.workers._LATE_SECONDS", 0.1),
    # Until a loop that waits says for what, until it says so again, and until that is with a stack; 3, 10 and 10 s.
    "long wait": ("rpcdataloader.plan.engine.REPORT_AFTER", 0.5),
    "longer wait": ("rpcdataloader.plan.engine.REPORT_AGAIN", 0.5),
    "wait with a stack": ("rpcdataloader.plan.engine.STACK_AFTER", 1.0),
    # Until a wait of a client is told, and until it is told again; 3 and 10 s.
    "told": ("rpcdataloader.client.background.FIRST_TOLD", 0.3),
    "told again": ("rpcdataloader.client.background.NEXT_TOLD", 0.3),
    # Between two decisions about the number of workers; 5 s.
    "decisions": ("rpcdataloader.loader.waits.LEAST_SECONDS", 0.5),
    # Between two reports of a trainer; 5 s.
    "reports": ("rpcdataloader.client.client.PERIOD", 0.2),
    # Between two looks of a pool at what loops want, until it gives back, and between two looks of a loop at a pool.
    "pool asks": ("rpcdataloader.pools.pool.ASK_PAUSE", 0.3),
    "pool shrinks": ("rpcdataloader.pools.pool.SHRINK_AFTER", 0.5),
    "pool is asked": ("rpcdataloader.pools.pool.PoolWorkers.pause", 0.2),
}


# The same for a node server.
CLOCKS_OF_SERVERS: dict[str, dict[str, float]] = {
    # For the proof of a stranger, in a gate and in a session; 10 s.
    "strangers": {"node.PROOF_TIMEOUT": 3.0, "session.HANDSHAKE_TIMEOUT": 3.0},
    # How many strangers may be at the door, and how long the oldest is left there; 128, 1 s.
    "small door": {"node.MAX_UNPROVED": 8, "node.PROOF_PATIENCE": 0.05},
    # Lines about those who were refused: how many in this time; 20 in 10 s.
    "all refusals": {"logs.MAX_REFUSALS": 10000},
    "refusals, for long": {"logs.REFUSALS_PERIOD": 1000},
    # Until a session that does not end is killed; 2 s.
    "end of a session": {"clients.END_TIMEOUT": 0.2},
    "end of a session, for ever": {"clients.END_TIMEOUT": 600.0},
    # Until a worker whose client has gone is ended; 2 s.
    "end of a worker": {"worker.END_TIMEOUT": 0.2},
    # Until a worker without requests gives back memory; 5 s.
    "idle": {"worker.IDLE_SECONDS": 0.2},
    # Between two writes of its file in a register; 10 s.
    "renewal": {"node.RENEWAL_PERIOD": 0.05},
    # Until standard input that says nothing is an end; 60 s.
    "lifeline": {"node.LIFELINE_SILENCE": 0.2},
    # After a connection for which there was no descriptor; 1 s.
    "exhausted": {"node.EXHAUSTED_PAUSE": 0.3},
    # Between two signs of life of the command that starts servers by ssh; 10 s.
    "heartbeat": {"starter.HEARTBEAT": 0.05},
}


def shorten(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """For one test."""
    for name in names:
        monkeypatch.setattr(*CLOCKS[name])


def in_server(*names: str) -> str:
    """What a server runs first, to have these: ``serve(before=in_server("renewal"))``."""
    changes = [change for name in names for change in CLOCKS_OF_SERVERS[name].items()]
    # Each is read first, which fails where there is none.
    return "; ".join(f"{target}; {target} = {value}" for target, value in changes)


class KeepAlive(NamedTuple):
    """How soon a connection is checked, and how often, in seconds."""

    idle: int
    interval: int
    probes: int
    look: float

    @property
    def limit(self) -> float:
        """How long the loss of a host may take to be noticed."""
        return self.idle + self.interval * self.probes + self.look

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For one test."""
        for name, value in zip(_KEEPALIVE, self, strict=True):
            monkeypatch.setattr(transport, name, value)

    @property
    def statement(self) -> str:
        """The same in another process."""
        limits = dict(zip(_KEEPALIVE, self, strict=True))
        return f"from rpcdataloader.wire import transport; vars(transport).update({limits})"


_KEEPALIVE = ("KEEPALIVE_IDLE", "KEEPALIVE_INTERVAL", "KEEPALIVE_PROBES", "CUT_OFF_PERIOD")
REAL_KEEPALIVE = KeepAlive(*(getattr(transport, name) for name in _KEEPALIVE))
