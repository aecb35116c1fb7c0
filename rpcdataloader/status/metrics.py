"""The document of a look as metrics in the text format of Prometheus, version 0.0.4. Pure.

Labels name node servers, and of clients the host and rank alone: with process ids, each restart would add series that a
server of Prometheus keeps for weeks. Clients with the same labels count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rpcdataloader.status.report import STATES, Tree
from rpcdataloader.wire.printable import printable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The values of the labels, and the value.
Samples = Iterable[tuple[tuple[str, ...], float]]

_KERNEL_STATES = {"T": "stopped", "t": "stopped", "D": "blocked", "Z": "gone", "": "gone"}
_WORKER_STATES = ("idle", "running", "draining", "stopped", "blocked", "gone")


class Metric(NamedTuple):
    """A metric.

    Attributes:
        help: What it is, in one sentence.
        labels: Their names.
        samples: Takes a document.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Tree], Samples]

    @property
    def kind(self) -> str:
        """``"counter"`` or ``"gauge"``."""
        return "counter" if self.name.endswith("_total") else "gauge"


def as_metrics(document: Tree, num_failures: int) -> str:
    """All metrics of a look.

    Args:
        num_failures: Looks that have failed as a whole.
    """
    document = {**document, "num_failures": num_failures}
    lines = []
    for metric in METRICS:
        series: dict[str, float] = {}
        for values, number in metric.samples(document):
            pairs = [f'{label}="{_escape(value)}"' for label, value in zip(metric.labels, values, strict=True)]
            # Prometheus refuses all metrics if one comes twice, as with what a client has made up.
            series.setdefault(f"{metric.name}{{{','.join(pairs)}}}" if pairs else metric.name, number)
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{labelled} {number}" for labelled, number in series.items()]
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return printable(value).replace("\\", r"\\").replace('"', r"\"")


def _answered(document: Tree) -> list[Tree]:
    return [node for node in document["nodes"] if "pid" in node]


def _workers(node: Tree) -> list[Tree]:
    return [worker for client in node["clients"] for worker in client["workers"]]


def _total(parts: Iterable[Tree], key: str) -> Any:
    return sum(part[key] for part in parts)


def _more_workers(client: Tree) -> int:
    """How many more workers a client would like: those of the loop that waits most."""
    return (client["loops"][0]["more_workers"] or 0) if client["loops"] else 0


def _node(name: str, text: str, value: str | Callable[[Tree], float]) -> Metric:
    """A value of each node server that answers."""

    def samples(document: Tree) -> Samples:
        for node in _answered(document):
            yield (node["address"],), node[value] if isinstance(value, str) else value(node)

    return Metric(f"rpcdataloader_{name}", text, ("node",), samples)


def _client(name: str, text: str, values: Callable[[list[Tree]], Samples], *labels: str) -> Metric:
    """Values of the clients with the same labels, those whose loops wait most first."""

    def samples(document: Tree) -> Samples:
        groups: dict[tuple[str, str], list[Tree]] = {}
        for client in document["clients"]:
            rank = "" if client["rank"] is None else str(client["rank"])
            groups.setdefault((client["host"], rank), []).append(client)
        for group, clients in groups.items():
            yield from ((group + rest, number) for rest, number in values(clients))

    return Metric(f"rpcdataloader_client_{name}", text, ("client", "rank", *labels), samples)


def _loop(name: str, text: str, values: Callable[[Tree], Samples], *labels: str) -> Metric:
    """Values of the loop of each client that waits most."""
    return _client(name, text, lambda clients: [s for loop in clients[0]["loops"][:1] for s in values(loop)], *labels)


def _node_states(document: Tree) -> Samples:
    return [((node["address"], state), int(node["state"] == state)) for node in document["nodes"] for state in STATES]


def _worker_states(document: Tree) -> Samples:
    for node in _answered(document):
        found = [
            _KERNEL_STATES.get(worker["process_state"], "draining" if worker["draining"] else worker["state"])
            for worker in _workers(node)
        ]
        yield from (((node["address"], state), found.count(state)) for state in _WORKER_STATES)


def _wanted_workers(document: Tree) -> Samples:
    yield (), sum(client["num_workers"] + _more_workers(client) for client in document["clients"])


def _demand(loop: Tree) -> Samples:
    return [] if loop["demand_per_second"] is None else [((), loop["demand_per_second"])]


METRICS = [
    Metric(
        "rpcdataloader_node_state", "1 for the state of a node server, 0 for others.", ("node", "state"), _node_states
    ),
    _node("uptime_seconds", "Time since a node server began to listen.", "uptime_seconds"),
    _node("batches_total", "Batches of loaders that workers have answered.", "tasks"),
    _node("calls_total", "Other requests that workers have answered.", "calls"),
    _node("errors_total", "Requests that workers have answered with an exception.", "errors"),
    _node("sent_bytes_total", "Bytes that workers have sent.", "sent_bytes"),
    _node("received_bytes_total", "Bytes that workers have received.", "received_bytes"),
    _node("ended_workers_total", "Workers that have ended, for whatever reason.", "ended_workers"),
    _node("refused_connections_total", "Connections that were refused.", "refused_connections"),
    _node("clients", "Training processes that have a session.", lambda node: len(node["clients"])),
    Metric("rpcdataloader_workers", "Workers of all clients, by state.", ("node", "state"), _worker_states),
    _node("offered_workers", "Workers that a node server offers.", "num_workers"),
    _node("queued_requests", "Requests that wait at workers.", lambda node: _total(_workers(node), "queued")),
    _node("used_cpus", "CPUs that workers use.", lambda node: node["cpu_percent"] / 100),
    _node("cpus", "CPUs that a node server may use.", "cpus"),
    _node("load_average", "Load average of the machine over the last minute.", "load_average"),
    _node(
        "worker_memory_bytes",
        "Resident memory of workers; memory that they share counts for each.",
        lambda node: _total(_workers(node), "memory_bytes"),
    ),
    _node("memory_bytes", "Memory of the machine.", "memory_total_bytes"),
    _node("available_memory_bytes", "Memory of the machine that is available.", "memory_available_bytes"),
    _client("workers", "Workers of a client.", lambda clients: [((), _total(clients, "num_workers"))]),
    _client(
        "more_workers",
        "Workers that would end the waiting, beside those that it has; 0 if more would not.",
        lambda clients: [((), sum(map(_more_workers, clients)))],
    ),
    _loop("wait_ratio", "Share of its time that a loop waits, from 0 to 1.", lambda loop: [((), loop["wait_share"])]),
    _loop("bound", "1 for what a loop waits for.", lambda loop: [((loop["bound"],), 1)], "bound"),
    _loop("delivered_batches_per_second", "Batches of a loop.", lambda loop: [((), loop["delivered_per_second"])]),
    _loop("demand_batches_per_second", "Batches that a loop would take if it never waited.", _demand),
    _loop(
        "stage_seconds",
        "Mean time that a batch spends in a stage.",
        lambda loop: [((stage["name"],), stage["value"]) for stage in loop["stages"]],
        "stage",
    ),
    Metric("rpcdataloader_wanted_workers", "Workers that clients have, and more that they want.", (), _wanted_workers),
    Metric(
        "rpcdataloader_exporter_failures_total",
        "Looks at all node servers that have failed in the exporter.",
        (),
        lambda document: [((), document["num_failures"])],
    ),
]
