"""Looks at node servers as text and as data, with rates from the difference of two looks. Pure."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rpcdataloader.wire.printable import printable
from rpcdataloader.wire.status import ClientStatus, NodeStatus, Work, WorkerStatus

#: Of the JSON document; it changes when a key is renamed or goes.
SCHEMA = 1

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


class Rates(NamedTuple):
    """Per second of an interval, or since the beginning; CPU time per time, which is 1 for one CPU."""

    tasks: float
    sent_bytes: float
    received_bytes: float
    cpu: float


class Comparison:
    """A node server now and, if there was a look before and it was not restarted since, then.

    Attributes:
        interval: Seconds between the two on its clock; None if there was no look before: all rates are averages then,
            each since its process, or its connection, began. The CPU time of node and client is that of their present
            workers.
    """

    def __init__(self, now: NodeStatus, before: NodeStatus | None) -> None:
        seconds = 0.0
        if before is not None and (before.pid, before.host) == (now.pid, now.host):
            seconds = now.uptime_seconds - before.uptime_seconds
        self.now = now
        self.interval = seconds if seconds > 0 else None
        self._before = before if self.interval else None
        clients = self._before.clients if self._before else []
        self._clients = {(client.session_pid, client.host, client.pid): client for client in clients}
        self._workers = {(worker.pid, worker.number): worker for client in clients for worker in client.workers}

    def node(self) -> Rates:
        """Those of the node."""
        return self._rates(self.now, self._before, self.now.uptime_seconds, self.now.workers)

    def client(self, client: ClientStatus) -> Rates:
        """Those of one of its clients."""
        before = self._clients.get((client.session_pid, client.host, client.pid))
        return self._rates(client, before, client.age_seconds, client.workers)

    def worker(self, worker: WorkerStatus) -> Rates:
        """Those of one of its workers."""
        before = self._workers.get((worker.pid, worker.number))
        rates = self._rates(worker, before, worker.age_seconds, [])
        seconds = self._seconds(before, worker.age_seconds)
        cpu = worker.cpu_seconds - (before.cpu_seconds if before else 0.0)
        return rates._replace(cpu=max(0.0, cpu) / seconds)

    def _rates(self, now: Work, before: Work | None, age: float, workers: list[WorkerStatus]) -> Rates:
        names, seconds = Rates._fields[:-1], self._seconds(before, age)
        done = (max(0, getattr(now, name) - getattr(before, name, 0)) / seconds for name in names)
        return Rates._make([*done, sum(self.worker(worker).cpu for worker in workers)])

    def _seconds(self, before: Work | None, age: float) -> float:
        return max(1e-3, age if before is None or self.interval is None else self.interval)


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
            "interval_seconds": comparison and comparison.interval,
        }
        if comparison is not None:
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
    *done, cpu = rates._asdict().items()
    return (
        dataclasses.asdict(work) | {f"{name}_per_second": rate for name, rate in done} | {"cpu_percent": 100 * cpu[1]}
    )


# --- text


def as_text(look: Look, before: Look | None, when: str, *, workers: bool = False) -> str:
    """One line of totals, one per node server, and one per client that has had errors.

    Args:
        when: The time of the look, for people.
        workers: With a block per node server, in which each client and worker has a line.
    """
    compared = compare(look, before)
    intervals = [seen.interval for _answer, seen in compared if seen and seen.interval]
    rates = f"over the last {in_time(max(intervals))}" if intervals else "averages since each began"
    lines = [f"{when}, rates: {rates}"]
    if compared:
        lines += _describe_nodes(compared)
    lines += [f"{printable(name)}: no node server has registered there" for name in look.nowhere]
    lines += [f"ignored {printable(path)}: {printable(why)}" for path, why in look.ignored.items()]
    lines += _describe_errors([client for _answer, seen in compared if seen for client in seen.now.clients])
    if workers:
        for answer, comparison in compared:
            if comparison is not None:
                lines += ["", *_describe_node(answer, comparison)]
    return "\n".join(lines) + "\n"


_NODE_HEADER = ("node", "state", "clients", "workers", "CPU", "load", "CPUs", "mem %", "batch/s", "MB/s", "errors")
_NODE_COLUMNS = "{:<26} {:<8} {:>7} {:>7} {:>6} {:>6} {:>5} {:>5} {:>7} {:>7} {:>6}"


def _describe_nodes(compared: list[tuple[Answer, Comparison | None]]) -> list[str]:
    """Totals first, and then what needs a look, as a terminal may have no room for all."""
    seen = [comparison for _answer, comparison in compared if comparison is not None]
    ready = sum(state_of(answer) == "ready" for answer, _comparison in compared)
    lines = [_NODE_COLUMNS.format(*_NODE_HEADER), _describe_sum(f"all: {ready} of {len(compared)} ready", "", seen)]
    for answer, comparison in sorted(compared, key=lambda item: state_of(item[0]) == "ready"):
        if comparison is None:
            lines.append(f"{printable(answer.address)}  {state_of(answer)}: {printable(answer.error)}")
        else:
            lines.append(_describe_sum(_cut(answer.address, 26, keep=8), state_of(answer), [comparison]))
    return lines


def _describe_sum(name: str, state: str, seen: list[Comparison]) -> str:
    nodes, rates = [one.now for one in seen], [one.node() for one in seen]
    memory = sum(node.memory_total_bytes for node in nodes)
    used = memory - sum(node.memory_available_bytes for node in nodes)
    return _NODE_COLUMNS.format(
        name,
        state,
        len({(client.host, client.pid) for node in nodes for client in node.clients if _is_here(client)}),
        sum(len(node.workers) for node in nodes),
        in_digits(sum(one.cpu for one in rates)),
        in_digits(sum(node.load_average for node in nodes)),
        sum(node.cpus for node in nodes),
        f"{100 * used / max(1, memory):.0f}",
        in_digits(sum(one.tasks for one in rates)),
        in_digits(sum(one.sent_bytes for one in rates) / 1e6),
        sum(node.errors for node in nodes),
    ).rstrip()


def _is_here(client: ClientStatus) -> bool:
    """Whether it uses that node: a rank has a session on every node, but workers on those of its share."""
    return bool(client.workers) or client.state != "idle"


def _describe_errors(clients: list[ClientStatus]) -> list[str]:
    lines = []
    failed = [client for client in clients if client.last_error is not None]
    for name in dict.fromkeys(map(_describe_name, failed)):
        same = [client for client in failed if _describe_name(client) == name]
        when, text = min((client.last_error_seconds or 0.0, client.last_error or "") for client in same)
        count = _count(sum(client.errors for client in same), "error")
        lines.append(f"{name}: {count}, the last one {in_time(when)} ago: {printable(text)}")
    return lines


def _describe_name(client: ClientStatus) -> str:
    rank = "" if client.rank is None else f" rank {client.rank}"
    job = f" job {_cut(client.job, 16)}" if client.job else ""
    return f"client {_cut(client.host, 40)}:{client.pid}{rank}{job}"


def _describe_node(answer: Answer, comparison: Comparison) -> list[str]:
    node = comparison.now
    here = [client for client in node.clients if _is_here(client)]
    most = "" if node.max_connections is None else f" of at most {node.max_connections}"
    lines = [
        f"{_cut(answer.address, 48)}  {state_of(answer)}, up {in_time(node.uptime_seconds)}, pid {node.pid}",
        f"  {_count(len(here), 'client')}, {_count(len(node.workers), 'worker')}{most}, "
        f"{node.num_workers:,} offered, {node.ended_workers:,} ended, {node.refused_connections:,} refused",
        f"  {_describe_work(node, comparison.node())}",
    ]
    for client in here:
        lines += _describe_client(client, comparison)
    if others := len(node.clients) - len(here):
        lines.append(f"  {_count(others, 'more client')} with a session and without workers here")
    return lines


def _describe_work(work: Work, rates: Rates) -> str:
    return (
        f"{_count(work.tasks, 'batch', 'batches')} ({in_digits(rates.tasks)}/s), {_count(work.calls, 'call')}, "
        f"{_count(work.errors, 'error')}, {in_bytes(work.sent_bytes)} sent ({in_bytes(rates.sent_bytes)}/s)"
    )


_WORKER_HEADER = ("worker", "pid", "state", "queue", "batches", "/s", "MB/s", "CPU %", "memory", "errors")
_WORKER_COLUMNS = "    {:>6} {:>8}  {:<24} {:>5} {:>11} {:>6} {:>6} {:>5} {:>8} {:>6}"


def _describe_client(client: ClientStatus, comparison: Comparison) -> list[str]:
    lines = [
        f"  {_describe_name(client)}",
        f"    session {client.session_pid} {_cut(client.state, 24)} {in_time(client.state_seconds)}, "
        f"here {in_time(client.age_seconds)}",
        f"    {_describe_work(client, comparison.client(client))}",
    ]
    if client.workers:
        lines.append(_WORKER_COLUMNS.format(*_WORKER_HEADER))
    for worker in client.workers:
        rates = comparison.worker(worker)
        lines.append(
            _WORKER_COLUMNS.format(
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


def _cut(text: str, num_chars: int, keep: int = 0) -> str:
    """At most ``num_chars``, of which the last ``keep`` are those of the end."""
    text = printable(text)
    if len(text) <= num_chars:
        return text
    return text[: num_chars - 3 - keep] + "..." + text[len(text) - keep :]


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
