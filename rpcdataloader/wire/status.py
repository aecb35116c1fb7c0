"""A node server's description of itself, on a status connection. Pure.

It is plain numbers and names, as JSON. Counters only grow while a node server lives: the work of ended workers and
clients stays in the totals of those above them. Times are seconds that have passed, so that the clocks of machines need
not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rpcdataloader.wire.messages import Json

# Size of a client's report: its numbers take 2 KB for each loop.
MAX_REPORT_BYTES = 8192

#: Such numbers may overflow later calculations. NaN is refused with these.
MAX_NUMBER = 1e18

#: Above the number of any loop; an autoscaler may follow a loop's number of workers.
MAX_WORKERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStatus(Json):
    """Why a training loop waits, as its process reports it: the diagnosis of the current pass."""

    dataset: str  # name of its class
    rank: int | None  # in a distributed job; None outside of one
    wait_share: float  # of the loop's time, from 0 to 1
    bound: str  # what it waits for
    text: str  # the sentence with the remedy
    demand_per_second: float | None  # batches that it would consume; None for a loop that only loads
    delivered_per_second: float  # batches that it gets
    more_workers: int | None  # number that would end the waiting; None if none would
    wanted_workers: int  # number that it wants, more or fewer than the present one
    numbers: dict[str, float]  # ``Diagnosis.metrics()``

    def __post_init__(self) -> None:
        names = "rank", "wait_share", "demand_per_second", "delivered_per_second", "more_workers", "wanted_workers"
        fields = {name: getattr(self, name) or 0 for name in names}
        if min(fields.values()) < 0 or max(fields["more_workers"], fields["wanted_workers"]) > MAX_WORKERS:
            raise ValueError("a number is negative, or there are too many workers")
        for name, value in {**self.numbers, **fields, self.bound: 0}.items():
            if not name.isidentifier() or len(name) > 32 or not abs(value) < MAX_NUMBER:
                raise ValueError("a value is out of range, or its name is no identifier")


@dataclass(frozen=True, slots=True)
class Report(Json):
    """The training loops of a client, those that wait most first."""

    loops: list[LoopStatus]

    @classmethod
    def of(cls, loops: Sequence[LoopStatus]) -> bytes:
        """The payload of a report, with as many loops as fit."""
        chosen = sorted(loops, key=lambda loop: -loop.wait_share)
        while len(payload := cls(chosen).encode()) > MAX_REPORT_BYTES:
            chosen.pop()
        return payload


@dataclass(frozen=True, slots=True)
class StatusRequest(Json):
    """Asks for a :class:`NodeStatus`."""

    stacks: bool = False  # with the Python stacks of all workers, which takes up to 2 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Json):
    """Work done since the beginning."""

    tasks: int  # answered batches of loaders
    calls: int  # other answered requests: remote calls, questions of a loader
    errors: int  # requests answered with an exception
    received_bytes: int  # by worker connections
    sent_bytes: int  # by worker connections


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(Work):
    """A worker."""

    number: int  # in its session, from 1
    pid: int
    state: str  # "idle" or "running"
    state_seconds: float  # since that changed, or since the last request began
    draining: bool  # takes no further requests
    # Linux's letter for the state of its main thread: "T" is stopped, "D" waits in the kernel; empty when it has gone.
    process_state: str
    age_seconds: float  # since it was admitted
    queued: int  # requests received and not begun; a worker receives between two requests
    cpu_seconds: float
    memory_bytes: int  # resident, including shared pages
    stack: str | None = None  # its Python stack, or why it is missing; None without a request for stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatus(Work):
    """A training process, and its session here; its work is that of its workers, including ended ones."""

    host: str  # name of its machine, by its own account
    pid: int  # its process there
    rank: int | None  # in a distributed job; None outside of one
    job: str  # of Slurm; empty outside of one
    session_pid: int  # the process that serves it here
    state: str  # "idle", or "running" while the session builds a dataset or answers another request
    state_seconds: float  # since that changed
    age_seconds: float  # since it connected
    last_error: str | None  # text of the last exception in an answer; None without any
    last_error_seconds: float | None  # since then
    workers: list[WorkerStatus]  # in the order of their numbers
    loops: list[LoopStatus] = field(default_factory=list)  # as last reported, those that wait most first
    loops_seconds: float | None = None  # since that report; None without a recent one


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(Work):
    """A node server; its work is that of all clients, including those that have gone."""

    host: str
    pid: int
    uptime_seconds: float  # since it listens
    num_workers: int  # workers that it offers
    max_connections: int | None  # cap on workers; None for no cap
    cpus: int  # CPUs that it may use
    # The machine's, over the last minute: threads of all programs that run, wait for a CPU, or block in the kernel.
    load_average: float
    memory_total_bytes: int  # of the machine
    memory_available_bytes: int  # of the machine
    ended_workers: int  # for whatever reason
    refused_connections: int  # whose peers failed authentication, TLS or the protocol
    clients: list[ClientStatus]  # in the order in which they came


def last_report(sessions: Iterable[ClientStatus]) -> list[LoopStatus]:
    """Return the loops of one client, which reports the same to all of its sessions."""
    reports = [(session.loops_seconds, session.loops) for session in sessions if session.loops_seconds is not None]
    return min(reports, key=lambda report: report[0])[1] if reports else []


def count_wanted(nodes: Iterable[NodeStatus]) -> int:
    """Add up the workers that clients want: for their loops or, as between two passes, those that have loaded."""
    clients: dict[tuple[str, int], list[ClientStatus]] = {}
    for node in nodes:
        for client in node.clients:
            clients.setdefault((client.host, client.pid), []).append(client)
    wanted = 0
    for sessions in clients.values():
        loops = last_report(sessions)
        present = sum(worker.tasks > 0 for one in sessions for worker in one.workers)
        wanted += sum(loop.wanted_workers for loop in loops) if loops else present
    return wanted


def slowest_rank(clients: Iterable[ClientStatus], dataset: str, job: str) -> LoopStatus | None:
    """Return the loop over a dataset of the rank that waits most; None if several clients have the same rank."""
    loops = {
        (client.host, client.pid): loop
        for client in clients
        if client.job == job
        for loop in reversed(client.loops)
        if loop.dataset == dataset and loop.rank is not None
    }
    if len({loop.rank for loop in loops.values()}) < len(loops):
        return None  # those of two jobs
    return max(loops.values(), key=lambda loop: loop.wait_share, default=None)
