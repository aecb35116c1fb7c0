"""A status document as text: columns for a terminal of 100 characters. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rpcdataloader.diagnosis.words import in_bytes, in_digits
from rpcdataloader.status.report import Tree
from rpcdataloader.wire.messages import printable


def as_text(document: Tree, when: str, *, nowhere: Sequence[str] = (), workers: bool = False) -> str:
    """Return a line of totals, and one per node server, per training loop, and per client with errors.

    Args:
        when: Time of the look, in words.
        nowhere: Places of node servers, if no node server is found and no other one is named.
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
