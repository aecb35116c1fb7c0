"""The result of a look at node servers, as the JSON document of ``docs/status-reference.md``, and as metrics. Pure.

Rates are differences to the document of the previous look. Metrics are in the text format of Prometheus, version 0.0.4.
Their labels name node servers, and clients by host and rank only: with process ids, each restart would add series that
Prometheus keeps for weeks. Clients with the same labels count as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rpcdataloader.wire.messages import printable
from rpcdataloader.wire.status import NodeStatus, count_wanted

#: Version of the document; it changes when a key is renamed or removed.
SCHEMA = 1

#: States of a node server.
STATES = ("ready", "unreachable", "refused")

# A JSON object.
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one node server."""

    address: str
    status: NodeStatus | None = None  # status that it sent; None without an answer
    error: str = ""  # reason for a missing answer; empty otherwise
    version: str = ""  # version of the package there
    is_refused: bool = False  # True if waiting does not help: another secret, certificate or version

    @property
    def state(self) -> str:
        """One of :data:`STATES`."""
        if self.status is None:
            return "refused" if self.is_refused else "unreachable"
        return "ready"


def make_document(time: float, answers: Sequence[Answer], ignored: dict[str, str], before: Tree | None = None) -> Tree:
    """Return the document of one look.

    Args:
        time: Seconds since 1970.
        ignored: Unused files of registers, with the reason.
        before: Document of the previous look; None for the first look.
    """
    then = {node["address"]: node for node in before["nodes"]} if before else {}
    states = {answer.state for answer in answers}
    nodes = [_describe(answer, then.get(answer.address, {})) for answer in answers]
    return {
        "schema": SCHEMA,
        "time_unix_seconds": time,
        "exit_status": 2 if "refused" in states else 0 if states == {"ready"} else 1,
        "nodes": nodes,
        "clients": _join_clients(nodes),
        "workers_wanted": count_wanted(answer.status for answer in answers if answer.status is not None),
        "ignored_files": [{"path": path, "reason": reason} for path, reason in ignored.items()],
    }


def _join_clients(nodes: Sequence[Tree]) -> list[Tree]:
    """Return the training processes, which each have sessions on several nodes; longest-waiting loops first."""
    sessions: dict[tuple[str, int], list[Tree]] = {}
    for node in nodes:
        for client in node.get("clients", ()):
            sessions.setdefault((client["host"], client["pid"]), []).append(client)
    clients = []
    for (host, pid), parts in sessions.items():
        reports = [part for part in parts if part["loops_seconds"] is not None]
        # All sessions of a client get the same report.
        last = min(reports, key=lambda part: part["loops_seconds"], default=parts[0])
        client = {"host": host, "pid": pid, "job": last["job"], "loops": last["loops"]}
        client["rank"] = last["loops"][0]["rank"] if last["loops"] else last["rank"]
        client["num_workers"] = sum(len(part["workers"]) for part in parts)
        for name in "tasks_per_second", "sent_bytes_per_second", "errors":
            client[name] = sum(part[name] for part in parts)
        clients.append(client)
    return sorted(clients, key=lambda client: -client["loops"][0]["wait_share"] if client["loops"] else 1)


def _describe(answer: Answer, before: Tree) -> Tree:
    node: Tree = {
        "address": answer.address,
        "state": answer.state,
        "error": answer.error or None,
        "interval_seconds": None,  # interval of the rates; None for averages since each began
    }
    if answer.status is None:
        return node
    node |= {"version": answer.version, **dataclasses.asdict(answer.status)}
    interval = node["uptime_seconds"] - before.get("uptime_seconds", node["uptime_seconds"])
    if interval <= 0 or _identify(node) != _identify(before):  # first look, or the server was restarted
        before = {}
    node["interval_seconds"] = interval if before else None
    _add_rates(node, before, interval)
    return node


def _add_rates(now: Tree, before: Tree, interval: float) -> None:
    """Add the rates of a node, client or worker since ``before``, the same of the previous look, and of all below it.

    Newer processes and connections have averages since they began.
    """
    seconds = max(1e-3, interval if before else now.get("uptime_seconds") or now.get("age_seconds", 0.0))
    for name in "tasks", "sent_bytes", "received_bytes":
        now[f"{name}_per_second"] = max(0, now[name] - before.get(name, 0)) / seconds
    if "cpu_seconds" in now:
        now["cpu_percent"] = 100 * max(0.0, now["cpu_seconds"] - before.get("cpu_seconds", 0.0)) / seconds
        return
    then = {_identify(part): part for part in _parts(before)}
    for part in _parts(now):
        _add_rates(part, then.get(_identify(part), {}), interval)
    now["cpu_percent"] = sum(part["cpu_percent"] for part in _parts(now))


