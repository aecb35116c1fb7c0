"""Remote references: what they become, and when the objects behind them go."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from pathlib import Path

import pytest

from rpcdataloader import RRef, rpc_async
from rpcdataloader.errors import ConnectionLostError, LocalProtocolError
from tests.conftest import wait_until
from tests.support import tasks

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture
def keep(call):
    """Run a function on the shared server and keep its result there."""

    def keep(func, *args, **options):
        ref = call(func, *args, rref=True, **options)
        assert type(ref) is RRef
        return ref

    return keep


# --- what a reference becomes


@pytest.mark.parametrize(
    ("wrap", "find"),
    [
        pytest.param(lambda ref: ref, lambda argument: argument, id="argument"),
        pytest.param(lambda ref: [0, ref], lambda argument: argument[1], id="list"),
        pytest.param(lambda ref: {"key": (1, {"inner": ref})}, lambda argument: argument["key"][1]["inner"], id="dict"),
        pytest.param(lambda ref: tasks.Box(inner=tasks.Box(ref=ref)), lambda box: box.inner.ref, id="attribute"),
        pytest.param(lambda ref: {ref}, lambda argument: next(iter(argument)), id="set"),
        pytest.param(lambda ref: lambda: ref, lambda function: function(), id="closure"),
    ],
)
def test_reference_anywhere_in_the_arguments_becomes_the_object(call, keep, wrap, find):
    ref = keep(tasks.Probe, 5)
    assert call(lambda argument, ref: find(argument) is ref, wrap(ref), ref)
    assert call(lambda *, argument, ref: find(argument) is ref, kwargs={"argument": wrap(ref), "ref": ref})


def test_object_can_be_returned_kept_twice_and_passed_back(call, keep):
    ref = keep(tasks.Probe, [1, 2])
    assert call(tasks.identity, ref).value == [1, 2]
    again = keep(tasks.identity, ref)
    assert again is not ref
    assert call(tasks.is_same, ref, again)
    del ref
    assert call(tasks.identity, again).value == [1, 2]
    none = keep(tasks.identity, None)
    also_none = keep(tasks.identity, None)
    del none
    assert call(tasks.identity, also_none) is None
    assert call(tasks.num_probes) == 1


def test_reference_cannot_be_pickled_elsewhere(keep):
    ref = keep(tasks.Probe)
    with pytest.raises(LocalProtocolError, match=r"RRef\(1 in worker 1 \(pid \d+\) on .*\) has a meaning only in"):
        pickle.dumps(ref)


def test_reference_cannot_be_used_by_another_worker(call, keep, second_server):
    ref = keep(tasks.Probe, 5)
    here, there = call(tasks.whereabouts)[0], rpc_async(second_server.address, tasks.whereabouts).wait()[0]
    with pytest.raises(LocalProtocolError) as caught:
        rpc_async(second_server.address, tasks.identity, ([ref],))
    text = str(caught.value)
    assert f"lives in worker 1 (pid {here})" in text
    assert f"cannot be used by worker 1 (pid {there}) on {second_server.address}" in text
    # Both workers go on.
    assert rpc_async(second_server.address, tasks.whereabouts).wait()[0] == there
    assert call(tasks.identity, ref).value == 5


# --- when objects go


def test_object_goes_with_its_last_reference(call, keep):
    ref = keep(tasks.Probe)
    held_twice = [ref, {"ref": ref}]
    del ref
    assert call(tasks.num_probes) == 1
    held_twice.pop(0)
    assert call(tasks.num_probes) == 1
    del held_twice
    wait_until(lambda: call(tasks.num_probes) == 0)


def test_reference_may_be_dropped_as_soon_as_it_was_passed_on(shared_server, call, fifo):
    gate = rpc_async(shared_server.address, tasks.read_all, (fifo,))
    # Both wait behind the gate; the second call and the release overtake nothing.
    made = rpc_async(shared_server.address, tasks.Probe, (7,), rref=True)
    Path(fifo).write_bytes(b"")
    ref = made.wait()
    value = rpc_async(shared_server.address, lambda probe: probe.value, (ref,))
    del ref, made
    gc.collect()
    assert value.wait() == 7
    assert gate.wait() == b""
    wait_until(lambda: call(tasks.num_probes) == 0)


def test_references_to_a_worker_that_is_gone_are_dropped_in_peace(shared_server, call, keep, fifo):
    worker, _session = call(tasks.whereabouts)
    refs = [keep(tasks.Probe) for _ in range(10)]
    lost = [rpc_async(shared_server.address, func, args) for func, args in ((tasks.read_all, (fifo,)), (tasks.add, ()))]
    os.kill(worker, signal.SIGKILL)
    for running_or_behind in lost:
        with pytest.raises(ConnectionLostError, match=rf"worker 1 \(pid {worker}\) on .* was killed by SIGKILL"):
            running_or_behind.wait()
    future = rpc_async(refs[0].owner.session.name, tasks.identity, (refs[0],))
    with pytest.raises(ConnectionLostError, match=rf"the object behind RRef\(1 in worker 1 \(pid {worker}\).*was lost"):
        future.wait()
    del refs, future
    gc.collect()
    assert call(tasks.whereabouts)[0] != worker
