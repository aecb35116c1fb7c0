"""Tasks that are tried again: after an exception that may pass, and when a worker takes too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rpcdataloader.client.worker import Worker
from rpcdataloader.loader.passes import Pass
from rpcdataloader.loader.tasks import Task, describe
from rpcdataloader.plan.batches import BatchTable

logger = logging.getLogger("rpcdataloader.loader")

# Seconds until a batch is tried again after an exception that may pass: the first time, and at most.
RETRY_PAUSE = 0.5
MAX_RETRY_PAUSE = 30.0


@dataclass(slots=True)
class Sent:
    """A copy of a task that was sent to a worker.

    Attributes:
        request: That of the task, as it was then.
        request_id: Of its connection; 0 while it is being sent.
    """

    worker: Worker
    begun: Pass
    number: int
    task: Task
    request: bytes
    request_id: int = 0


def retry(table: BatchTable[Worker], sent: Sent, error: BaseException, max_retries: int) -> bool:
    """Try a task again that has failed with an exception that may pass.

    Returns:
        Whether it is; if not, the exception stands.
    """
    task = sent.task
    # A copy that was sent before the last try began is none.
    if task.num_retries >= max_retries and sent.request is task.last_request:
        return False
    delay = min(RETRY_PAUSE * 2**task.num_retries, MAX_RETRY_PAUSE)
    if table.retry(sent.worker, sent.number, delay=delay, now=time.monotonic()):
        task.num_retries += 1
        if task.num_retries >= max_retries:
            task.request = task.last_request
        logger.warning("%s is tried again in %g s: %s: %s", describe(task), delay, type(error).__name__, error)
    return True


def end_late_workers(late: Sequence[tuple[Worker, Task]], limit: float) -> None:
    """End workers that are at a task for longer than ``limit`` seconds, and note in the tasks where they were."""
    endings = [
        worker.session.end_worker(worker.number, f"{describe(task)} took longer than {limit:g} s")
        for worker, task in late
    ]
    for (worker, task), wait in zip(late, endings, strict=True):
        task.stack = wait()
        logger.warning(
            "%s took longer than %g s (task_timeout) on %s, which was here:\n%s",
            describe(task),
            limit,
            worker.name,
            task.stack,
        )
