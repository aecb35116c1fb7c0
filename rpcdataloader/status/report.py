"""The result of a look at node servers, as the JSON document of ``docs/status.md``. Pure.

Rates are differences to the document of the previous look.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rpcdataloader.wire.status import NodeStatus

#: Version of the document; it changes when a key is renamed or removed.
SCHEMA = 1

#: States of a node server.
STATES = ("ready", "draining", "unreachable", "refused")

# A JSON object.
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one node server.

    Attributes:
        status: Status that it sent; None without an answer.
        error: Reason for a missing answer; empty otherwise.
        is_refused: True if waiting does not help: another secret, certificate or version.
    """

    address: str
    status: NodeStatus | None = None
    error: str = ""
    is_refused: bool = False

    @property
    def state(self) -> str:
        """One of :data:`STATES`."""
        if self.status is None:
            return "refused" if self.is_refused else "unreachable"
        return "draining" if self.status.draining else "ready"


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
    node |= dataclasses.asdict(answer.status)
    interval = node["uptime_seconds"] - before.get("uptime_seconds", node["uptime_seconds"])
    if interval <= 0 or _identify(node) != _identify(before):  # first look, or the server was restarted
        before = {}
    node["interval_seconds"] = interval if before else None
    _add_rates(node, before, interval)
    return node


def _add_rates(now: Tree, before: Tree, interval: float) -> None:
    """Add the rates of a node, client or worker, and of everything below it.

    Args:
        before: The same of the previous look. Newer processes and connections have averages since they began.
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
