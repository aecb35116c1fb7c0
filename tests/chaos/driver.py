"""A run: trainers over a pool of node servers, an adversary, and the same once more in peace to compare with."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos import plan
from tests.chaos.datasets import Traps
from tests.chaos.plan import Event, Kind
from tests.chaos.pool import Pool
from tests.chaos.ranks import Comparison, Ranks, compare
from tests.chaos.trainer import Job
from tests.chaos.watch import Trend, Watch
from tests.conftest import TIMEOUT_SCALE
from tests.support.network import Network
from tests.support.zygote import Zygote

# Seconds without a batch of any rank: nothing that the adversary does takes so long to get over. After a minute, the
# ranks have logged what they wait for.
HANG_TIMEOUT = 70.0
# What is undone at the latest after so many seconds, and how: there may be no batch until then, and so no next event. A
# worker that is stopped before its first batch has no limit of time, as it might build a dataset.
UNDONE_AFTER = {
    Kind.CUT: (3.0, Kind.HEAL),
    Kind.SLOW: (3.0, Kind.HEAL),
    Kind.STOP_WORKER: (10.0, Kind.CONTINUE),
    Kind.STOP_SESSION: (10.0, Kind.CONTINUE),
    Kind.STOP_SERVER: (10.0, Kind.CONTINUE),
}
_USAGE_PERIOD = 2.0  # seconds between samples of memory and descriptors


@dataclass(frozen=True)
class Scenario:
    """What a run is about."""

    seed: int
    num_ranks: int = 1
    num_places: int = 3
    num_workers: int = 4
    every: int = 25  # batches, of all ranks together, from one event to the next
    at_once: int = 1  # events that happen together
    num_events: int | None = None  # of the adversary; then the trainers end their epoch
    minutes: float | None = None  # instead of a number of events
    in_network: bool = False  # nodes in networks of their own, which can be cut
    registered: bool = False  # the map-style loader finds its servers in the register, and so uses those that are added
    soak: bool = False  # watch memory and descriptors; the server of the first node is not ended
    events: tuple[Event, ...] = ()  # instead of those of the plan
    job: dict[str, float | None] = field(default_factory=dict)  # options of the trainers

    def plan(self) -> Iterator[Event]:
        """The events, one after the other."""
        if self.events:
            return iter(self.events)
        events = plan.plan(self.seed, self.num_places, network=self.in_network, num_spared=int(self.soak))
        return itertools.islice(events, self.num_events)


@dataclass
class Report:
    """What was done, and what came of it."""

    scenario: Scenario
    events: Counter[Kind]
    num_batches: int
    num_epochs: int
    comparison: Comparison
    stall: float
    stalled_at: str
    seconds: float
    trends: list[Trend]

    def __str__(self) -> str:
        lines = [
            f"seed {self.scenario.seed}, {self.scenario.num_ranks} ranks, {self.seconds:.0f} s, "
            f"{self.num_epochs} epochs, {self.num_batches} batches",
            ", ".join(f"{number} x {kind.value}" for kind, number in self.events.most_common()),
            f"lost {self.comparison.num_lost}, duplicated {self.comparison.num_duplicated}, "
            f"different {len(self.comparison.different)}; longest stall {self.stall:.2f} s ({self.stalled_at})",
            *map(str, self.trends),
        ]
        return "\n".join(lines)


class ChaosError(AssertionError):
    """The run has failed; the text has all that is needed to repeat it."""


def run(scenario: Scenario, zygote: Zygote, tell: Callable[[str], None] | None = None) -> Report:
    """Do it.

    Args:
        zygote: Starts the processes.
        tell: Called for each event.

    Raises:
        ChaosError: A rank has failed or hangs, or the batches are not the same.
    """
    log: list[str] = []
    begun = time.monotonic()

    def note(line: str) -> None:
        log.append(f"{time.monotonic() - begun:8.3f} {line}")
        if tell is not None:
            tell(log[-1])

    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            report = _run(scenario, zygote, Path(folder), note)
            if not report.comparison.is_same:
                raise AssertionError("\n".join(["the batches are not the same", *report.comparison.different]))
            return report
        except Exception as exc:
            text = f"{type(exc).__name__}: {exc}\n{scenario}\n" + "\n".join(log)
            raise ChaosError(text) from exc


def _run(scenario: Scenario, zygote: Zygote, folder: Path, note: Callable[[str], None]) -> Report:
    traps = Traps(folder / "traps")
    Path(traps.folder).mkdir()
    watch = Watch()
    done: Counter[Kind] = Counter()
    begun = time.monotonic()
    with _training(scenario, zygote, folder / "disturbed", traps) as (ranks, pool):
        _disturb(scenario, ranks, pool, watch, done, note)
        note("the trainers may end")
        ranks.ask_to_stop()
        _follow(ranks, lambda: ranks.are_running)
        ranks.wait()
    seconds = time.monotonic() - begun
    num_epochs = len({note.batch.split()[1] for note in ranks.notes[0]})
    note(f"once more in peace, {num_epochs} epochs")
    options = {**scenario.job, "num_epochs": num_epochs, "seconds": 0.0}
    peace = replace(scenario, in_network=False, job=options)
    with _training(peace, zygote, folder / "quiet", traps) as (quiet, _pool):
        _follow(quiet, lambda: quiet.are_running)
        quiet.wait()
    stall, at = ranks.longest_stall()
    return Report(
        scenario,
        done,
        ranks.num_batches,
        num_epochs,
        compare(ranks.notes, quiet.notes),
        stall,
        f"before {at.batch}, {at.time - begun:.3f}" if at else "",
        seconds,
        watch.trends(),
    )


@contextlib.contextmanager
def _training(scenario: Scenario, zygote: Zygote, folder: Path, traps: Traps) -> Iterator[tuple[Ranks, Pool]]:
    """Ranks, and their node servers. A failure says what the ranks have logged, and what they do."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network())) if scenario.in_network else None
        pool = Pool(zygote, folder, scenario.num_places, scenario.num_workers, network, traps)
        stack.enter_context(contextlib.closing(pool))
        addresses = ",".join(pool.addresses)
        job = Job(
            folder=str(folder),
            traps=traps.folder,
            workers=f"@{pool.register}" if scenario.registered else addresses,
            stream_workers=addresses,
            world_size=scenario.num_ranks,
            seed=scenario.seed,
            persistent_workers=scenario.seed % 2 == 1,
            stateful=scenario.seed % 4 >= 2,
        )
        job = replace(job, **scenario.job)  # type: ignore[arg-type]
        ranks = Ranks(zygote, job, f"{network.trainer.move_in}\n" if network else "")
        stack.callback(ranks.kill)
        try:
            yield ranks, pool
        except Exception as exc:
            raise AssertionError(f"{type(exc).__name__}: {exc}\n{ranks.stacks()}") from exc


