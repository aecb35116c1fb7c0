"""Pending requests for the stacks of a session's workers, and their answers. Never waits for a worker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rpcdataloader.server.events import Link, WorkerStack
from rpcdataloader.server.processes import Life, Process
from rpcdataloader.server.stacks import STACK_LOOK_INTERVAL, StackReader
from rpcdataloader.wire.messages import StackRequest


@dataclass(slots=True, eq=False)
class ForkedWorker:
    """A session's view of one worker.

    Attributes:
        deadline: Time by which a starting worker must have authenticated its client.
        failure: The worker's own reason for giving up; empty otherwise.
    """

    number: int
    peer: str
    process: Process
    link: Link
    stack: StackReader
    deadline: float
    life: Life = Life.STARTING
    failure: str = ""
    row: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """A status gate's request for the stacks of all workers.

    Attributes:
        waiting: Numbers of the workers whose line is missing.
    """

    file: int
    pipe: int
    waiting: set[int]

    def tell(self, worker: ForkedWorker, text: str) -> None:
        self.waiting.discard(worker.number)
        with contextlib.suppress(OSError):  # a limit on file sizes costs a stack, not the session
            os.write(self.file, WorkerStack(worker.process.pid, text).encode() + b"\n")

    def close(self) -> None:
        os.close(self.file)
        os.close(self.pipe)


class StackDesk:
    """Pending requests for stacks."""

    def __init__(self, workers: Mapping[int, ForkedWorker], reply: Callable[[int, str], None]) -> None:
        self._workers = workers
        self._reply = reply
        self._requests: dict[int, StackRequest] = {}
        self._looks: list[_Look] = []

    def ask(self, request_id: int, request: StackRequest) -> None:
        """Request one stack for the client."""
        self._requests[request_id] = request
        if worker := self._workers.get(request.worker):
            worker.stack.ask()

    def ask_all(self, file: int, pipe: int) -> None:
        """Request the stacks of all workers for a status gate: in ``file``, until ``pipe`` is closed."""
        self._looks.append(_Look(file, pipe, set(self._workers)))
        for worker in self._workers.values():
            worker.stack.ask()

    def finish(self, last_number: int) -> None:
        """Answer requests that are complete or hopeless; ``last_number`` is that of the youngest worker so far."""
        for worker in self._workers.values():
            if worker.stack.is_asked and worker.stack.is_done():
                self._tell(worker.number, f"worker {worker.number} (pid {worker.process.pid}): {worker.stack.take()}")
        for number in {request.worker for request in self._requests.values()} - self._workers.keys():
            has_ended = 0 < number <= last_number
            self._tell(number, f"worker {number} has ended" if has_ended else f"there is no worker {number}")
        for look in self._looks:
            if not look.waiting:
                look.close()
        self._looks = [look for look in self._looks if look.waiting]

    def _tell(self, number: int, text: str) -> None:
        requests = {id: request for id, request in self._requests.items() if request.worker == number}
        looks = [look for look in self._looks if number in look.waiting]
        for look in looks:
            look.tell(self._workers[number], text)
        if not requests and not looks:
            # Requested on this node by a signal: for its log.
            os.write(1, f"{text}\n".encode())
        for id, request in requests.items():
            del self._requests[id]
            if request.end_because is not None and number in self._workers:
                # A worker that waits in the kernel may outlive this look for a while. Nothing waits for it.
                self._workers[number].process.kill(request.end_because)
            self._reply(id, text)

    def ended(self, worker: ForkedWorker) -> None:
        """Note that a worker has ended; :meth:`finish` answers the client's requests."""
        for look in self._looks:
            if worker.number in look.waiting:
                look.tell(worker, "it has ended")

    @property
    def pause(self) -> float | None:
        """Seconds until the next :meth:`finish`; None if nothing is pending."""
        return STACK_LOOK_INTERVAL if any(worker.stack.is_asked for worker in self._workers.values()) else None

    def forget_in_child(self) -> None:
        """Close the session's descriptors in a forked worker."""
        for look in self._looks:
            look.close()
