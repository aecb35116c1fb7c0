"""The document of a look as metrics in the text format of Prometheus, version 0.0.4. Pure.

Labels name node servers, and of clients the host and rank alone: with process ids, each restart would add series that a
server of Prometheus keeps for weeks. Clients with the same labels count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rpcdataloader.status.report import STATES, Tree
from rpcdataloader.wire.printable import printable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The values of the labels, and the value.
Sample = tuple[tuple[str, ...], float]


class Metric(NamedTuple):
    """A metric.

    Attributes:
        kind: ``"gauge"`` or ``"counter"``.
        help: What it is, in one sentence.
        labels: Their names.
        samples: Takes a document.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Tree], Iterable[Sample]]


def as_metrics(document: Tree, num_failures: int) -> str:
    """All metrics of a look.

    Args:
        num_failures: Looks that have failed as a whole.
    """
    document = {**document, "num_failures": num_failures}
    lines = []
    for name, kind, text, labels, samples in METRICS:
        series: dict[str, float] = {}
        for values, number in samples(document):
            pairs = ",".join(f'{label}="{_escape(value)}"' for label, value in zip(labels, values, strict=True))
            # Prometheus refuses all metrics if one comes twice, as with what a client has made up.
            series.setdefault(f"{name}{{{pairs}}}" if labels else name, number)
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{labelled} {number}" for labelled, number in series.items()]
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return printable(value).replace("\\", r"\\").replace('"', r"\"")


def _nodes(document: Tree) -> list[Tree]:
    return [node for node in document["nodes"] if "pid" in node]


def _workers(node: Tree) -> list[Tree]:
    return [worker for client in node["clients"] for worker in client["workers"]]


def _clients(document: Tree) -> dict[tuple[str, str], list[Tree]]:
    """Clients by their labels, those whose loops wait most first."""
    clients: dict[tuple[str, str], list[Tree]] = {}
    for client in document["clients"]:
        rank = "" if client["rank"] is None else str(client["rank"])
        clients.setdefault((client["host"], rank), []).append(client)
    return clients


def more_workers(client: Tree) -> int:
    """How many more workers a client would like: those of the loop that waits most."""
    return (client["loops"][0]["more_workers"] or 0) if client["loops"] else 0


_WORKER_STATES = ("idle", "running", "draining", "stopped", "blocked", "gone")


def _state(worker: Tree) -> str:
    kernel = {"T": "stopped", "t": "stopped", "D": "blocked", "Z": "gone", "": "gone"}
    return kernel.get(worker["process_state"], "draining" if worker["draining"] else worker["state"])


def _node(name: str, kind: str, text: str, value: str | Callable[[Tree], float]) -> Metric:
    def samples(document: Tree) -> Iterable[Sample]:
        for node in _nodes(document):
            yield (node["address"],), node[value] if isinstance(value, str) else value(node)

    return Metric(f"rpcdataloader_{name}", kind, text, ("node",), samples)


def _client(name: str, text: str, value: Callable[[list[Tree]], float]) -> Metric:
    def samples(document: Tree) -> Iterable[Sample]:
        return [(labels, value(clients)) for labels, clients in _clients(document).items()]

    return Metric(f"rpcdataloader_client_{name}", "gauge", text, ("client", "rank"), samples)


def _loop(name: str, text: str, labels: tuple[str, ...], values: Callable[[Tree], Iterable[Sample]]) -> Metric:
    def samples(document: Tree) -> Iterable[Sample]:
        for of_client, clients in _clients(document).items():
            for loop in clients[0]["loops"][:1]:
                yield from ((of_client + rest, number) for rest, number in values(loop))

    return Metric(f"rpcdataloader_client_{name}", "gauge", text, ("client", "rank", *labels), samples)


