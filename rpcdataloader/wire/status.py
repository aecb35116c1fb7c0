"""What a node server tells of itself on a status connection: plain numbers and names, as JSON. Pure.

Counters only grow while a node server lives: what ended workers and clients have done stays in the totals of those
above them. Times are seconds that have passed, so that the clocks of machines need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from rpcdataloader.wire.plain import Json


@dataclass(frozen=True, slots=True)
class StatusRequest(Json):
    """Asks for a :class:`NodeStatus`."""

    stacks: bool = False  # with the Python stacks of all workers, which takes up to 2 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Json):
    """What was done since the beginning."""

    tasks: int  # batches of loaders that were answered
    calls: int  # other requests that were answered: remote calls, questions of a loader
    errors: int  # requests that were answered with an exception
    received_bytes: int  # by worker connections
    sent_bytes: int  # by worker connections


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(Work):
    """A worker."""

    number: int  # in its session, from 1
    pid: int
    state: str  # "idle" or "running"
    state_seconds: float  # since that changed, or since the last request began
    draining: bool  # it takes no further requests
    # The letter by which Linux names the state of its main thread: "T" is stopped, "D" waits in the kernel; empty when
    # it has gone.
    process_state: str
    age_seconds: float  # since it was admitted
    queued: int  # requests that it has received and not begun
    # Bytes of requests that have arrived and that it has not received, as it does so between two of them; None on a
    # Unix socket, where the kernel does not tell.
    unread_bytes: int | None
    cpu_seconds: float
    memory_bytes: int  # resident, including what it shares with other processes
    stack: str | None = None  # its Python stack, or why there is none; None without a request for stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatus(Work):
    """A training process, and its session here; its work is that of its workers, including those that have ended."""

    host: str  # its machine, as it says
    pid: int  # its process there
    rank: int | None  # in a distributed job; None outside of one
    job: str  # of Slurm; empty outside of one
    session_pid: int  # the process that serves it here
    state: str  # "idle", or "running" while the session builds a dataset or answers another request
    state_seconds: float  # since that changed
    age_seconds: float  # since it has connected
    last_error: str | None  # text of the last exception that a worker answered with; None if there was none
    last_error_seconds: float | None  # since then
    workers: list[WorkerStatus]  # in the order of their numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(Work):
    """A node server; its work is that of all clients, including those that have gone."""

    host: str
    pid: int
    uptime_seconds: float  # since it listens
    draining: bool  # it takes no clients any more
    num_workers: int  # what it offers
    max_connections: int | None  # cap on workers; None for no cap
    cpus: int  # that it may use
    # Of the machine, over the last minute: threads of all its programs that run, wait for a CPU, or are blocked in the
    # kernel.
    load_average: float
    memory_total_bytes: int  # of the machine
    memory_available_bytes: int  # of the machine
    ended_workers: int  # for whatever reason
    refused_connections: int  # for a wrong secret, for lack of room, and so on
    clients: list[ClientStatus]  # in the order in which they came

    @property
    def workers(self) -> list[WorkerStatus]:
        """Those of all clients."""
        return [worker for client in self.clients for worker in client.workers]
