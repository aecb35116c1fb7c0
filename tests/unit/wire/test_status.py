"""What a node server tells of itself, as bytes and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.wire import status

COUNTS: dict[str, Any] = {"calls": 1, "received_bytes": 10, "sent_bytes": 20}
WORKER = status.WorkerStatus(
    **COUNTS, tasks=5, errors=0, number=1, pid=300, state="running", state_seconds=0.5, draining=False,
    process_state="R", age_seconds=10, queued=1, cpu_seconds=4.0, memory_bytes=2**20,
)  # fmt: skip
LOOP = status.LoopStatus(
    dataset="Images", rank=3, wait_share=0.31, bound="workers", text="The loop waits 31 % of its time for workers.",
    demand_per_second=120.0, delivered_per_second=83.0, more_workers=6, wanted_workers=20,
    numbers={"demand_rate": 120.0, "batch_bytes": 1.5e6, "fetch_seconds": 0.02},
)  # fmt: skip
CLIENT = status.ClientStatus(
    **COUNTS, tasks=7, errors=2, host="gpu01", pid=2304, rank=None, job="", session_pid=200,
    state="idle", state_seconds=1.0, age_seconds=11.0, workers=[WORKER],
    last_error="LookupError: a damaged file", last_error_seconds=3.0,
)  # fmt: skip
NODE = status.NodeStatus(
    **COUNTS, tasks=8, errors=2, host="node01", pid=100, uptime_seconds=100.0, num_workers=2, max_connections=None,
    cpus=2, load_average=1.5, memory_total_bytes=2**30, memory_available_bytes=3 * 2**28,
    ended_workers=3, refused_connections=4, clients=[CLIENT],
)  # fmt: skip


def test_status_arrives_as_it_was_sent():
    assert status.NodeStatus.decode(NODE.encode()) == NODE
    asleep = dataclasses.replace(WORKER, stack="Main thread:\n")
    node = dataclasses.replace(NODE, clients=[dataclasses.replace(CLIENT, rank=3, workers=[asleep])])
    assert status.NodeStatus.decode(node.encode()) == node
    # What a later version tells besides is left alone.
    assert status.StatusRequest.decode(b'{"stacks": true, "more": 1}') == status.StatusRequest(stacks=True)


def test_report_arrives_as_it_was_sent():
    quiet = dataclasses.replace(LOOP, rank=None, demand_per_second=None, more_workers=None, wait_share=0, numbers={})
    assert status.Report.decode(status.Report.of([quiet, LOOP])).loops == [LOOP, quiet]
    node = dataclasses.replace(NODE, clients=[dataclasses.replace(CLIENT, loops=[LOOP], loops_seconds=2.5)])
    assert status.NodeStatus.decode(node.encode()) == node


def test_report_has_the_loops_that_wait_most_and_is_small():
    loops = [dataclasses.replace(LOOP, wait_share=share / 100, text="x" * 500) for share in range(100)]
    payload = status.Report.of(loops)
    assert len(payload) <= status.MAX_REPORT_BYTES
    assert status.Report.decode(payload).loops == loops[::-1][: len(status.Report.decode(payload).loops)]
    long = dataclasses.replace(LOOP, text="x" * status.MAX_REPORT_BYTES)
    assert status.Report.decode(status.Report.of([long])).loops == []


@pytest.mark.parametrize(
    "change",
    [
        {"wait_share": float("nan")},
        {"demand_per_second": float("inf")},
        {"delivered_per_second": 10**400},
        {"more_workers": 10**30},
        {"wanted_workers": 10**6},
        {"wanted_workers": -1},
        {"rank": -(10**30)},
        {"rank": "0"},
        {"bound": 'a"b'},
        {"bound": "b" * 33},
        {"numbers": {"a b": 1.0}},
        {"numbers": {"fetch_seconds": float("-inf")}},
        {"numbers": {"fetch_seconds": "1"}},
        {"numbers": []},
    ],
    ids=str,
)
def test_report_that_makes_no_sense_is_refused(change):
    fields = json.loads(status.Report.of([LOOP]))
    fields["loops"][0].update(change)
    with pytest.raises(RemoteProtocolError, match="malformed Report message"):
        status.Report.decode(json.dumps(fields).encode())


def test_slowest_rank_is_known_unless_two_clients_have_the_same_rank():
    def client(pid, rank, wait_share, **more):
        loops = [dataclasses.replace(LOOP, rank=rank, wait_share=wait_share, **more), LOOP]
        return dataclasses.replace(CLIENT, pid=pid, loops=loops, job="81")

    name = LOOP.dataset
    ranks = [client(1, 0, 0.1), client(2, 1, 0.9), client(3, 2, 0.95, dataset="Validation")]
    ranks[-1].loops.pop()
    assert status.slowest_rank(ranks, name, "81") == ranks[1].loops[0]
    assert status.slowest_rank(ranks, name, "82") is None
    assert status.slowest_rank([*ranks, client(4, 0, 0.5)], name, "81") is None
