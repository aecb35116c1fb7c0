"""Which tasks have gone wrong, how often, and what becomes of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

# Seconds until a batch is tried again after an exception that may pass: the first time, and at most.
RETRY_PAUSE = 0.5
MAX_RETRY_PAUSE = 30.0


@dataclass(slots=True)
class _Trouble:
    """What has gone wrong with a task that is not delivered."""

    killed: list[str] = field(default_factory=list)  # how each worker that was at work on it has ended
    num_retries: int = 0  # exceptions after which it was tried again


class Retries:
    """The tasks of one epoch that have failed.

    Args:
        max_retries: Tries after an exception that may pass.
        marks_last_try: The last try is another request than those before.

    Attributes:
        is_needed: Something has failed in this epoch. Before, what is sent, answered and delivered need not be told.
    """

    def __init__(self, max_retries: int, *, marks_last_try: bool) -> None:
        self._max_retries = max_retries
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

    def died(self, number: int, how: str) -> list[str]:
        """A worker died at a task; returns how all of them did."""
        killed = self._get(number).killed
        killed.append(how)
        return killed

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

    def delivered(self, number: int) -> None:
        """A task is done."""
        self._troubles.pop(number, None)

    def _get(self, number: int) -> _Trouble:
        self.is_needed = True
        return self._troubles.setdefault(number, _Trouble())
