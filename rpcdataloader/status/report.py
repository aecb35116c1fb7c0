"""Looks at node servers as text and as data, with rates from the difference of two looks. Pure."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rpcdataloader.wire.printable import printable
from rpcdataloader.wire.status import ClientStatus, NodeStatus, Work, WorkerStatus

#: Of the JSON document; it changes when a key is renamed or goes.
SCHEMA = 1

#: Columns of the text, stacks and errors apart.
WIDTH = 100

State = Literal["ready", "draining", "unreachable", "refused"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one node server.

    Attributes:
        status: What it says; None if it says nothing.
        error: Why it says nothing; empty otherwise.
        is_refused: Whether that is for something that waiting does not change: another secret, certificate or version.
    """

    address: str
    status: NodeStatus | None = None
    error: str = ""
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """At all node servers at one time.

    Attributes:
        time: Seconds since 1970.
        answers: One of each.
        ignored: Files of registers that were not used, with the reason.
        nowhere: Registers, if there is nobody in them.
    """

    time: float
    answers: Sequence[Answer]
    ignored: dict[str, str]
    nowhere: Sequence[str] = ()

    @property
    def exit_status(self) -> int:
        """0 if all are ready, 1 if one is not or there are none, 2 if one has refused the secret or certificate."""
        states = [state_of(answer) for answer in self.answers]
        if "refused" in states:
            return 2
        return 0 if states and all(state == "ready" for state in states) else 1


