"""Passes that wait for a known reason, with real workers and a consumer of known speed: the causes by their names."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rpcdataloader import Diagnosis, RPCDataloader
from tests.support import causes
from tests.support.crew import wait_for_crew
from tests.support.network import Network
from tests.support.quick import quick_server
from tests.support.tampering import Proxy
from tests.support.zygote import Zygote

Pool = Callable[[Zygote], contextlib.AbstractContextManager[list[str]]]


# Other programs of the machine are further causes. Where that is allowed, consumers and workers come before them.


def hurry() -> None:
    """Let the calling thread, and what it starts, come before other programs.

    Not as a real-time thread: from those, the kernel takes 50 ms of a second in which others wait.
    """
    os.setpriority(os.PRIO_PROCESS, 0, -20)


@functools.cache
def may_hurry() -> bool:
    with ThreadPoolExecutor(1) as pool:  # a thread that ends with it
        return pool.submit(hurry).exception() is None


@contextlib.contextmanager
def hurrying() -> Iterator[None]:
    """Hurry for a while, where that is allowed."""
    if may_hurry():
        hurry()
    try:
        yield
    finally:
        if may_hurry():
            os.setpriority(os.PRIO_PROCESS, 0, 0)


# --- pools: node servers, and what is between them and the trainer


HURRY = "os.setpriority(os.PRIO_PROCESS, 0, -20)" if may_hurry() else ""


@contextlib.contextmanager
def one_node(zygote: Zygote, before: str = HURRY) -> Iterator[list[str]]:
    with quick_server(zygote, "--num-workers", "32", "--max-connections", "64", before=before) as server:
        yield [server.address]


@contextlib.contextmanager
def a_slow_node(zygote: Zygote) -> Iterator[list[str]]:
    slow = f"{HURRY}\nos.environ[{causes.SLOW_NODE!r}] = '1'"
    options = ("--num-workers", "4", "--max-connections", "64")
    with quick_server(zygote, *options, before=slow) as first, quick_server(zygote, *options, before=HURRY) as second:
        yield [first.address, second.address]


def behind(make_rule: Callable[[], Any]) -> Pool:
    """A node behind a proxy."""

    @contextlib.contextmanager
    def pool(zygote: Zygote) -> Iterator[list[str]]:
        with one_node(zygote) as (address,), Proxy(address, make_rule()) as proxy:
            yield [proxy.address]

    return pool


def delayed(direction: str, _connection: int, number: int, frame: Any) -> list[Any]:
    """A link with latency, for one request at a time."""
    if direction == "down" and number > 2:
        time.sleep(0.06)
    return [frame]


class NarrowLink:
    """A link of 20 MB per second, which all connections share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, direction: str, _connection: int, _number: int, frame: Any) -> Any:
        return self._in_parts(frame.encode()) if direction == "down" and frame.blocks else [frame]

    def _in_parts(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), 50_000):
            with self._lock:
                time.sleep(0.0025)
            yield data[start : start + 50_000]


@contextlib.contextmanager
def over_a_gigabit(zygote: Zygote) -> Iterator[list[str]]:
    """A node in another network namespace, at a link of 1 Gb/s; the calling thread is at the other end. Needs root."""
    with contextlib.closing(Network()) as network:
        host, cable = network.add()
        cable.limit(1.0)
        options = ("--host", cable.address, "--port", "0", "--num-workers", "4")
        # Its ready line is all that is read of it here; only this thread is in the other network.
        with quick_server(zygote, *options, before=f"{HURRY}\n{host.move_in}") as server, network.trainer.entered():
            yield [server.address]


# --- what is done during a pass


@contextlib.contextmanager
def stopped_in_turns(iterator: Any) -> Iterator[None]:
    """Each worker is stopped for a while, one after the other."""
    wait_for_crew(iterator, 8)
    seats = list(iterator.driver.seats.values())
    is_over = threading.Event()

    def stop() -> None:
        turn = itertools.cycle(seats)
        while not is_over.is_set():
            # One that is at work: nothing is given to a worker that has not answered for long.
            seat = next(turn)
            if not seat.sent:
                is_over.wait(0.001)
                continue
            os.kill(seat.worker.pid, signal.SIGSTOP)
            is_over.wait(0.3)
            os.kill(seat.worker.pid, signal.SIGCONT)
            is_over.wait(0.05)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# --- consumers