def _disturb(
    scenario: Scenario, ranks: Ranks, pool: Pool, watch: Watch, done: Counter[Kind], note: Callable[[str], None]
) -> None:
    """One event after so many batches each, until the plan or the time is over."""
    end = time.monotonic() + 60 * scenario.minutes if scenario.minutes else float("inf")
    pending: dict[Event, float] = {}  # what undoes an event, and at what time at the latest
    next_at = 0
    usage_at = 0.0

    def undo(now: float) -> None:
        for event in [event for event, until in pending.items() if until <= now]:
            del pending[event]
            note(pool.do(event))

    def go_on() -> bool:
        nonlocal usage_at
        now = time.monotonic()
        undo(now)
        if scenario.soak and now >= usage_at:
            usage_at = now + _USAGE_PERIOD
            for rank, script in enumerate(ranks.scripts):
                watch.look(f"rank {rank}", script.pid, now)
            for place, server in pool.servers.items():
                watch.look(f"node server {place}", server.pid, now)
        return ranks.are_running and ranks.num_batches < next_at and now < end

    for number, event in enumerate(scenario.plan()):
        if number % scenario.at_once == 0:
            next_at = ranks.num_batches + scenario.every
            _follow(ranks, go_on)
            assert ranks.are_running, "a rank has ended by itself"
        if time.monotonic() >= end:
            break
        done[event.kind] += 1
        if event.kind in (Kind.HEAL, Kind.CONTINUE):
            if pending.pop(event, None) is not None:
                note(pool.do(event))
            continue
        if event.kind in UNDONE_AFTER:
            seconds, kind = UNDONE_AFTER[event.kind]
            pending[Event(kind, event.place)] = time.monotonic() + seconds
        note(f"batch {ranks.num_batches}: {pool.do(event)}")
    undo(float("inf"))


def _follow(ranks: Ranks, go_on: Callable[[], bool]) -> None:
    """Read what the ranks note for as long as that."""
    count, since = -1, 0.0
    while True:
        ranks.look()
        now = time.monotonic()
        if ranks.num_batches != count:
            count, since = ranks.num_batches, now
        assert now < since + HANG_TIMEOUT * TIMEOUT_SCALE, f"no batch for {HANG_TIMEOUT:g} s"
        if not go_on():
            return
        time.sleep(0.005)


def environment(folder: Path) -> dict[str, str]:
    """What processes need that are not started by pytest: a secret of their own."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text(f"the secret of this run {os.urandom(16).hex()}\n")
    return {"RPCDATALOADER_TOKEN_FILE": str(token)}
