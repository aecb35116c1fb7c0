"""The trainers of a run, followed by what they note; and what it means that two runs have delivered the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.chaos.trainer import Job
from tests.conftest import is_running, wait_until
from tests.support.zygote import Script, Zygote


class Note(NamedTuple):
    """A batch that a rank was given."""

    time: float
    batch: str  # loader, epoch, number
    digest: str
    samples: list[str]


class Ranks:
    """The processes of a training job.

    Args:
        before: Statements that each begins with.
    """

    def __init__(self, zygote: Zygote, job: Job, before: str = "") -> None:
        self._job = job
        self._paths = [job.of_rank(rank).notes for rank in range(job.world_size)]
        self._offsets = [0] * job.world_size
        self.notes: list[list[Note]] = [[] for _ in self._paths]
        self.scripts: list[Script] = [
            zygote.start(before + job.of_rank(rank).source()) for rank in range(job.world_size)
        ]

    @property
    def num_batches(self) -> int:
        """Of all ranks, as of the last look."""
        return sum(map(len, self.notes))

    @property
    def are_running(self) -> bool:
        """Whether all are at work."""
        return all(is_running(script.pid) for script in self.scripts)

    def look(self) -> None:
        """Read what they have noted since."""
        for rank, path in enumerate(self._paths):
            if path.exists():
                with open(path, "rb") as file:
                    file.seek(self._offsets[rank])
                    text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
                self._offsets[rank] += len(whole)
                self.notes[rank] += map(_note, whole.decode().splitlines())

    def ask_to_stop(self) -> None:
        """After the epoch that they are in."""
        Path(self._job.folder, "stop").touch()

    def wait(self) -> None:
        """Wait for their end, and read the rest."""
        for rank, script in enumerate(self.scripts):
            status = script.wait().status
            assert status == 0, f"rank {rank} ended with status {status}"
        self.look()

    def stacks(self) -> str:
        """What they have logged last, and where they are now, if they are."""
        told = []
        for rank, script in enumerate(self.scripts):
            length = len(script.errors)
            with contextlib.suppress(ProcessLookupError, AssertionError):
                if is_running(script.pid):
                    os.kill(script.pid, signal.SIGUSR1)
                    # The dump ends with the thread that runs, the first of all.
                    wait_until(lambda s=script, n=length: "Current thread" in s.errors[n:], 5)  # type: ignore[misc]
            told.append(f"--- rank {rank}\n{script.errors[-24000:]}")
        return "\n".join(told)

    def kill(self) -> None:
        """End those that still run."""
        for script in self.scripts:
            with contextlib.suppress(ProcessLookupError):
                if is_running(script.pid):
                    script.kill()
            script.wait()

    def longest_stall(self) -> tuple[float, Note | None]:
        """The longest time between two batches of a rank, and the second of these."""
        gaps = [
            (after.time - before.time, after) for notes in self.notes for before, after in itertools.pairwise(notes)
        ]
        return max(gaps, key=lambda gap: gap[0], default=(0.0, None))


def _note(line: str) -> Note:
    time, loader, epoch, number, digest, samples = line.split()
    return Note(float(time), f"{loader} {epoch} {number}", digest, samples.split(","))


class Comparison(NamedTuple):
    """Of what a rank got with what it should have got."""

    num_lost: int
    num_duplicated: int
    different: list[str]

    @property
    def is_same(self) -> bool:
        return not (self.num_lost or self.num_duplicated or self.different)


def compare(actual: list[list[Note]], expected: list[list[Note]]) -> Comparison:
    """Samples that are missing or came twice, in any rank, and batches that are not the same to the last bit."""
    lost, duplicated = 0, 0
    different = []
    for rank, (some, others) in enumerate(zip(actual, expected, strict=True)):
        missing, more = _samples(others) - _samples(some), _samples(some) - _samples(others)
        lost += sum(missing.values())
        duplicated += sum(more.values())
        pairs = [(note.batch, note.digest) for note in some], [(note.batch, note.digest) for note in others]
        if pairs[0] != pairs[1]:
            first = next((a, b) for a, b in zip([*pairs[0], None], [*pairs[1], None], strict=False) if a != b)
            different.append(f"rank {rank}: {first[0]} instead of {first[1]}")
    return Comparison(lost, duplicated, different)


def _samples(notes: list[Note]) -> Counter[tuple[str, str]]:
    """Each sample, with loader and epoch."""
    return Counter((note.batch.rpartition(" ")[0], sample) for note in notes for sample in note.samples)
