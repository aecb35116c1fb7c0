"""Tasks that went wrong, how often, and the consequences. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

# Seconds until a batch is retried after an exception: first and longest back-off.
RETRY_PAUSE = 0.5
MAX_RETRY_PAUSE = 30.0


@dataclass(slots=True)
class _Trouble:
    """The failures of an undelivered task."""

    # How each worker at this task has ended, and at which place, since a sample was left out.
    killed: list[str] = field(default_factory=list)
    places: Counter[int | None] = field(default_factory=Counter)
    left_out: dict[int, str] = field(default_factory=dict)
    num_retries: int = 0  # exceptions after which it was retried
    error: str | None = None  # raised in its place


class Retries:
    """The failed tasks of one epoch.

    Args:
        max_retries: Limit on retries after an exception, and on workers that die at a task.
        marks_last_try: True if the last attempt is another request than those before.
        leaves_out: True to leave out a sample at which ``max_retries`` workers have died.

    Attributes:
        is_needed: True after a failure in this epoch. Before, events of sent, answered and delivered tasks may be
            omitted.
    """

    def __init__(self, max_retries: int, *, marks_last_try: bool, leaves_out: bool = False) -> None:
        self._max_retries = max_retries
        self._leaves_out = leaves_out
        self._marks_last_try = marks_last_try
        self.is_needed = False
        self._troubles: dict[int, _Trouble] = {}
        self._last_copies: set[tuple[int, int]] = set()  # copies of a last attempt, by worker and task

    def delay(self, worker: int, number: int) -> float | None:
        """Return the back-off in seconds before a failed task is retried; None if its exception is final."""
        trouble = self._troubles.get(number)
        num_retries = 0 if trouble is None else trouble.num_retries
        is_last = not self._marks_last_try or (worker, number) in self._last_copies
        # Copies sent before the last attempt do not count.
        if num_retries >= self._max_retries and is_last:
            return None
        return float(min(RETRY_PAUSE * 2**num_retries, MAX_RETRY_PAUSE))

    def tried_again(self, number: int) -> None:
        """Note that a failed task is retried."""
        self._get(number).num_retries += 1

    def died(self, number: int, how: str, place: int | None = None) -> bool:
        """Note a worker's death at a task, at the sample of ``place`` if known; returns True for one death too many.

        A sample at which too many workers have died is left out, and earlier deaths are forgiven. A task is condemned
        by deaths elsewhere than at its most suspect sample: a single death between two of those does not condemn it.
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
        """Give up a task after the deaths of its workers; ``task`` is its name in the error."""
        trouble = self._get(number)
        trouble.error = f"{task} {_describe(trouble.killed)}"

    def left_out(self, number: int) -> Mapping[int, str] | None:
        """The places of samples that are left out, each with the reason."""
        trouble = self._troubles.get(number)
        return dict(trouble.left_out) if trouble is not None and trouble.left_out else None

    def sent(self, worker: int, number: int) -> bool:
        """Note that a copy of a task goes to a worker; returns True for the last attempt."""
        trouble = self._troubles.get(number)
        if trouble is None or trouble.num_retries < self._max_retries:
            return False
        self._last_copies.add((worker, number))
        return True

    def copy_ended(self, worker: int, number: int) -> None:
        """Note that a copy of a task was answered, or is lost with its worker."""
        self._last_copies.discard((worker, number))

    def delivered(self, number: int) -> str | None:
        """Note that a task is done; returns the text of its error if it was condemned."""
        trouble = self._troubles.pop(number, None)
        return None if trouble is None else trouble.error

    def _get(self, number: int) -> _Trouble:
        self.is_needed = True
        return self._troubles.setdefault(number, _Trouble())


def _describe(killed: list[str]) -> str:
    return f"has ended {len(killed)} workers in a row: {'; '.join(killed)}"