def _parts(tree: Tree) -> list[Tree]:
    return [*tree.get("clients", ()), *tree.get("workers", ())]


def _identify(tree: Tree) -> tuple[Any, ...]:
    return tuple(tree.get(name) for name in ("host", "pid", "session_pid", "number"))


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Meaning of each metric, and the key of its value in a node; empty for those that take more than that. Names that end
#: with ``_total`` are counters, the others gauges.
METRICS = {
    "rpcdataloader_node_state": ("1 for the state of a node server, 0 for others.", ""),
    "rpcdataloader_batches_total": ("Batches that workers have loaded.", "tasks"),
    "rpcdataloader_errors_total": ("Requests that workers have answered with an exception.", "errors"),
    "rpcdataloader_sent_bytes_total": ("Bytes that workers have sent.", "sent_bytes"),
    "rpcdataloader_ended_workers_total": ("Workers that have ended, for any reason.", "ended_workers"),
    "rpcdataloader_refused_connections_total": ("Connections that were refused.", "refused_connections"),
    "rpcdataloader_clients": ("Training processes that have a session.", ""),
    "rpcdataloader_workers": ("Workers of all clients, by state.", ""),
    "rpcdataloader_offered_workers": ("Workers that a node server offers.", "num_workers"),
    "rpcdataloader_client_workers": ("Workers of a client.", ""),
    "rpcdataloader_client_wait_ratio": ("Share of its time that a loop waits, from 0 to 1.", ""),
    "rpcdataloader_client_bound": ("1 for what a loop waits for.", ""),
    "rpcdataloader_client_demand_batches_per_second": ("Batches that a loop would take if it never waited.", ""),
    "rpcdataloader_workers_wanted": ("Workers that all loops together want.", ""),
    "rpcdataloader_exporter_failures_total": ("Failed attempts of the exporter to query the node servers.", ""),
}

_KERNEL_STATES = {"T": "stopped", "t": "stopped", "D": "blocked", "Z": "gone", "": "gone"}
_WORKER_STATES = ("idle", "running", "draining", "stopped", "blocked", "gone")

# Name without the common prefix, labels, and value.
_Sample = tuple[str, dict[str, str], float]


def as_metrics(document: Tree, num_failures: int) -> str:
    """Return all metrics of a document, and the number of failed looks."""
    series: dict[str, dict[str, float]] = {name: {} for name in METRICS}
    samples = [*_of_nodes(document), *_of_clients(document), ("exporter_failures_total", {}, num_failures)]
    for name, labels, value in samples:
        pairs = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        # Prometheus refuses all metrics if one comes twice, as a client's made-up values might.
        series[f"rpcdataloader_{name}"].setdefault(f"{{{pairs}}}" if pairs else "", value)
    lines = []
    for name, values in series.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {METRICS[name][0]}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{labels} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return printable(text).replace("\\", r"\\").replace('"', r"\"")


def _of_nodes(document: Tree) -> Iterator[_Sample]:
    for node in document["nodes"]:
        labels = {"node": node["address"]}
        for state in STATES:
            yield "node_state", {**labels, "state": state}, int(node["state"] == state)
        if "pid" not in node:
            continue  # no answer
        for name, (_meaning, key) in METRICS.items():
            if key:
                yield name.removeprefix("rpcdataloader_"), labels, node[key]
        workers = [worker for client in node["clients"] for worker in client["workers"]]
        states = [
            _KERNEL_STATES.get(worker["process_state"], "draining" if worker["draining"] else worker["state"])
            for worker in workers
        ]
        for state in _WORKER_STATES:
            yield "workers", {**labels, "state": state}, states.count(state)
        yield "clients", labels, len(node["clients"])


def _of_clients(document: Tree) -> Iterator[_Sample]:
    groups: dict[tuple[str, str], list[Tree]] = {}
    for client in document["clients"]:
        rank = "" if client["rank"] is None else str(client["rank"])
        groups.setdefault((client["host"], rank), []).append(client)
    for (host, rank), clients in groups.items():
        labels = {"client": host, "rank": rank}
        yield "client_workers", labels, sum(client["num_workers"] for client in clients)
        # For each client, its loop that waits most; for all clients with the same labels, the one that waits most.
        for loop in clients[0]["loops"][:1]:
            yield "client_wait_ratio", labels, loop["wait_share"]
            yield "client_bound", {**labels, "bound": loop["bound"]}, 1
            if loop["demand_per_second"] is not None:
                yield "client_demand_batches_per_second", labels, loop["demand_per_second"]
    yield "workers_wanted", {}, document["workers_wanted"]
