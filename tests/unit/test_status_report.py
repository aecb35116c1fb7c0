"""Looks as text, as data and as metrics."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess

import pytest

from rpcdataloader.status.__main__ import Nodes
from rpcdataloader.status.report import METRICS, STATES, NodeAnswer, as_metrics, as_text, in_time, make_document
from tests.unit.wire.test_status import CLIENT, LOOP, NODE, WORKER

READY = NodeAnswer("node01:6543", NODE, version="0.1.0")
GONE = NodeAnswer("node03:6543", error="cannot connect to node03:6543: connection refused")


def look(*answers, before=None):
    return make_document(1000.0, answers, {}, before or {})


def compare(now, before=None):
    """The node of the document, of two looks or one."""
    return look(NodeAnswer("a:1", now), before=before and {"a:1": compare(before)})["nodes"][0]


def with_worker(node=NODE, client=None, **worker):
    client = dataclasses.replace(CLIENT, **(client or {}), workers=[dataclasses.replace(WORKER, **worker)])
    return dataclasses.replace(node, clients=[client])


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


class Fake(Nodes):
    def ask(self, addresses, *, stacks):  # noqa: ARG002
        return [NodeAnswer("a:1", self.status)]


def test_rates_after_a_look_without_answer_are_over_the_time_since_the_last_answer():
    nodes = Fake(["a:1"], None, 1.0)
    for nodes.status in NODE, None, dataclasses.replace(NODE, uptime_seconds=104.0, tasks=NODE.tasks + 8):
        (node,) = nodes.look()["nodes"]
    assert (node["interval_seconds"], node["tasks_per_second"]) == (4, 2)


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
    found = [(client["pid"], client["rank"], client["num_workers"]) for client in clients]
    assert found == [(9, 3, 1), (2304, 3, 2), (8, 1, 1)]
    assert [loop["wait_share"] for client in clients for loop in client["loops"]] == [0.9, 0.5]
    assert clients[1]["errors"] == 6
    assert clients[1]["tasks_per_second"] == 2 * 7 / 11


def test_text_says_what_loops_wait_for():
    document = look(NodeAnswer("a:1", with_clients(WAITING)), NodeAnswer("a:2", with_clients(WAITING)))
    line = "client gpu01:2304 rank 3: The loop waits 31 % of its time for workers."
    assert as_text(document, "now").count(line) == 1
    assert as_text(document, "now").splitlines()[5].startswith(line)


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


# --- metrics


IDLE = dataclasses.replace(CLIENT, pid=5, host="gpu02")
STOPPED = dataclasses.replace(WORKER, number=2, process_state="T")


def look_at(*clients):
    return look(NodeAnswer("node01:6543", with_clients(*clients)), NodeAnswer("node02:6543", error="refused"))


def metrics_of(document, num_failures=0):
    """The value of each series."""
    lines = [line for line in as_metrics(document, num_failures).splitlines() if not line.startswith("#")]
    found = dict(line.rsplit(" ", 1) for line in lines)
    assert len(found) == len(lines), "a series comes twice"
    return {name.removeprefix("rpcdataloader_"): float(value) for name, value in found.items()}


def test_node_servers():
    found = metrics_of(look_at(dataclasses.replace(WAITING, workers=[WORKER, STOPPED]), IDLE))
    assert found['batches_total{node="node01:6543"}'] == NODE.tasks
    assert found['sent_bytes_total{node="node01:6543"}'] == NODE.sent_bytes
    assert found['clients{node="node01:6543"}'] == 2
    numbers = [found[f'workers{{node="node01:6543",state="{state}"}}'] for state in ("running", "stopped", "idle")]
    assert numbers == [2, 1, 0]
    states = {state: found[f'node_state{{node="node02:6543",state="{state}"}}'] for state in STATES}
    assert states == {"ready": 0, "unreachable": 1, "refused": 0}
    assert 'batches_total{node="node02:6543"}' not in found


def test_clients():
    found = metrics_of(look_at(WAITING, IDLE), num_failures=3)
    labels = 'client="gpu01",rank="3"'
    assert found[f"client_wait_ratio{{{labels}}}"] == 0.31
    assert found[f'client_bound{{{labels},bound="workers"}}'] == 1
    assert found[f"client_demand_batches_per_second{{{labels}}}"] == 120
    assert found[f"client_workers{{{labels}}}"] == 1
    assert found["workers_wanted"] == 20 + 1
    assert found["exporter_failures_total"] == 3
    assert 'client_wait_ratio{client="gpu02",rank=""}' not in found


def test_demand_without_limit_and_workers_that_would_not_help_are_left_out():
    loop = dataclasses.replace(LOOP, demand_per_second=None, more_workers=None, wanted_workers=0)
    found = metrics_of(look_at(dataclasses.replace(WAITING, loops=[loop])))
    assert not [name for name in found if name.startswith("client_demand")]
    assert found["workers_wanted"] == 0


def test_process_ids_are_no_labels():
    again = dataclasses.replace(WAITING, pid=9999, loops=[dataclasses.replace(LOOP, wait_share=0.9)])
    found = metrics_of(look_at(WAITING, again))
    assert found.keys() == metrics_of(look_at(WAITING)).keys()
    # One that waits most stands for them, and their workers are added up.
    assert found['client_wait_ratio{client="gpu01",rank="3"}'] == 0.9
    assert found['client_workers{client="gpu01",rank="3"}'] == 2


def test_what_a_client_makes_up_is_one_series_and_one_line():
    evil = 'a"} 1\nrpcdataloader_workers_wanted 99 \\'
    client = dataclasses.replace(WAITING, host=evil)
    twin = dataclasses.replace(client, host=evil.replace("\n", "\t"))
    found = metrics_of(look_at(client, twin))
    assert found["workers_wanted"] == 40
    name = r"a\"} 1\\nrpcdataloader_workers_wanted 99 \\"
    assert found[f'client_bound{{client="{name}",rank="3",bound="workers"}}'] == 1


def test_every_metric_is_named_and_explained_and_told():
    text = as_metrics(look_at(WAITING), 0)
    for name, (meaning, _key) in METRICS.items():
        assert re.fullmatch("rpcdataloader_[a-z_]+", name)
        assert meaning.endswith(".")
        kind = "counter" if name.endswith("_total") else "gauge"
        assert f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n{name}" in text
    assert set(re.findall(r"[{,](\w+)=", text)) == {"node", "client", "rank", "state", "bound"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_finds_nothing_wrong():
    for document in look_at(WAITING, IDLE), make_document(1000.0, [], {}, {}):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=as_metrics(document, 0), capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
