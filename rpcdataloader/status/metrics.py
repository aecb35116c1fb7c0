"""A status document as metrics in the text format of Prometheus, version 0.0.4. Pure.

Labels name node servers, and clients by host and rank only: with process ids, each restart would add series that
Prometheus keeps for weeks. Clients with the same labels count as one.
"""

from __future__ import annotations

from collections.abc import Iterator

from rpcdataloader.status.report import STATES, Tree
from rpcdataloader.wire.lines import printable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Meaning of each metric. Names that end with ``_total`` are counters, the others gauges.
METRICS = {
    "rpcdataloader_node_state": "1 for the state of a node server, 0 for others.",
    "rpcdataloader_uptime_seconds": "Time since a node server began to listen.",
    "rpcdataloader_batches_total": "Batches that workers have loaded.",
    "rpcdataloader_calls_total": "Other requests that workers have answered.",
    "rpcdataloader_errors_total": "Requests that workers have answered with an exception.",
    "rpcdataloader_sent_bytes_total": "Bytes that workers have sent.",
    "rpcdataloader_received_bytes_total": "Bytes that workers have received.",
    "rpcdataloader_ended_workers_total": "Workers that have ended, for any reason.",
    "rpcdataloader_refused_connections_total": "Connections that were refused.",
    "rpcdataloader_clients": "Training processes that have a session.",
    "rpcdataloader_workers": "Workers of all clients, by state.",
    "rpcdataloader_offered_workers": "Workers that a node server offers.",
    "rpcdataloader_queued_requests": "Requests in the queues of workers.",
    "rpcdataloader_used_cpus": "CPUs that workers use.",
    "rpcdataloader_cpus": "CPUs that a node server may use.",
    "rpcdataloader_load_average": "Load average of the machine over the last minute.",
    "rpcdataloader_worker_memory_bytes": "Resident memory of workers; shared memory counts once per worker.",
    "rpcdataloader_memory_bytes": "Memory of the machine.",
    "rpcdataloader_available_memory_bytes": "Available memory of the machine.",
    "rpcdataloader_client_workers": "Workers of a client.",
    "rpcdataloader_client_more_workers": "Further workers that would end the waiting, or 0.",
    "rpcdataloader_client_wait_ratio": "Share of its time that a loop waits, from 0 to 1.",
    "rpcdataloader_client_bound": "1 for what a loop waits for.",
    "rpcdataloader_client_delivered_batches_per_second": "Batches of a loop.",
    "rpcdataloader_client_demand_batches_per_second": "Batches that a loop would take if it never waited.",
    "rpcdataloader_client_stage_seconds": "Mean time that a batch spends in a stage.",
    "rpcdataloader_wanted_workers": "Workers that clients have, and more that they want.",
    "rpcdataloader_exporter_failures_total": "Failed attempts of the exporter to query the node servers.",
}

# Metrics with the plain values of a node.
_OF_NODE = {
    "uptime_seconds": "uptime_seconds",
    "batches_total": "tasks",
    "calls_total": "calls",
    "errors_total": "errors",
    "sent_bytes_total": "sent_bytes",
    "received_bytes_total": "received_bytes",
    "ended_workers_total": "ended_workers",
    "refused_connections_total": "refused_connections",
    "offered_workers": "num_workers",
    "cpus": "cpus",
    "load_average": "load_average",
    "memory_bytes": "memory_total_bytes",
    "available_memory_bytes": "memory_available_bytes",
}

_KERNEL_STATES = {"T": "stopped", "t": "stopped", "D": "blocked", "Z": "gone", "": "gone"}
_WORKER_STATES = ("idle", "running", "draining", "stopped", "blocked", "gone")

# Name without the common prefix, labels, and value.
_Sample = tuple[str, dict[str, str], float]


def as_metrics(document: Tree, num_failures: int) -> str:
    """Return all metrics of a document.

    Args:
        num_failures: Number of failed looks.
    """
    series: dict[str, dict[str, float]] = {name: {} for name in METRICS}
    samples = [*_of_nodes(document), *_of_clients(document), ("exporter_failures_total", {}, num_failures)]
    for name, labels, value in samples:
        pairs = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        # Prometheus refuses all metrics if one comes twice, as a client's made-up values might.
        series[f"rpcdataloader_{name}"].setdefault(f"{{{pairs}}}" if pairs else "", value)
    lines = []
    for name, values in series.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {METRICS[name]}", f"# TYPE {name} {kind}"]
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
        for name, key in _OF_NODE.items():
            yield name, labels, node[key]
        workers = [worker for client in node["clients"] for worker in client["workers"]]
        states = [
            _KERNEL_STATES.get(worker["process_state"], "draining" if worker["draining"] else worker["state"])
            for worker in workers
        ]
        for state in _WORKER_STATES:
            yield "workers", {**labels, "state": state}, states.count(state)
        yield "clients", labels, len(node["clients"])
        yield "used_cpus", labels, node["cpu_percent"] / 100
        yield "queued_requests", labels, sum(worker["queued"] for worker in workers)
        yield "worker_memory_bytes", labels, sum(worker["memory_bytes"] for worker in workers)


def _of_clients(document: Tree) -> Iterator[_Sample]:
    groups: dict[tuple[str, str], list[Tree]] = {}
    for client in document["clients"]:
        rank = "" if client["rank"] is None else str(client["rank"])
        groups.setdefault((client["host"], rank), []).append(client)
    wanted = 0
    for (host, rank), clients in groups.items():
        labels = {"client": host, "rank": rank}
        present = sum(client["num_workers"] for client in clients)
        # For each client, its loop that waits most; for all clients with the same labels, the one that waits most.
        more = sum(loop["more_workers"] or 0 for client in clients for loop in client["loops"][:1])
        wanted += present + more
        yield "client_workers", labels, present
        yield "client_more_workers", labels, more
        for loop in clients[0]["loops"][:1]:
            yield "client_wait_ratio", labels, loop["wait_share"]
            yield "client_bound", {**labels, "bound": loop["bound"]}, 1
            yield "client_delivered_batches_per_second", labels, loop["delivered_per_second"]
            if loop["demand_per_second"] is not None:
                yield "client_demand_batches_per_second", labels, loop["demand_per_second"]
            for stage in loop["stages"]:
                yield "client_stage_seconds", {**labels, "stage": stage["name"]}, stage["value"]
    yield "wanted_workers", {}, wanted