def hold_the_lock(seconds: float) -> None:
    """Compute in one call that never lets another thread run, as some extensions do."""
    sum(range(int(seconds * _count_per_second())))


@functools.cache
def _count_per_second() -> float:
    begin = time.perf_counter()
    sum(range(1_000_000))
    return 1e6 / (time.perf_counter() - begin)


class Cause(NamedTuple):
    """A pass that waits for a known reason.

    Attributes:
        dataset: What is loaded, without automatic collation if there is no batch size.
        consumer: Seconds that the loop takes for a batch.
        num_batches: Batches that it takes; a pass that has fewer is over.
        bound: What is to be named, and its part.
        shares: What the workers spend their time on, as shares of the evidence, each at least this much.
        options: More arguments of the loader.
        pool: Where the workers are.
        around: What is done to the pool during the pass: a context manager that is given the iterator.
        consume: What the loop does for so many seconds.
        is_first: The pass is the first of its workers; for others, one is made before for their imports.
    """

    dataset: Any
    consumer: float
    num_batches: int
    bound: str
    options: dict[str, Any]
    pool: Pool = one_node
    around: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    consume: Callable[[float], None] = time.sleep
    is_first: bool = False
    shares: Mapping[str, float] = {}


# Where workers cannot be preferred, they may wait for a CPU, too.
COMPUTING = {"fetch_cpu_share": 0.8 if may_hurry() else 0.3}
SLEEPING = {"off_cpu_share": 0.8 if may_hurry() else 0.5}

CAUSES = {
    "none": Cause(causes.Causes(stall=0.002), 0.1, 25, "none", {"prefetch_factor": 4}),
    "start: worker_init_fn": Cause(
        causes.Causes(stall=0.001), 0.01, 60, "start init",
        {"prefetch_factor": 4, "worker_init_fn": causes.init_slowly}, is_first=True,
    ),
    "start: first batch": Cause(causes.Unready(), 0.01, 60, "start batch", {"prefetch_factor": 4}, is_first=True),
    "workers": Cause(causes.Causes(cpu=0.01), 0.002, 60, "workers", {"num_workers": 1}, shares=COMPUTING),
    "workers, streams": Cause(
        causes.StreamOfCauses(60, cpu=0.01), 0.002, 61, "workers", {"num_workers": 1}, shares=COMPUTING
    ),
    "workers, sleeping": Cause(causes.Causes(stall=0.04), 0.002, 80, "workers", {}, shares=SLEEPING),
    "workers, sleeping streams": Cause(
        causes.StreamOfCauses(40, 40, stall=0.04), 0.002, 81, "workers", {}, shares=SLEEPING
    ),
    "workers, sleeping in collate_fn": Cause(
        causes.Causes(stall=0.001), 0.001, 40, "workers",
        {"batch_size": 2, "collate_fn": causes.collate_slowly, "num_workers": 1}, shares=SLEEPING,
    ),
    "workers, computing in collate_fn": Cause(
        causes.Causes(), 0.001, 40, "workers", {"batch_size": 2, "collate_fn": causes.collate_hard, "num_workers": 1},
        shares={"collate_cpu_share": 0.3},
    ),
    "workers, waiting for a CPU": Cause(
        causes.Causes(cpu=0.02), 0.001, 40, "workers", {"num_workers": 8}, functools.partial(one_node, before=""),
        shares={"runqueue_share": 0.5},
    ),
    "workers, child processes": Cause(
        causes.Children(0.02), 0.001, 30, "workers", {"num_workers": 1}, shares={"fetch_cpu_share": 0.25}
    ),
    "workers, long tails": Cause(causes.Tails(), 0.004, 150, "workers", {"num_workers": 4, "prefetch_factor": 4}),
    "trainer: sampler": Cause(causes.Causes(), 0.005, 60, "trainer sampler", {"sampler": causes.SlowSampler(0.02)}),
    "trainer: receiving": Cause(causes.Parcels(0.01), 0.002, 120, "trainer receiving", {}),
    "trainer: lock": Cause(causes.Parcels(0.012), 0.02, 60, "trainer lock", {}, consume=hold_the_lock),
    "setting: prefetch_factor": Cause(
        causes.Causes(stall=0.004), 0.004, 50, "setting prefetch_factor", {"prefetch_factor": 1},
        behind(lambda: delayed),
    ),
    "setting: max_in_flight_bytes": Cause(
        causes.Causes(stall=0.03, size=250_000), 0.008, 60, "setting max_in_flight_bytes",
        {"num_workers": 8, "max_in_flight_bytes": 2_000_000},
    ),
    "node: worker": Cause(
        causes.Causes(stall=0.01), 0.005, 300, "node worker", {"num_workers": 8, "prefetch_factor": 2},
        around=stopped_in_turns,
    ),
    "node: node": Cause(causes.Causes(stall=0.03), 0.002, 150, "node node", {"num_workers": 8}, a_slow_node),
    "network": Cause(causes.Causes(size=500_000), 0.01, 25, "network", {}, behind(NarrowLink)),
    "network, 1 Gb/s": Cause(causes.Causes(size=800_000), 0.008, 50, "network", {}, over_a_gigabit),
}  # fmt: skip


