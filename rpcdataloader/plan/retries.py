"""Which tasks have gone wrong, how often, and what becomes of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

# Seconds until a batch is tried again after an exception that may pass: the first time, and at most.
RETRY_PAUSE = 0.5
MAX_RETRY_PAUSE = 30.0


@dataclass(slots=True)
class _Trouble:
    """What has gone wrong with a task that is not delivered."""

    # How each worker that was at work on it has ended, and at which place, since a sample was left out.
    killed: list[str] = field(default_factory=list)
    places: Counter[int | None] = field(default_factory=Counter)
    left_out: dict[int, str] = field(default_factory=dict)
    num_retries: int = 0  # exceptions after which it was tried again
    error: str | None = None  # to be raised in its place


class Retries:
    """The tasks of one epoch that have failed.

    Args:
        max_retries: Tries after an exception that may pass, and workers that may die at a task.
        marks_last_try: The last try is another request than those before.
        leaves_out: Leave out a sample at which ``max_retries`` workers have died.

    Attributes:
        is_needed: Something has failed in this epoch. Before, what is sent, answered and delivered need not be told.
    """

    def __init__(self, max_retries: int, *, marks_last_try: bool, leaves_out: bool = False) -> None:
        self._max_retries = max_retries
        self._leaves_out = leaves_out
        self._marks_last_try = marks_last_try
        self.is_needed = False
        self._troubles: dict[int, _Trouble] = {}
        self._last_copies: set[tuple[int, int]] = set()  # those sent as the last try; by worker and task

    def delay(self, worker: int, number: int) -> float | None:
        """Seconds until a task that has failed is tried again; None if its exception stands."""
        trouble = self._troubles.get(number)
        num_retries = 0 if trouble is None else trouble.num_retries
        is_last = not self._marks_last_try or (worker, number) in self._last_copies
        # Copies sent before the last attempt do not count.
        if num_retries >= self._max_retries and is_last:
            return None
        return float(min(RETRY_PAUSE * 2**num_retries, MAX_RETRY_PAUSE))

    def tried_again(self, number: int) -> None:
        """A task that has failed is tried again."""
        self._get(number).num_retries += 1

    def died(self, number: int, how: str, place: int | None = None) -> bool:
        """A worker died at a task, at the sample of ``place`` if that is known; returns whether that was one too many.

        A sample at which too many have died is left out, and all deaths before are forgiven. What condemns a task are
        deaths elsewhere than at the most suspect sample: one by chance, between two of these, does not.
        """
        trouble = self._get(number)
        place = place if self._leaves_out else None
        trouble.killed.append(how)
        trouble.places[place] += 1
        if place is not None and trouble.places[place] >= self._max_retries:
            trouble.left_out[place] = _describe(trouble.killed)
            trouble.killed.clear()
            trouble.places.clear()
            return False
        suspected = max((num for place, num in trouble.places.items() if place is not None), default=0)
        return len(trouble.killed) - suspected >= self._max_retries

    def condemn(self, number: int, task: str) -> None:
        """A task, which is named ``task`` in the error, is not tried again after the deaths of its workers."""
        trouble = self._get(number)
        trouble.error = f"{task} {_describe(trouble.killed)}"

    def left_out(self, number: int) -> Mapping[int, str] | None:
        """The places whose samples are to be left out, each with the reason."""
        trouble = self._troubles.get(number)
        return dict(trouble.left_out) if trouble is not None and trouble.left_out else None

    def sent(self, worker: int, number: int) -> bool:
        """A copy of a task goes to a worker; returns whether it is the last try."""
        trouble = self._troubles.get(number)
        if trouble is None or trouble.num_retries < self._max_retries:
            return False
        self._last_copies.add((worker, number))
        return True

    def copy_ended(self, worker: int, number: int) -> None:
        """A copy of a task was answered, or is lost with its worker."""
        self._last_copies.discard((worker, number))

    def delivered(self, number: int) -> str | None:
        """A task is done; returns the text of its error if it was condemned."""
        trouble = self._troubles.pop(number, None)
        return None if trouble is None else trouble.error

    def _get(self, number: int) -> _Trouble:
        self.is_needed = True
        return self._troubles.setdefault(number, _Trouble())


def _describe(killed: list[str]) -> str:
    return f"has ended {len(killed)} workers in a row: {'; '.join(killed)}"