METRICS = [
    Metric(
        "rpcdataloader_node_state",
        "gauge",
        "1 for the state that a node server is in, 0 for the others.",
        ("node", "state"),
        lambda document: [
            ((node["address"], state), int(node["state"] == state)) for node in document["nodes"] for state in STATES
        ],
    ),
    _node("uptime_seconds", "gauge", "Time since a node server began to listen.", "uptime_seconds"),
    _node("batches_total", "counter", "Batches of loaders that workers have answered.", "tasks"),
    _node("calls_total", "counter", "Other requests that workers have answered.", "calls"),
    _node("errors_total", "counter", "Requests that workers have answered with an exception.", "errors"),
    _node("sent_bytes_total", "counter", "Bytes that workers have sent.", "sent_bytes"),
    _node("received_bytes_total", "counter", "Bytes that workers have received.", "received_bytes"),
    _node("ended_workers_total", "counter", "Workers that have ended, for whatever reason.", "ended_workers"),
    _node("refused_connections_total", "counter", "Connections that were refused.", "refused_connections"),
    _node("clients", "gauge", "Training processes that have a session.", lambda node: len(node["clients"])),
    Metric(
        "rpcdataloader_workers",
        "gauge",
        "Workers of all clients, by state.",
        ("node", "state"),
        lambda document: [
            ((node["address"], state), sum(_state(worker) == state for worker in _workers(node)))
            for node in _nodes(document)
            for state in _WORKER_STATES
        ],
    ),
    _node("offered_workers", "gauge", "Workers that a node server offers.", "num_workers"),
    _node(
        "queued_requests",
        "gauge",
        "Requests that workers have received and not begun.",
        lambda node: sum(worker["queued"] for worker in _workers(node)),
    ),
    _node("used_cpus", "gauge", "CPUs that workers use.", lambda node: node["cpu_percent"] / 100),
    _node("cpus", "gauge", "CPUs that a node server may use.", "cpus"),
    _node("load_average", "gauge", "Load average of the machine over the last minute.", "load_average"),
    _node(
        "worker_memory_bytes",
        "gauge",
        "Resident memory of workers; memory that they share counts for each.",
        lambda node: sum(worker["memory_bytes"] for worker in _workers(node)),
    ),
    _node("memory_bytes", "gauge", "Memory of the machine.", "memory_total_bytes"),
    _node("available_memory_bytes", "gauge", "Memory of the machine that is available.", "memory_available_bytes"),
    _client(
        "workers",
        "Workers of a training process on all nodes.",
        lambda clients: sum(client["num_workers"] for client in clients),
    ),
    _client(
        "more_workers",
        "Workers that would end the waiting, beside those that it has; 0 if more would not.",
        lambda clients: sum(map(more_workers, clients)),
    ),
    _loop(
        "wait_ratio",
        "Share of its time that a training loop waits for batches, from 0 to 1.",
        (),
        lambda loop: [((), loop["wait_share"])],
    ),
    _loop("bound", "1 for what a training loop waits for.", ("bound",), lambda loop: [((loop["bound"],), 1)]),
    _loop(
        "delivered_batches_per_second",
        "Batches that a training loop gets.",
        (),
        lambda loop: [((), loop["delivered_per_second"])],
    ),
    _loop(
        "demand_batches_per_second",
        "Batches that a training loop would take if it never waited.",
        (),
        lambda loop: [] if loop["demand_per_second"] is None else [((), loop["demand_per_second"])],
    ),
    _loop(
        "stage_seconds",
        "Mean time that a batch spends in a stage.",
        ("stage",),
        lambda loop: [((stage["name"],), stage["value"]) for stage in loop["stages"]],
    ),
    Metric(
        "rpcdataloader_wanted_workers",
        "gauge",
        "Workers that all clients would like to have: those that they have, and more.",
        (),
        lambda document: [((), sum(client["num_workers"] + more_workers(client) for client in document["clients"]))],
    ),
    Metric(
        "rpcdataloader_exporter_failures_total",
        "counter",
        "Looks at all node servers that have failed in the exporter.",
        (),
        lambda document: [((), document["num_failures"])],
    ),
]
