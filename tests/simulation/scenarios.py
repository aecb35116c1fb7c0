"""What is simulated, chosen by a seed: how large, with which options, and which faults come when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rpcdataloader.plan.actions import PlanOptions


class Fault(NamedTuple):
    """Something goes wrong at a moment; ``pick`` and ``size`` choose what is hit, and how hard."""

    time: float
    kind: str
    pick: int
    size: float


@dataclass(frozen=True)
class Scenario:
    """What does not change in a run."""

    seed: int
    num_ranks: int
    offered: tuple[int, ...]  # workers of each node
    room: float  # how many times as many a node has room for
    options: PlanOptions  # but for what differs between ranks
    is_persistent: bool
    expects_more: bool
    num_tasks: int  # of a pass of a rank; of a stream, for an iterable-style dataset
    seconds: float  # of a task, on average
    spread: float
    step: float  # of the consumer
    cold_starts: float  # how many workers take long for their first request
    noise: Noise
    seconds_per_fault: float
    num_faults: int
    burstiness: float
    weights: tuple[float, ...]


# How often each kind of fault is chosen. What hits a single worker is more frequent than what hits a node.
KINDS = {
    "kill": 8.0,
    "kill while answering": 3.0,
    "hang": 2.0,
    "bad batch": 0.4,
    "deadly batch": 0.8,
    "retire": 2.0,
    "pause": 1.0,
    "lose node": 0.3,
    "drain node": 0.3,
    "flapping node": 0.2,
    "full node": 0.3,
    "refused forks": 0.3,
    "late answers": 0.3,
    "foreign node": 0.1,
    "broken node": 0.05,
    "mute node": 0.3,
    "raising node": 0.2,
    "exiting node": 0.2,
    "killing node": 0.2,
    "add node": 0.3,
    "remove node": 0.4,
    "want": 0.5,
    "leave": 0.2,
    "resume": 0.2,
}


class Noise(NamedTuple):
    """How often a message is hit by a fault of its own, each from 0 to 1."""

    slow: float  # the worker takes longer for it
    late: float  # an answer is long on the wire, and so are those behind it
    again: float  # an answer comes again, later
    error: float  # an exception instead of a batch
    thread: float  # what the engine wants done is done later, and overtaken by what it wants next


def choose_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    scale = rng.random()
    if scale < 0.9:
        num_ranks, num_nodes, most = rng.choice((1, 1, 1, 2)), rng.randint(1, 4), 3
        num_faults = rng.randint(20, 200)
    elif scale < 0.995:
        num_ranks, num_nodes, most = rng.randint(1, 4), rng.randint(2, 12), 6
        num_faults = rng.randint(50, 500)
    else:
        num_ranks, num_nodes, most = rng.randint(2, 8), rng.randint(8, 64), 16
        num_faults = rng.randint(200, 600)
    offered = tuple(rng.randint(1, most) for _ in range(num_nodes))
    num_workers = max(1, sum(offered))
    seconds = 10 ** rng.uniform(-2, 0.3)
    weights = [weight * rng.choice((0, 0.3, 1, 1, 3)) for weight in KINDS.values()]
    most_noise = (0.9, 0.8, 0.6, 0.2, 0.8)
    noise = Noise(*(rng.choice((0.0, 1.0, 1.0, 1.0)) * rate for rate in most_noise))
    if rng.random() < 0.3:
        noise = noise._replace(slow=0.0, late=0.0)  # what is late then is really late
    per_worker = rng.choice((1.0, 2.0, 4.0, 10.0))
    if rng.random() < 0.15:  # calm, with a few kinds of faults, so that one is not drowned by others
        noise = Noise(*(rng.choice((0.0, 0.0, 0.05)) * rate for rate in most_noise))
        chosen = rng.sample(range(len(KINDS)), 3)
        weights = [weight * (index in chosen) for index, weight in enumerate(weights)]
        per_worker, num_faults = 20.0, num_faults // 4
    is_iterable = rng.random() < 0.35
    if sum(weights) == 0:
        weights[0] = 1.0
    return Scenario(
        seed=seed,
        num_ranks=num_ranks,
        offered=offered,
        room=rng.choice((1.0, 1.0, 1.5, 4.0)),
        options=PlanOptions(
            num_workers=0,
            is_iterable=is_iterable,
            prefetch_factor=rng.choice((1, 2, 2, 2, 3, 5)),
            in_order=rng.random() < 0.6,
            max_in_flight_bytes=rng.choice((1, 1000, 5000, 20000, 2**30, 2**30)),
            max_retries=rng.choice((1, 1, 2, 3, 3, 5)),
            task_timeout=rng.choice((None, None, 8 * seconds, 40 * seconds)),
            reconnect_timeout=rng.choice((0.0, 1.0, 20.0, 300.0, 300.0)),
            connect_timeout=rng.choice((0.5, 5.0, 60.0)),
            max_workers=rng.choice((0, 0, 1, 3, 50)),
        ),
        is_persistent=rng.random() < 0.5,
        expects_more=rng.random() < 0.2,
        num_tasks=rng.choice((5, 50, 100) if is_iterable else (5, 50, 100, 300)) * (1 if num_workers < 50 else 4),
        seconds=seconds,
        spread=rng.choice((0.0, 0.3, 0.9)),
        step=rng.choice((0.0, 0.0, 0.0, seconds / num_workers)),
        cold_starts=rng.choice((0.0, 0.1, 0.5)),
        noise=noise,
        seconds_per_fault=seconds * per_worker / num_workers,
        num_faults=num_faults,
        burstiness=rng.choice((0.0, 0.1, 0.5)),
        weights=tuple(itertools.accumulate(weights)),
    )


def choose_faults(scenario: Scenario) -> Iterator[Fault]:
    """The faults of a scenario, in the order of their times: some alone, some in bursts."""
    rng = random.Random(-1 - scenario.seed)
    kinds = list(KINDS)
    now = scenario.seconds
    left = scenario.num_faults
    while left > 0:
        now += rng.expovariate(1.0) * scenario.seconds_per_fault
        num = 1
        if rng.random() < scenario.burstiness:
            num = min(left, rng.choice((2, 3, 5, 10)))
            now += num * scenario.seconds_per_fault
        for kind in rng.choices(kinds, cum_weights=scenario.weights, k=num):
            yield Fault(now, kind, rng.getrandbits(30), rng.random())
            left -= 1
