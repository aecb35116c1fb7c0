"""Who wants to know where the code of a session's workers is, and what they are told. Never waits for a worker."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rpcdataloader.server.life import Life
from rpcdataloader.server.link import Link
from rpcdataloader.server.processes import Process
from rpcdataloader.server.stacks import STACK_LOOK_INTERVAL, StackReader
from rpcdataloader.server.statistics import StacksAsked
from rpcdataloader.wire.messages import StackRequest

# Seconds until another try when somebody who wants stacks has not read those before.
STACK_RETRY_PAUSE = 0.05


@dataclass(slots=True, eq=False)
class ForkedWorker:
    """A worker as its session sees it.

    Attributes:
        peer: Address at the other end of its connection.
        deadline: When it must have authenticated its client; of one that is starting.
        failure: Why it gave up, in its own words.
    """

    number: int
    peer: str
    process: Process
    link: Link
    stack: StackReader
    deadline: float
    life: Life = Life.STARTING
    failure: str = ""


class StackDesk:
    """The requests for stacks that are under way.

    Args:
        workers: Of the session, by number; changes with it.
        reply: Sends the answer to a request of the client.
    """

    def __init__(self, workers: Mapping[int, ForkedWorker], reply: Callable[[int, str], None]) -> None:
        self._workers = workers
        self._reply = reply
        self._requests: dict[int, StackRequest] = {}
        self._looks: list[StacksAsked] = []  # at all workers

    def ask(self, request_id: int, request: StackRequest) -> None:
        """The client wants one stack."""
        self._requests[request_id] = request
        if worker := self._workers.get(request.worker):
            worker.stack.ask()

    def ask_all(self, descriptor: int) -> None:
        """Somebody looks at the whole node, and reads from this link."""
        self._looks.append(StacksAsked(Link(socket.socket(fileno=descriptor)), set(self._workers)))
        for worker in self._workers.values():
            worker.stack.ask()

    def finish(self, last_number: int) -> None:
        """Answer what has got its stack, or will get none; ``last_number`` is that of the youngest worker so far."""
        for worker in self._workers.values():
            if worker.stack.is_asked and worker.stack.is_done():
                self._tell(worker.number, f"worker {worker.number} (pid {worker.process.pid}): {worker.stack.take()}")
        for number in {request.worker for request in self._requests.values()} - self._workers.keys():
            has_ended = 0 < number <= last_number
            self._tell(number, f"worker {number} has ended" if has_ended else f"there is no worker {number}")
        for look in self._looks:
            look.flush()
            if look.is_over:
                look.close()
        self._looks = [look for look in self._looks if not look.is_over]

    def _tell(self, number: int, text: str) -> None:
        requests = {id: request for id, request in self._requests.items() if request.worker == number}
        looks = [look for look in self._looks if look.waits_for(number)]
        for look in looks:
            look.tell(number, self._workers[number].process.pid, text)
        if not requests and not looks:
            # Somebody on this node wanted to know: into its log.
            os.write(1, f"{text}\n".encode())
        for id, request in requests.items():
            del self._requests[id]
            if request.end_because is not None and number in self._workers:
                # It may outlive this for a while, if it waits in the kernel. Nobody waits for it.
                self._workers[number].process.kill(request.end_because)
            self._reply(id, text)

    def ended(self, worker: ForkedWorker) -> None:
        """A worker has ended; requests of the client are answered by :meth:`finish`."""
        for look in self._looks:
            if look.waits_for(worker.number):
                look.tell(worker.number, worker.process.pid, "it has ended")

    @property
    def pause(self) -> float | None:
        """Seconds until :meth:`finish` may have something to do; None if nothing is under way."""
        if any(worker.stack.is_asked for worker in self._workers.values()):
            return STACK_LOOK_INTERVAL
        return STACK_RETRY_PAUSE if self._looks else None  # somebody is slow to read them

    def forget_in_child(self) -> None:
        """Close, in a forked worker, what belongs to the session."""
        for look in self._looks:
            look.close()
