"""Looks as metrics."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess

import pytest

from rpcdataloader.status.report import METRICS, STATES, NodeAnswer, as_metrics, make_document
from tests.unit.wire.test_status import CLIENT, LOOP, NODE, WORKER

WAITING = dataclasses.replace(CLIENT, loops=[LOOP], loops_seconds=2.0)
IDLE = dataclasses.replace(CLIENT, pid=5, host="gpu02")
STOPPED = dataclasses.replace(WORKER, number=2, process_state="T")


def look(*clients, **node):
    found = dataclasses.replace(NODE, clients=list(clients), **node)
    gone = NodeAnswer("node02:6543", error="connection refused")
    return make_document(1000.0, [NodeAnswer("node01:6543", found), gone], {})


def metrics_of(document, num_failures=0):
    """The value of each series."""
    lines = [line for line in as_metrics(document, num_failures).splitlines() if not line.startswith("#")]
    found = dict(line.rsplit(" ", 1) for line in lines)
    assert len(found) == len(lines), "a series comes twice"
    return {name.removeprefix("rpcdataloader_"): float(value) for name, value in found.items()}


def test_node_servers():
    found = metrics_of(look(dataclasses.replace(WAITING, workers=[WORKER, STOPPED]), IDLE))
    assert found['batches_total{node="node01:6543"}'] == NODE.tasks
    assert found['sent_bytes_total{node="node01:6543"}'] == NODE.sent_bytes
    assert found['clients{node="node01:6543"}'] == 2
    assert [found[f'workers{{node="node01:6543",state="{state}"}}'] for state in ("running", "stopped", "idle")] == [
        2,
        1,
        0,
    ]
    states = {state: found[f'node_state{{node="node02:6543",state="{state}"}}'] for state in STATES}
    assert states == {"ready": 0, "unreachable": 1, "refused": 0}
    assert 'batches_total{node="node02:6543"}' not in found


def test_clients():
    found = metrics_of(look(WAITING, IDLE), num_failures=3)
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
    found = metrics_of(look(dataclasses.replace(WAITING, loops=[loop])))
    assert not [name for name in found if name.startswith("client_demand")]
    assert found["workers_wanted"] == 0


def test_process_ids_are_no_labels():
    again = dataclasses.replace(WAITING, pid=9999, loops=[dataclasses.replace(LOOP, wait_share=0.9)])
    found = metrics_of(look(WAITING, again))
    assert found.keys() == metrics_of(look(WAITING)).keys()
    # One that waits most stands for them, and their workers are added up.
    assert found['client_wait_ratio{client="gpu01",rank="3"}'] == 0.9
    assert found['client_workers{client="gpu01",rank="3"}'] == 2


def test_what_a_client_makes_up_is_one_series_and_one_line():
    evil = 'a"} 1\nrpcdataloader_workers_wanted 99 \\'
    client = dataclasses.replace(WAITING, host=evil)
    twin = dataclasses.replace(client, host=evil.replace("\n", "\t"))
    found = metrics_of(look(client, twin))
    assert found["workers_wanted"] == 40
    name = r"a\"} 1\\nrpcdataloader_workers_wanted 99 \\"
    assert found[f'client_bound{{client="{name}",rank="3",bound="workers"}}'] == 1


def test_every_metric_is_named_and_explained_and_told():
    text = as_metrics(look(WAITING), 0)
    for name, (meaning, _key) in METRICS.items():
        assert re.fullmatch("rpcdataloader_[a-z_]+", name)
        assert meaning.endswith(".")
        kind = "counter" if name.endswith("_total") else "gauge"
        assert f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n{name}" in text
    assert set(re.findall(r"[{,](\w+)=", text)) == {"node", "client", "rank", "state", "bound"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_finds_nothing_wrong():
    for document in look(WAITING, IDLE), make_document(1000.0, [], {}):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=as_metrics(document, 0), capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
