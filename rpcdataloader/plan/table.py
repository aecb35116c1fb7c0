"""What the engine asks of a table of tasks, whichever of the two it has. Pure.

:class:`~rpcdataloader.plan.batches.BatchTable` is that of a map-style dataset, where any worker may load any task.
:class:`~rpcdataloader.plan.streams.StreamTable` is that of an iterable-style dataset, where a task belongs to a stream.
What one of them cannot do, it answers with "no": a stream is not asked twice, and a batch is no end of a stream.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol


class Table(Protocol):
    """The tasks of one pass; workers are numbers."""

    # Workers

    def worker_joined(self, worker: int, now: float, host: Hashable, place: int) -> None:
        """The worker at this place takes tasks from now on."""

    def worker_draining(self, worker: int) -> None:
        """The worker gets no new tasks, if others can have them."""

    def worker_left(self, worker: int, now: float) -> list[int]:
        """A worker is gone; returns its unanswered tasks, which wait for another one now."""

    def needs(self, place: int) -> bool:
        """Whether a worker is missed at this place while there is none."""

    def resize(self, num_workers: int) -> None:
        """The window is that of this number of workers from now on, if it may change at all."""

    def in_flight(self, worker: int) -> list[int]:
        """Tasks that a worker has not answered, oldest first."""

    def running(self, worker: int) -> int | None:
        """The task to be blamed for a worker's death; None if it is at none that is still waited for."""

    def blame(self, number: int) -> bool:
        """A worker died at work on this task, and has left; returns whether that was one too many."""

    # Time

    def timed_out(self, now: float) -> list[tuple[int, int]]:
        """Workers whose running task is over its time, each once, with the number of the task."""

    def due(self, now: float) -> float | None:
        """When to ask :meth:`assign` and :meth:`timed_out` again if nothing happens before; None for never."""

    # Tasks, from the input to a worker

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` is allowed."""

    def add_task(self, payload: Any) -> int:
        """Add the next task of the input; returns its number."""

    def end_of_input(self) -> None:
        """The sampler has no more tasks."""

    def payload(self, number: int) -> Any:
        """What was added under a number, until it is delivered."""

    def stream_of(self, number: int) -> int | None:
        """The stream that an undelivered task belongs to; None where there are no streams."""

    def assign(self, now: float) -> tuple[int, int] | None:
        """Send a task; returns worker and number, None while none may be sent."""

    # Answers, from a worker to the consumer

    def replied(self, worker: int, number: int, *, size_bytes: int, task_seconds: float | None, now: float) -> bool:
        """A worker answered; returns False if the answer is to be ignored."""

    def retry(self, worker: int, number: int, *, delay: float, now: float) -> bool | None:
        """A worker answered with an exception, and the task is to be asked for again; None if it cannot be."""

    def ended(self, worker: int, number: int, now: float) -> bool:
        """A worker answered that its stream ended before this task; returns False as :meth:`replied` does."""

    def losers(self, number: int) -> list[int]:
        """Workers that have a copy of an answered task."""

    @property
    def has_deliverable(self) -> bool:
        """Whether :meth:`pop_deliverable` gives a task now."""

    def pop_deliverable(self) -> int | None:
        """Take the next task to deliver out of the table; None while it is not answered."""

    @property
    def finished(self) -> bool:
        """Whether the input has ended and everything is delivered."""

    @property
    def batch_size_bytes(self) -> float:
        """Estimated size of a batch, 0 before the first answer."""