@hurrying()
def run(cause: Cause, addresses: list[str], speed: float = 1.0) -> tuple[Diagnosis, RPCDataloader]:
    """Take the batches of a pass.

    Args:
        cause: Why it waits.
        addresses: Of its pool.
        speed: The consumer's, as a multiple.
    """
    options: dict[str, Any] = {"batch_size": None, "num_workers": 2, **cause.options}
    loader = RPCDataloader(cause.dataset, workers=addresses, persistent_workers=True, **options)
    if not cause.is_first:
        batches = iter(loader)
        for _ in range(2 * options["num_workers"]):
            next(batches)
    batches = iter(loader)
    with cause.around(batches):
        for _ in itertools.islice(batches, cause.num_batches):
            cause.consume(cause.consumer / speed)
        return loader.diagnosis(), loader


# Pools of which more workers are needed. Most sleep: of two CPUs, one is left for more workers that compute.
# After a pause, next itself takes up to 0.5 ms on some machines, which no number of workers changes: so these loops
# take far longer for a batch.
POOLS = {
    "4 workers, 200 ms of sleep": Cause(causes.Causes(stall=0.2), 0.02, 150, "workers", {"num_workers": 4}),
    "4 workers, 120 ms of sleep": Cause(causes.Causes(stall=0.12), 0.02, 150, "workers", {"num_workers": 4}),
    "2 workers, 100 ms of sleep": Cause(causes.Causes(stall=0.1), 0.02, 150, "workers", {"num_workers": 2}),
    "1 worker, 20 ms of CPU": Cause(causes.Causes(cpu=0.02), 0.016, 150, "workers", {"num_workers": 1}),
}


def wait_with_advice(cause: Cause, addresses: list[str]) -> float:
    """Run a pass, and another with as many workers as its diagnosis recommends; returns how much that one waits."""
    more = run(cause, addresses)[0].more_workers
    if more is None:
        return math.inf
    options = {**cause.options, "num_workers": cause.options["num_workers"] + more[1]}
    diagnosis = run(cause._replace(options=options, num_batches=200), addresses)[0]
    if diagnosis.bound != "start":
        return diagnosis.wait_share
    # Of the whole pass; no number of workers shortens the wait for the first batch.
    numbers = diagnosis.metrics()
    total, first = numbers["batches"] * numbers["step_seconds"], numbers["first_wait_seconds"]
    return (diagnosis.wait_share * total - first) / (total - first)
