"""What a node server tells of itself on a status connection: plain numbers and names, as JSON. Pure.

Counters only grow while a node server lives: what ended workers and clients have done stays in the totals of those
above them. Times are seconds that have passed, so that nobody's clock matters.
"""

from __future__ import annotations

from dataclasses import dataclass

from rpcdataloader.wire.plain import Json


@dataclass(frozen=True, slots=True)
class StatusRequest(Json):
    """Asks for a :class:`NodeStatus`.

    Attributes:
        stacks: With the Python stacks of all workers, which takes up to 2 s.
    """

    stacks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Json):
    """What was done since the beginning.

    Attributes:
        tasks: Batches of loaders that were answered.
        calls: Other requests that were answered: remote calls, questions of a loader.
        errors: Requests that were answered with an exception.
        received_bytes: By worker connections.
        sent_bytes: By worker connections.
    """

    tasks: int
    calls: int
    errors: int
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(Work):
    """A worker.

    Attributes:
        number: In its session, from 1.
        pid: Its process.
        state: ``"idle"`` or ``"running"``.
        state_seconds: Since that changed, or since the last request began.
        draining: Whether it takes no further requests.
        process_state: The letter by which Linux names the state of its main thread: ``"T"`` is stopped, ``"D"`` waits
            in the kernel; empty when it has gone.
        age_seconds: Since it was admitted.
        queued: Requests that it has received and not begun.
        unread_bytes: Of requests that have arrived and that it has not received, as it does so between two of them;
            None on a Unix socket, where the kernel does not tell.
        cpu_seconds: CPU time that it has used.
        memory_bytes: Its resident memory, that which it shares with others included.
        stack: Its Python stack, or why there is none; None if nobody has asked for it.
    """

    number: int
    pid: int
    state: str
    state_seconds: float
    draining: bool
    process_state: str
    age_seconds: float
    queued: int
    unread_bytes: int | None
    cpu_seconds: float
    memory_bytes: int
    stack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatus(Work):
    """A training process, and its session here; its work is that of its workers, ended ones included.

    Attributes:
        host: Its machine, as it says.
        pid: Its process there.
        rank: In a distributed job; None outside of one.
        job: Of Slurm; empty outside of one.
        session_pid: The process that serves it here.
        state: ``"idle"``, or ``"running"`` while the session builds a dataset or answers another request.
        state_seconds: Since that changed.
        age_seconds: Since it has connected.
        last_error: Text of the last exception that a worker answered with; None if there was none.
        last_error_seconds: Since then.
        workers: Those that are there, in the order of their numbers.
    """

    host: str
    pid: int
    rank: int | None
    job: str
    session_pid: int
    state: str
    state_seconds: float
    age_seconds: float
    last_error: str | None
    last_error_seconds: float | None
    workers: list[WorkerStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(Work):
    """A node server; its work is that of all clients, those that have gone included.

    Attributes:
        host: Its machine.
        pid: Its process.
        uptime_seconds: Since it listens.
        draining: Whether it takes no clients any more.
        num_workers: What it offers.
        max_connections: Cap on workers; None for no cap.
        cpus: That it may use.
        load_average: Of the machine, over the last minute: threads of all its programs that run, wait for a CPU, or are
            blocked in the kernel.
        memory_total_bytes: Of the machine.
        memory_available_bytes: Of the machine.
        ended_workers: How many have ended, for whatever reason.
        refused_connections: For a wrong secret, for lack of room, and so on.
        clients: Those that are there, in the order in which they came.
    """

    host: str
    pid: int
    uptime_seconds: float
    draining: bool
    num_workers: int
    max_connections: int | None
    cpus: int
    load_average: float
    memory_total_bytes: int
    memory_available_bytes: int
    ended_workers: int
    refused_connections: int
    clients: list[ClientStatus]

    @property
    def workers(self) -> list[WorkerStatus]:
        """Those of all clients."""
        return [worker for client in self.clients for worker in client.workers]
