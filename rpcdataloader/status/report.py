"""The result of a look at node servers: the JSON document of ``docs/status-reference.md``, as text, as metrics. Pure.

Rates are differences to the previous answer. Text has columns for a terminal of 100 characters. Metrics are in the text
format of Prometheus, version 0.0.4. Their labels name node servers, and clients by host and rank only: with process
ids, each restart would add series that Prometheus keeps for weeks. Clients with the same labels count as one.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcdataloader.diagnosis.words import in_bytes, in_digits
from rpcdataloader.wire.messages import printable
from rpcdataloader.wire.status import NodeStatus, count_wanted

#: Version of the document; it changes when a key is renamed or removed.
SCHEMA = 1

#: States of a node server.
STATES = ("ready", "unreachable", "refused")

# A JSON object.
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NodeAnswer:
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


def make_document(
    time: float,
    answers: Sequence[NodeAnswer],
    ignored: dict[str, str],
    before: Mapping[str, Tree],
    *,
    is_complete: bool = True,
) -> Tree:
    """Return the document of one look.

    Args:
        time: Seconds since 1970.
        ignored: Unused files of registers, with the reason.
        before: Nodes of earlier documents, each at its last answer, by address.
        is_complete: False if a directory or name has no node server.
    """
    states = {answer.state for answer in answers}
    nodes = [_describe(answer, before.get(answer.address, {})) for answer in answers]
    return {
        "schema": SCHEMA,
        "time_unix_seconds": time,
        "exit_status": 2 if "refused" in states else 0 if states == {"ready"} and is_complete else 1,
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


def _describe(answer: NodeAnswer, before: Tree) -> Tree:
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


def as_text(document: Tree, when: str, *, nowhere: Sequence[str] = (), workers: bool = False) -> str:
    """Return a line of totals, and one per node server, per training loop, and per client with errors.

    Args:
        when: Time of the look, in words.
        nowhere: Directories and names that have no node server.
        workers: True for a block per node server, with a line for each client and worker.
    """
    nodes = document["nodes"]
    answered = [node for node in nodes if "pid" in node]
    interval = max((node["interval_seconds"] or 0.0 for node in nodes), default=0.0)
    lines = [f"{when}, rates: {f'over the last {in_time(interval)}' if interval else 'averages since each began'}"]
    if nodes:
        num_ready = sum(node["state"] == "ready" for node in nodes)
        lines.append(f"{'node':<26} {'state':<8} {_line(_NODE_COLUMNS)}")
        lines.append(f"{f'all: {num_ready} of {len(nodes)} ready':<35} {_line(_NODE_COLUMNS, answered)}")
    # Problems come first, as a terminal may be too small for all lines.
    for node in sorted(nodes, key=lambda node: node["state"] == "ready"):
        if "pid" in node:
            name = _cut(node["address"], 26, keep=8)
            lines.append(f"{name:<26} {node['state']:<8} {_line(_NODE_COLUMNS, [node])}")
        else:
            lines.append(f"{printable(node['address'])}  {node['state']}: {printable(node['error'])}")
    lines += [f"{printable(name)}: no node server found" for name in nowhere]
    lines += [f"ignored {printable(file['path'])}: {printable(file['reason'])}" for file in document["ignored_files"]]
    for client in document["clients"]:
        for loop in client["loops"]:
            lines.append(f"{_name(client)}: {printable(loop['text'])}")
        if client["num_workers"] and not client["loops"]:
            lines.append(f"{_name(client)}: no loop is under way, or none has been reported")
    lines += _describe_errors([client for node in answered for client in node["clients"]])
    if workers:
        for node in answered:
            lines += ["", *_describe_node(node)]
    return "\n".join(lines) + "\n"


def _describe_errors(clients: list[Tree]) -> list[str]:
    lines = []
    failed = [client for client in clients if client["last_error"] is not None]
    for name in dict.fromkeys(map(_name, failed)):
        same = [client for client in failed if _name(client) == name]
        last = min(same, key=lambda client: client["last_error_seconds"])
        when, text = in_time(last["last_error_seconds"]), printable(last["last_error"])
        lines.append(f"{name}: {_count(_total(same, 'errors'), 'error')}, the last one {when} ago: {text}")
    return lines


def _describe_node(node: Tree) -> list[str]:
    here = _clients_at_work([node])
    most = "" if node["max_connections"] is None else f" of at most {node['max_connections']}"
    lines = [
        f"{_cut(node['address'], 48)}  {node['state']}, up {in_time(node['uptime_seconds'])}, pid {node['pid']}, "
        f"version {printable(node['version'])}",
        f"  {_count(len(here), 'client')}, {_count(len(_workers([node])), 'worker')}{most}, "
        f"{node['num_workers']:,} offered, {node['ended_workers']:,} ended, {node['refused_connections']:,} refused",
        f"  {_describe_work(node)}",
    ]
    for client in here:
        lines += [
            f"  {_name(client)}",
            f"    session {client['session_pid']} {_cut(client['state'], 24)} {in_time(client['state_seconds'])}, "
            f"here {in_time(client['age_seconds'])}",
            f"    {_describe_work(client)}",
        ]
        if client["workers"]:
            lines.append(f"    {_line(_WORKER_COLUMNS)}")
        for worker in client["workers"]:
            lines.append(f"    {_line(_WORKER_COLUMNS, worker)}")
            if worker["stack"] is not None:
                lines.append(textwrap.indent(printable(worker["stack"], keep="\n"), " " * 8))
    if others := len(node["clients"]) - len(here):
        lines.append(f"  {_count(others, 'more client')} with a session but no workers here")
    return lines


def _describe_work(of: Tree) -> str:
    return (
        f"{_count(of['tasks'], 'batch', 'batches')} ({in_digits(of['tasks_per_second'])}/s), "
        f"{_count(of['calls'], 'call')}, {_count(of['errors'], 'error')}, "
        f"{in_bytes(of['sent_bytes'])} sent ({in_bytes(of['sent_bytes_per_second'])}/s)"
    )


def _name(client: Tree) -> str:
    rank = "" if client["rank"] is None else f" rank {client['rank']}"
    job = f" job {_cut(client['job'], 16)}" if client["job"] else ""
    return f"client {_cut(client['host'], 40)}:{client['pid']}{rank}{job}"


def _clients_at_work(nodes: list[Tree]) -> list[Tree]:
    """Clients with work on the node: a rank has a session on every node, but workers only on those of its share."""
    clients = [client for node in nodes for client in node["clients"]]
    return [client for client in clients if client["workers"] or client["state"] != "idle"]


def _workers(nodes: list[Tree]) -> list[Tree]:
    return [worker for node in nodes for client in node["clients"] for worker in client["workers"]]


def _total(parts: list[Tree], key: str) -> Any:
    return sum(part[key] for part in parts)


def _of_machines(nodes: list[Tree], key: str) -> Any:
    """Sum over the machines; several node servers of one tell the same."""
    return sum({node["host"]: node[key] for node in sorted(nodes, key=lambda node: node[key])}.values())


def _memory_percent(nodes: list[Tree]) -> str:
    memory, available = (_of_machines(nodes, f"memory_{name}_bytes") for name in ("total", "available"))
    return f"{100 * (memory - available) / max(1, memory):.0f}"


def _state(worker: Tree) -> str:
    # Only the kernel's important states: D is a thread that waits for a disk or a file server.
    kernel = {"T": ", stopped", "t": ", traced", "D": ", blocked", "Z": ", gone", "": ", gone"}
    # The first unit is precise enough here.
    since = " ".join(in_time(worker["state_seconds"]).split()[:2])
    state = "draining" if worker["draining"] else worker["state"]
    return _cut(f"{state} {since}{kernel.get(worker['process_state'], '')}", 24)


# Format, title and value of each column: for several nodes together, and for a worker.
_NODE_COLUMNS: list[tuple[str, str, Callable[[list[Tree]], Any]]] = [
    (">7", "clients", lambda nodes: len({(client["host"], client["pid"]) for client in _clients_at_work(nodes)})),
    (">7", "workers", lambda nodes: len(_workers(nodes))),
    (">6", "CPU", lambda nodes: in_digits(_total(nodes, "cpu_percent") / 100)),
    (">6", "load", lambda nodes: in_digits(_of_machines(nodes, "load_average"))),
    (">5", "CPUs", lambda nodes: _of_machines(nodes, "cpus")),
    (">5", "mem %", _memory_percent),
    (">7", "batch/s", lambda nodes: in_digits(_total(nodes, "tasks_per_second"))),
    (">7", "MB/s", lambda nodes: in_digits(_total(nodes, "sent_bytes_per_second") / 1e6)),
    (">6", "errors", lambda nodes: _total(nodes, "errors")),
]
_WORKER_COLUMNS: list[tuple[str, str, Callable[[Tree], Any]]] = [
    (">6", "worker", lambda worker: worker["number"]),
    (">8", "pid", lambda worker: worker["pid"]),
    ("<25", " state", lambda worker: f" {_state(worker)}"),
    (">5", "queue", lambda worker: worker["queued"]),
    (">11", "batches", lambda worker: f"{worker['tasks']:,}"),
    (">6", "/s", lambda worker: in_digits(worker["tasks_per_second"])),
    (">6", "MB/s", lambda worker: in_digits(worker["sent_bytes_per_second"] / 1e6)),
    (">5", "CPU %", lambda worker: f"{worker['cpu_percent']:.0f}"),
    (">8", "memory", lambda worker: in_bytes(worker["memory_bytes"])),
    (">6", "errors", lambda worker: worker["errors"]),
]


def _line(columns: Sequence[tuple[str, str, Any]], of: Any = None) -> str:
    """The cells of some nodes or of a worker; the titles by default."""
    return " ".join(format(title if of is None else value(of), width) for width, title, value in columns)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _cut(text: str, num_chars: int, keep: int = 0) -> str:
    """Shorten to ``num_chars``; the last ``keep`` are those of the end."""
    text = printable(text)
    if len(text) <= num_chars:
        return text
    return text[: num_chars - 3 - keep] + "..." + text[len(text) - keep :]


def in_time(seconds: float) -> str:
    """``0.2 s``, ``12 s``, ``3 min 5 s``, ``2 h 7 min``, ``3 d 4 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, part, smaller in (86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


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
