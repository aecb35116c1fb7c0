"""What does the diagnosis cost? Loads batches of one integer with everything that it measures, and without, in turns.

``python -m tests.benchmark.notes`` takes seven minutes and prints a Markdown table. Two passes over the same dataset,
each with a worker of its own, are there at a time; one of them takes some batches, then the other. After some turns,
others begin: where the memory of a process lies makes more of a difference than a note. So each pair of passes gives
one number, the median of its turns, and the spread of these numbers says how well their mean is known. The second pass
is made of the same modules, from whose text all lines that measure are taken out: no clock is read for them, nothing is
noted, and no request asks its worker for anything. So the comparison is with code that knows nothing of a diagnosis.
Where that is allowed, all of it comes before other programs of the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import operator
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean, median, stdev
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.loader import dataloader, driver, intake, iterator, seat
from tests.benchmark.datasets import Integers
from tests.integration.waits import hurrying

# When its turn begins, the worker of a pass has loaded what the window allows.
_NUM_LEFT_OUT = 100

# Text of the modules, each of which occurs once, and what it would be without a diagnosis.
_SEAT = {
    """        if (drawn := task.probe) is not None:
            sent.probe = Probe(drawn.number, drawn.draw, drawn.added, self._driver.now())
""": "",
    """                if (probe := sent.probe) is not None:
                    request.flags, probe.sent = Flag.MEASURED, self._driver.now()
""": "",
    """                if probe is not None:
                    probe.sent = self._driver.now()
""": "",
    """            if reply.flags:
                note_reply(sent.probe, reply)
""": "",
    """            answer.worker = worker
            if answer.stream is not None or not settings.iterable:  # not the end of a stream
                driver.recorder.tasks[worker].append(seconds)
            if answer.arrived:
                driver.recorder.received(answer.arrived, answer.received)
            if sent.probe is not None:
                note_answer(sent.probe, timings, answer.size_bytes, now)
                answer.probe = sent.probe
""": "",
}
_INTAKE = {
    """    if reply.arrival is not None and not reply.arrival.was_here:
        answer.arrived, answer.received = reply.arrival.at, time.monotonic()
""": "",
}
_DRIVER = {
    """        elif self.later_since == math.inf:
            self.later_since = self.now()
""": "",
    """        self.sleeps_since = now
        self.later_since = now if engine.table.answered_bytes else math.inf
""": "",
}
_ITERATOR = {
    """        began = time.monotonic()
        timeout = self._settings.timeout or None
        deadline = None if timeout is None else began + timeout
        blocked = 0.0
""": """        timeout, began = self._settings.timeout or None, 0.0
        deadline = None if timeout is None else time.monotonic() + timeout
""",
    """        decided = self._advance(wants_input, began)
        if answer.probe is not None or blocked >= self._noted:
            self._note(answer, decided, decided - began, blocked)
        else:  # what Recorder.delivered does, without the call
            recorder = driver.recorder
            recorder.batches += 1
            recorder.waited += decided - began
            recorder.last = decided
            if blocked:
                recorder.blocked += blocked
""": """        self._advance(wants_input, began)
""",
    """            self._ready += driver.wakes_up(woken)
        return woken - now
""": """            driver.wakes_up(woken)
""",
    "                    blocked += self._wait(deadline)": "                    self._wait(deadline)",
    "            return 0.0  # a stream": "            return  # a stream",
    """        source, recorder = self.driver.begun.source, self.driver.recorder
        if began < recorder.next_probe and not self._is_shown:
            return next(source, None)