def state_of(answer: Answer) -> State:
    """In one word."""
    if answer.status is None:
        return "refused" if answer.is_refused else "unreachable"
    return "draining" if answer.status.draining else "ready"


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second of an interval, or since the beginning.

    Attributes:
        cpu: CPU time per time; 1 for one CPU.
    """

    tasks: float
    sent_bytes: float
    received_bytes: float
    cpu: float


def rates_of(now: Work, before: Work | None, seconds: float, cpu_seconds: float = 0.0) -> Rates:
    """What was done between two looks.

    Args:
        before: None for everything until now.
        seconds: Between the two, or since it began.
        cpu_seconds: That were used in this time.
    """
    seconds = max(seconds, 1e-3)

    def rate(name: str) -> float:
        value: int = getattr(now, name) - (0 if before is None else getattr(before, name))
        return max(0, value) / seconds

    return Rates(rate("tasks"), rate("sent_bytes"), rate("received_bytes"), max(0.0, cpu_seconds) / seconds)


class Comparison:
    """A node server now and, if it was looked at before, then.

    Attributes:
        interval: Seconds between the two on its clock; None if there was no look before: all rates are averages then,
            each since its process, or its connection, began.
    """

    def __init__(self, now: NodeStatus, before: NodeStatus | None) -> None:
        if before is not None and (before.pid, before.host) != (now.pid, now.host):
            before = None  # it was restarted
        self.now = now
        self._before = before
        self.interval = None if before is None else now.uptime_seconds - before.uptime_seconds
        if self.interval is not None and self.interval <= 0:
            self._before = self.interval = None
        clients = [] if self._before is None else self._before.clients
        self._clients = {_name(client): client for client in clients}
        self._workers = {(worker.pid, worker.number): worker for client in clients for worker in client.workers}

    def node(self) -> Rates:
        """Of the node; its CPU time is that of the workers that are there."""
        rates = rates_of(self.now, self._before, self.interval or self.now.uptime_seconds)
        return dataclasses.replace(rates, cpu=sum(self.worker(worker).cpu for worker in self.now.workers))

    def client(self, client: ClientStatus) -> Rates:
        """Of one of its clients, as for the node."""
        before = self._clients.get(_name(client))
        rates = rates_of(client, before, self._seconds(before, client.age_seconds))
        return dataclasses.replace(rates, cpu=sum(self.worker(worker).cpu for worker in client.workers))

    def worker(self, worker: WorkerStatus) -> Rates:
        """Of one of its workers."""
        before = self._workers.get((worker.pid, worker.number))
        cpu = worker.cpu_seconds - (0.0 if before is None else before.cpu_seconds)
        return rates_of(worker, before, self._seconds(before, worker.age_seconds), cpu)

    def _seconds(self, before: Work | None, age: float) -> float:
        return age if before is None or self.interval is None else self.interval


def _name(client: ClientStatus) -> tuple[int, str, int]:
    return client.session_pid, client.host, client.pid


def compare(look: Look, before: Look | None) -> list[tuple[Answer, Comparison | None]]:
    """The answers of ``look``, each with its comparison to that in ``before``; None for those without a status."""
    then = {} if before is None else {answer.address: answer.status for answer in before.answers}
    return [
        (answer, None if answer.status is None else Comparison(answer.status, then.get(answer.address)))
        for answer in look.answers
    ]


# --- data


def as_data(look: Look, before: Look | None) -> dict[str, Any]:
    """The JSON document of a look; ``docs/status.md`` describes it."""
    nodes = []
    for answer, comparison in compare(look, before):
        node: dict[str, Any] = {
            "address": answer.address,
            "state": state_of(answer),
            "error": answer.error or None,
            "interval_seconds": None,
        }
        if comparison is not None:
            node["interval_seconds"] = comparison.interval
            node |= _flat(comparison.now, comparison.node())
            node["clients"] = [
                _flat(client, comparison.client(client))
                | {"workers": [_flat(worker, comparison.worker(worker)) for worker in client.workers]}
                for client in comparison.now.clients
            ]
        nodes.append(node)
    return {
        "schema": SCHEMA,
        "time_unix_seconds": look.time,
        "exit_status": look.exit_status,
        "nodes": nodes,
        "ignored_files": [{"path": path, "reason": reason} for path, reason in look.ignored.items()],
    }


def _flat(work: Work, rates: Rates) -> dict[str, Any]:
    return dataclasses.asdict(work) | {
        "tasks_per_second": rates.tasks,
        "sent_bytes_per_second": rates.sent_bytes,
        "received_bytes_per_second": rates.received_bytes,
        "cpu_percent": 100 * rates.cpu,
    }


# --- text


def as_text(look: Look, before: Look | None, when: str) -> str:
    """One block per node server.

    Args:
        when: The time of the look, for people.
    """
    blocks = []
    compared = compare(look, before)
    for answer, comparison in compared:
        blocks.append(_describe_failure(answer) if comparison is None else _describe_node(answer, comparison))
    blocks += [f"{printable(name)}: no node server has registered there" for name in look.nowhere]
    if look.ignored:
        blocks.append("\n".join(f"ignored {printable(path)}: {printable(why)}" for path, why in look.ignored.items()))
    intervals = [comparison.interval for _answer, comparison in compared if comparison and comparison.interval]
    rates = f"over the last {in_time(max(intervals))}" if intervals else "averages since each began"
    return "\n\n".join([f"{when}, rates: {rates}", *blocks]) + "\n"


def _describe_failure(answer: Answer) -> str:
    return f"{printable(answer.address)}  {state_of(answer)}: {printable(answer.error)}"


def _describe_node(answer: Answer, comparison: Comparison) -> str:
    node, rates = comparison.now, comparison.node()
    most = "" if node.max_connections is None else f" of at most {node.max_connections}"
    used = node.memory_total_bytes - node.memory_available_bytes
    lines = [
        f"{_cut(answer.address, 48)}  {state_of(answer)}, up {in_time(node.uptime_seconds)}, pid {node.pid}",
        f"  {_count(len(node.clients), 'client')}, {_count(len(node.workers), 'worker')}{most}, "
        f"{node.num_workers:,} offered, {node.ended_workers:,} ended, {node.refused_connections:,} refused",
        f"  {_describe_work(node, rates)}",
        f"  CPU {rates.cpu:.1f} of {node.cpus} by workers, memory {in_bytes(used)} of "
        f"{in_bytes(node.memory_total_bytes)} in use on the machine",
    ]
    for client in node.clients:
        lines += _describe_client(client, comparison)
    return "\n".join(lines)


def _describe_work(work: Work, rates: Rates) -> str:
    return (
        f"{_count(work.tasks, 'batch', 'batches')} ({in_digits(rates.tasks)}/s), {_count(work.calls, 'call')}, "
        f"{_count(work.errors, 'error')}, {in_bytes(work.sent_bytes)} sent ({in_bytes(rates.sent_bytes)}/s)"
    )


_HEADER = ("worker", "pid", "state", "queue", "batches", "/s", "MB/s", "CPU %", "memory", "errors")
_COLUMNS = "    {:>6} {:>8}  {:<24} {:>5} {:>11} {:>6} {:>6} {:>5} {:>8} {:>6}"


def _describe_client(client: ClientStatus, comparison: Comparison) -> list[str]:
    rank = "" if client.rank is None else f" rank {client.rank}"
    job = f" job {_cut(client.job, 16)}" if client.job else ""
    lines = [
        f"  client {_cut(client.host, 40)}:{client.pid}{rank}{job}",
        f"    session {client.session_pid} {_cut(client.state, 24)} {in_time(client.state_seconds)}, "
        f"here {in_time(client.age_seconds)}",
        f"    {_describe_work(client, comparison.client(client))}",
    ]
    if client.workers:
        lines.append(_COLUMNS.format(*_HEADER).rstrip())
    for worker in client.workers:
        rates = comparison.worker(worker)
        lines.append(
            _COLUMNS.format(
                worker.number,
                worker.pid,
                _cut(_describe_state(worker), 24),
                # A byte that was not received belongs to one request at least.
                f"{worker.queued + 1}+" if worker.unread_bytes else worker.queued,
                f"{worker.tasks:,}",
                in_digits(rates.tasks),
                in_digits(rates.sent_bytes / 1e6),
                f"{100 * rates.cpu:.0f}",
                in_bytes(worker.memory_bytes),
                worker.errors,
            )
        )
        if worker.stack is not None:
            lines.append(textwrap.indent(printable(worker.stack, keep="\n"), " " * 8))
    return lines


def _describe_state(worker: WorkerStatus) -> str:
    state = "draining" if worker.draining else worker.state
    # The first of the units is enough here.
    since = " ".join(in_time(worker.state_seconds).split()[:2])
    return f"{state} {since}{_PROCESS_STATES.get(worker.process_state, '')}"


# What matters of what the kernel says: D is a thread that waits for a disk or a file server.
_PROCESS_STATES = {"T": ", stopped", "t": ", traced", "D": ", blocked", "Z": ", gone", "": ", gone"}


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _cut(text: str, num_chars: int) -> str:
    text = printable(text)
    return text if len(text) <= num_chars else text[: num_chars - 3] + "..."


def in_digits(number: float) -> str:
    """Three digits, and thousands as such: ``0``, ``0.25``, ``12.3``, ``1,234``."""
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number >= 0.001 else "0"


def in_bytes(number: float) -> str:
    """``0 B``, ``1.5 MB``: decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{in_digits(number)} TB"


def in_time(seconds: float) -> str:
    """``0.2 s``, ``12 s``, ``3 min 5 s``, ``2 h 7 min``, ``3 d 4 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"
