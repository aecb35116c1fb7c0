"""Looks as text and as data."""

from __future__ import annotations

import dataclasses

import pytest

from rpcdataloader.status.report import NodeAnswer, as_text, in_time, make_document
from tests.unit.wire.test_status import CLIENT, LOOP, NODE, WORKER

READY = NodeAnswer("node01:6543", NODE, version="0.1.0")
GONE = NodeAnswer("node03:6543", error="cannot connect to node03:6543: connection refused")
REFUSED = NodeAnswer("node04:6543", error="not the same secret", is_refused=True)


def look(*answers, before=None, ignored=None):
    return make_document(1000.0, answers, ignored or {}, before)


def compare(now, before=None):
    """The node of the document, of two looks or one."""
    then = None if before is None else look(NodeAnswer("a:1", before))
    return look(NodeAnswer("a:1", now), before=then)["nodes"][0]


def with_worker(node=NODE, client=None, **worker):
    client = dataclasses.replace(CLIENT, **(client or {}), workers=[dataclasses.replace(WORKER, **worker)])
    return dataclasses.replace(node, clients=[client])


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([READY], 0),
        ([], 1),
        ([READY, GONE], 1),
        ([READY, REFUSED], 2),
        ([GONE, REFUSED], 2),
    ],
)
def test_exit_status(answers, status):
    assert look(*answers)["exit_status"] == status


# --- rates


def test_rates_of_two_looks_are_over_what_is_between_them():
    now = with_worker(
        dataclasses.replace(NODE, uptime_seconds=102.0, tasks=18),
        client={"tasks": 17, "age_seconds": 13.0},
        tasks=11,
        sent_bytes=1020,
        received_bytes=14,
        age_seconds=12,
        cpu_seconds=5.0,
    )
    node = compare(now, NODE)
    (client,) = node["clients"]
    (worker,) = client["workers"]
    assert node["interval_seconds"] == 2
    assert node["tasks_per_second"] == client["tasks_per_second"] == 5
    assert [worker[f"{name}_per_second"] for name in ("tasks", "sent_bytes", "received_bytes")] == [3, 500, 2]
    assert worker["cpu_percent"] == 50


@pytest.mark.parametrize("changed", [{"pid": 101}, {"host": "node02"}, {"uptime_seconds": 99.0}])
def test_node_server_that_was_restarted_is_compared_to_nothing(changed):
    now = dataclasses.replace(NODE, tasks=2, **{"uptime_seconds": 200.0, **changed})
    node = compare(now, NODE)
    assert node["interval_seconds"] is None
    assert node["tasks_per_second"] == 2 / now.uptime_seconds
    assert node["clients"][0]["tasks_per_second"] == 7 / 11


# --- text


def details(*answers):
    return as_text(look(*answers), "now", workers=True)


def test_text():
    busy = dataclasses.replace(NODE, host="node02", load_average=2.5)
    assert as_text(look(READY, NodeAnswer("node02:6543", busy), GONE), "2026-11-21 12:00:00") == (
        """2026-11-21 12:00:00, rates: averages since each began
node                       state    clients workers    CPU   load  CPUs mem % batch/s    MB/s errors
all: 2 of 3 ready                         1       2    0.8      4     4    25    0.16       0      4
node03:6543  unreachable: cannot connect to node03:6543: connection refused
node01:6543                ready          1       1    0.4    1.5     2    25    0.08       0      2
node02:6543                ready          1       1    0.4    2.5     2    25    0.08       0      2
client gpu01:2304: no loop is under way, or none has been reported
client gpu01:2304: 4 errors, the last one 3.0 s ago: LookupError: a damaged file
"""
    )


def test_text_with_workers():
    text = details(READY, GONE)
    assert text.split("\n\n")[1] == (
        """node01:6543  ready, up 1 min 40 s, pid 100, version 0.1.0
  1 client, 1 worker, 2 offered, 3 ended, 4 refused
  8 batches (0.08/s), 1 call, 2 errors, 20 B sent (0.2 B/s)
  client gpu01:2304
    session 200 idle 1.0 s, here 11 s
    7 batches (0.636/s), 1 call, 2 errors, 20 B sent (1.82 B/s)
    worker      pid  state                    queue     batches     /s   MB/s CPU %   memory errors
         1      300  running 0.5 s                1           5    0.5      0    40  1.05 MB      0
"""
    )


WAITING = dataclasses.replace(CLIENT, loops=[LOOP], loops_seconds=2.0)


def with_clients(*clients):
    return dataclasses.replace(NODE, clients=list(clients))


def test_client_on_several_nodes_is_told_once():
    late = dataclasses.replace(LOOP, wait_share=0.5)
    waiting = dataclasses.replace(WAITING, loops=[late], loops_seconds=1.0, workers=[], tasks=0)
    other = dataclasses.replace(WAITING, pid=9, loops=[dataclasses.replace(LOOP, wait_share=0.9)])
    silent = dataclasses.replace(CLIENT, pid=8, rank=1)
    nodes = with_clients(WAITING, silent), with_clients(waiting, other), with_clients(CLIENT)
    clients = look(*(NodeAnswer(f"a:{port}", node) for port, node in enumerate(nodes)))["clients"]
    assert [(client["pid"], client["rank"], client["num_workers"]) for client in clients] == [
        (9, 3, 1),
        (2304, 3, 2),
        (8, 1, 1),
    ]
    assert [loop["wait_share"] for client in clients for loop in client["loops"]] == [0.9, 0.5]
    assert clients[1]["errors"] == 6
    assert clients[1]["tasks_per_second"] == 2 * 7 / 11


def test_text_says_what_loops_wait_for():
    document = look(NodeAnswer("a:1", with_clients(WAITING)), NodeAnswer("a:2", with_clients(WAITING)))
    line = "client gpu01:2304 rank 3: The loop waits 31 % of its time for workers."
    assert as_text(document, "now").count(line) == 1
    assert as_text(document, "now").splitlines()[5].startswith(line)


def test_text_names_empty_registers_and_files_that_were_ignored():
    text = as_text(look(ignored={"/pool/a.json": "its server is silent"}), "now", nowhere=["@/pool"])
    assert "@/pool: no node server found\n" in text
    assert "ignored /pool/a.json: its server is silent\n" in text


@pytest.mark.parametrize(
    ("worker", "shown"),
    [
        ({"draining": True}, "draining 0.5 s "),
        ({"process_state": "T"}, "running 0.5 s, stopped "),
        ({"process_state": "D"}, "running 0.5 s, blocked "),
        ({"process_state": ""}, "running 0.5 s, gone "),
        ({"state": "idle", "state_seconds": 7300.0}, "idle 2 h "),
    ],
)
def test_state_of_a_worker(worker, shown):
    assert f"  {shown}" in details(NodeAnswer("a:1", with_worker(**worker)))


def test_names_cannot_do_anything_to_a_terminal():
    evil = "\x1b[2J\r\u202e"
    client = {"host": evil, "job": evil, "state": evil}
    text = details(NodeAnswer("a:1", with_worker(client={**client, "last_error": evil}, stack=f"{evil}\nnext")))
    assert not set(evil) & set(text) - set("[2J")
    assert "\\x1b[2J\\r\\u202e\n        next" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"),
        (3600, "1 h 0 min"), (86399, "23 h 59 min"), (86400, "1 d 0 h"), (10**9, "11,574 d 1 h"),
    ],
)  # fmt: skip
def test_time(seconds, text):
    assert in_time(seconds) == text