""": """        return next(self.driver.begun.source, None)
""",
    "self._profiled_next() if profiler._is_profiler_enabled else self._next()": "self._next()",
    "self._send if self._is_shown else self.driver": "self.driver",
    '_shown("wait", driver.condition.wait, seconds) if self._is_shown else driver': "driver",
}


class Cost(NamedTuple):
    """Microseconds per batch: passed, and of CPU time in the trainer and in its worker."""

    wall: float
    trainer: float
    worker: float


def without(module: ModuleType, texts: dict[str, str], **names: Any) -> Any:
    """The module with other text and other names, beside the one that is imported.

    Raises:
        ValueError: The module has changed.
    """
    source = Path(str(module.__file__)).read_text()
    for old, new in texts.items():
        if source.count(old) != 1:
            raise ValueError(f"{source.count(old)} times and not once in {module.__name__}:\n{old}")
        source = source.replace(old, new)
    name = f"{module.__name__}_without_notes"
    spec = importlib.util.spec_from_loader(name, None)
    assert spec is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    exec(compile(source, name, "exec"), made.__dict__)
    vars(made).update(names)
    return made


def make_iterator_without_notes() -> Any:
    """The class of passes without notes."""
    off = without(intake, _INTAKE)
    names = {name: getattr(off, name) for name in ("Answer", "Intake", "decode")}
    names["Seat"] = without(seat, _SEAT, **names).Seat
    names["Driver"] = without(driver, _DRIVER, **names).Driver
    return without(iterator, _ITERATOR, **names).RemoteIterator


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) has it


def take_turn(batches: Iterator[Any], pid: int, num_batches: int) -> Cost:
    for _ in islice(batches, _NUM_LEFT_OUT):
        pass
    before = time.perf_counter(), time.process_time(), cpu_seconds(pid)
    for _ in islice(batches, num_batches):
        pass
    after = time.perf_counter(), time.process_time(), cpu_seconds(pid)
    return Cost(*(1e6 * (until - since) / num_batches for since, until in zip(before, after, strict=True)))


@hurrying()
def measure(num_sets: int, num_rounds: int, num_batches: int) -> Iterator[dict[bool, list[Cost]]]:
    """The costs of each round, with notes and without, for one pair of passes after the other."""
    loader = RPCDataloader(RPCDataset("local:2", Integers), num_workers=1)
    classes = {True: iterator.RemoteIterator, False: make_iterator_without_notes()}
    for number in range(num_sets):
        passes: dict[bool, Any] = {}
        found: dict[bool, list[Cost]] = {True: [], False: []}
        for kind in (True, False) if number % 2 else (False, True):
            with mock.patch.object(dataloader, "RemoteIterator", classes[kind]):
                passes[kind] = iter(loader)
            next(passes[kind])
        for _ in range(num_rounds):
            for kind, batches in passes.items():
                found[kind].append(take_turn(batches, batches.driver.workers[0].pid, num_batches))
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.notes", description=__doc__)
    parser.add_argument("--sets", type=int, default=30, help="pairs of passes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each pass (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=1000, help="batches of a turn (default: %(default)s)")
    args = parser.parse_args()
    if min(args.sets - 1, args.rounds, args.batches) < 1:
        parser.error("--rounds and --batches must be positive, and --sets at least 2")
    pairs = list(measure(args.sets, args.rounds, args.batches))
    print("| µs per batch | without | with the diagnosis | more (standard error) |")
    print("| --- | ---: | ---: | ---: |")
    titles = {"wall": "time", "trainer": "CPU time of the trainer", "worker": "CPU time of the worker"}
    for name, title in titles.items():
        on, off = ([[getattr(cost, name) for cost in found[kind]] for found in pairs] for kind in (True, False))
        more = [100 * (median(map(operator.truediv, a, b)) - 1) for a, b in zip(on, off, strict=True)]
        error = stdev(more) / math.sqrt(len(more))
        print(
            f"| {title} | {median(itertools.chain(*off)):.2f} | {median(itertools.chain(*on)):.2f} "
            f"| {fmean(more):+.2f} % ({error:.2f} %) |"
        )
    print(f"\n{args.sets} pairs of passes, {args.rounds} turns of {args.batches:,} batches of each.")


if __name__ == "__main__":
    main()
