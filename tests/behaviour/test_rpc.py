"""Calls: what goes in, what comes out, how long it may take, and when the objects behind references go."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from torch.futures import Future

from rpcdataloader import RPCDataset, RRef, rpc_async
from rpcdataloader.client.background import MAX_CALLERS
from rpcdataloader.errors import ConnectionLostError, LocalProtocolError, RPCTimeoutError, SerializationError
from rpcdataloader.wire import frames
from tests.conftest import AT_ONCE, TIMEOUT_SCALE, close_client, wait_until
from tests.support import tasks
from tests.support.peers import MessageType, session_of
from tests.support.tampering import Proxy

pytestmark = pytest.mark.usefixtures("clean_client")


def open_gate(fifo):
    """Let a worker that reads the FIFO go on."""
    Path(fifo).write_bytes(b"")


# --- calling


def test_call_returns_a_torch_future_at_once(shared_server, fifo):
    future = rpc_async(shared_server.address, tasks.read_all, (fifo,))
    assert isinstance(future, Future)
    assert not future.done()
    chained = future.then(lambda done: done.wait() * 2)
    blocked = future.then(lambda _done: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    Path(fifo).write_bytes(b"ab")
    assert future.wait() == b"ab"
    assert chained.wait() == b"abab"
    assert blocked.wait() == set()  # or programs that callbacks start would ignore SIGTERM


def test_arguments_are_passed_by_position_and_by_name(shared_server):
    assert rpc_async(shared_server.address, tasks.add).wait() == 0
    assert rpc_async(shared_server.address, tasks.add, [1, 2]).wait() == 3
    assert rpc_async(shared_server.address, tasks.add, (1, 2), {"scale": 10}).wait() == 30
    assert rpc_async(shared_server.address, tasks.add, kwargs={"scale": 10}).wait() == 0


def test_calls_behind_a_large_one_are_answered(unix_server, fifo):
    """A worker on this machine looks for memory in the middle of a call, and may read more than it can hold."""
    address = unix_server.address
    for _ in range(2):
        rpc_async(address, tasks.make_array).wait()  # memory that both see
    large = rpc_async(address, tasks.make_array, (1 << 19, fifo, np.ones(70 << 20, np.uint8)))
    late = [rpc_async(address, tasks.add, (number,)) for number in range(5)]
    open_gate(fifo)
    assert large.wait().sum() == 1 << 19
    assert [future.wait() for future in late] == list(range(5))


def test_calls_run_in_their_order(call, shared_server):
    for number in range(100):
        rpc_async(shared_server.address, tasks.append, (number,))
    assert call(tasks.read_log) == list(range(100))


def test_result_is_sent_before_the_next_call_changes_it(shared_server, keep):
    array = keep(np.zeros, 4_000_000)
    results = [rpc_async(shared_server.address, np.add, (array, 1, array)) for _ in range(4)]
    assert [np.unique(result.wait()).tolist() for result in results] == [[1.0], [2.0], [3.0], [4.0]]


def test_callbacks_may_wait_for_calls_and_for_other_callbacks(shared_server, fifo):
    def add_one(done):
        return rpc_async(shared_server.address, tasks.add, (done.wait(), 1), timeout=10 * TIMEOUT_SCALE).wait()

    def add_three(done):
        return add_one(rpc_async(shared_server.address, tasks.add, (done.wait(), 1)).then(add_one))

    future = rpc_async(shared_server.address, tasks.read_all, (fifo,)).then(lambda _done: 1).then(add_three)
    open_gate(fifo)
    assert future.wait() == 4


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"host": "localhost"}, ValueError, "localhost"),
        ({"func": 3}, TypeError, "func must be callable, but is a int"),
        ({"timeout": 0}, ValueError, "timeout must be above 0 seconds or None, but is 0"),
        ({"timeout": float("nan")}, ValueError, "nan"),
        ({"args": 5}, TypeError, "args must be a list or tuple of arguments, but is a int"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_connected(arguments, error, text):
    with pytest.raises(error, match=text):
        rpc_async(**{"host": "localhost:1", "func": len, **arguments})


# --- exceptions


class Model:
    """Stands for what a function has in its variables."""


def fail(*_arguments):
    raise ValueError("a fault")


@pytest.mark.parametrize("how", ["call", "callback", "timeout"])
def test_failed_call_keeps_no_variables_of_who_has_waited(shared_server, how):
    def wait():
        model = Model()
        func, args = {"call": (fail, ()), "callback": (tasks.add, ()), "timeout": (time.sleep, (0.5,))}[how]
        future = rpc_async(shared_server.address, func, args, timeout=0.2 if how == "timeout" else None)
        future = future.then(fail) if how == "callback" else future
        for _ in range(2):
            with pytest.raises((ValueError, RPCTimeoutError)):
                future.wait()
        return weakref.ref(model), weakref.ref(future)

    gc.disable()
    try:
        model, future = wait()
        wait_until(lambda: model() is None and future() is None, 5)
    finally:
        gc.enable()


def test_error_of_a_callback_says_where_it_was(shared_server):
    future = rpc_async(shared_server.address, tasks.add).then(fail)
    with pytest.raises(ValueError, match="a fault") as caught:
        future.wait()
    assert not hasattr(caught.value, "add_note") or "in fail" in "".join(caught.value.__notes__)


def test_callbacks_that_wait_have_a_limited_number_of_threads(shared_server, fifo):
    gate = threading.Event()

    def wait(done):
        gate.wait()
        if done.wait() == 1:
            raise SystemExit  # which costs no thread
        return done.wait()

    def leave(_done):
        raise SystemExit

    first = rpc_async(shared_server.address, tasks.add)
    for _ in range(MAX_CALLERS):
        first.add_done_callback(leave)
    first.wait()
    rpc_async(shared_server.address, tasks.read_all, (fifo,))  # the others come after it
    futures = [rpc_async(shared_server.address, tasks.add, (number,)) for number in range(3 * MAX_CALLERS)]
    chained = [future.then(wait) for future in futures]
    open(fifo, "w").close()
    for future in futures:
        future.wait()
    threads = [thread for thread in threading.enumerate() if thread.name == "rpcdl-call"]
    gate.set()
    assert len(threads) <= MAX_CALLERS
    assert [future.wait() for future in chained[2:]] == list(range(2, 3 * MAX_CALLERS))


def test_unpicklable_arguments_are_an_error_that_names_their_path(call):
    worker, _session = call(tasks.whereabouts)
    reader = tasks.Box(reader=tasks.Box(lock=threading.Lock()))
    with pytest.raises(
        SerializationError, match=r"^args\[1\]\.reader\.lock is a _thread\.lock, which cannot be pickled"
    ):
        call(tasks.add, 1, reader)
    with pytest.raises(SerializationError, match=r"^kwargs\['scale'\]\['x'\] is a _thread\.lock"):
        call(tasks.add, kwargs={"scale": {"x": threading.Lock()}})
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"^func\.<closure>\.lock is a _thread\.lock"):
        call(lambda: lock)
    assert call(tasks.whereabouts)[0] == worker


def test_modules_that_only_one_side_has_are_an_error_that_says_so(call, monkeypatch):
    worker, _session = call(tasks.whereabouts)
    monkeypatch.delitem(sys.modules, "only_at_the_trainer", raising=False)
    thing = tasks.define_module("only_at_the_trainer")
    with pytest.raises(SerializationError, match=r"only_at_the_trainer.*importable") as caught:
        call(tasks.identity, thing)
    assert f"worker 1 (pid {worker})" in str(caught.value.__cause__)
    with pytest.raises(SerializationError, match=r"only_at_the_worker.*importable"):
        call(tasks.define_module, "only_at_the_worker")
    assert call(tasks.whereabouts)[0] == worker


# --- time


def fails_after(seconds, call):
    """Whether the future of a call fails by its time limit, and not before."""
    start = time.monotonic()
    with pytest.raises(RPCTimeoutError) as caught:
        call().wait()
    assert isinstance(caught.value, TimeoutError)
    assert f"within {seconds:g} s" in str(caught.value)
    assert time.monotonic() - start >= seconds
    return str(caught.value)


def test_fractional_timeout_bounds_the_call(shared_server, call):
    worker, _session = call(tasks.whereabouts)
    text = fails_after(0.25, lambda: rpc_async(shared_server.address, time.sleep, (0.5,), timeout=0.25))
    assert text.startswith(f"sleep on worker 1 (pid {worker}) on {shared_server.address}")
    assert call(tasks.whereabouts)[0] == worker


@pytest.mark.parametrize("argument", ["late", "late" * 10_000], ids=len)  # one is received with the call before it
def test_call_that_timed_out_before_its_turn_does_not_run(shared_server, fifo, argument):
    sent = []

    def note(direction, _connection, _number, frame):
        sent.extend([frame.type] if direction == "up" else [])
        return [frame]

    with Proxy(shared_server.address, note) as proxy:
        rpc_async(proxy.address, tasks.whereabouts).wait()  # what is given up before is never sent
        first = rpc_async(proxy.address, tasks.read_all, (fifo,))
        fails_after(0.3, lambda: rpc_async(proxy.address, tasks.append, (argument,), timeout=0.3))
        wait_until(lambda: MessageType.CANCEL in sent)
        log = rpc_async(proxy.address, tasks.read_log)
        wait_until(lambda: sent[-1] != MessageType.CANCEL)  # which was passed on
        open_gate(fifo)
        assert (first.wait(), log.wait()) == (b"", [])
        close_client()


def test_large_calls_that_timed_out_before_their_turn_do_not_run(shared_server, call, fifo):
    data = np.zeros(20 << 20, np.uint8)
    call(tasks.whereabouts)
    busy = rpc_async(shared_server.address, tasks.read_all, (fifo,))
    late = [rpc_async(shared_server.address, tasks.append, (data,), timeout=0.3) for _ in range(6)]
    for future in late:
        with pytest.raises(RPCTimeoutError):
            future.wait()
    open_gate(fifo)
    assert busy.wait() == b""
    assert call(tasks.read_log) == []


def test_message_that_takes_long_to_send_holds_up_no_other_server(shared_server, second_server, monkeypatch):
    begun, gate, digest = threading.Event(), threading.Event(), frames.digest_blocks
    monkeypatch.setattr(frames, "digest_blocks", lambda blocks: (begun.set(), gate.wait(), digest(blocks))[2])
    for address in shared_server.address, second_server.address:
        rpc_async(address, len, ("",)).wait()
    large = rpc_async(shared_server.address, len, (np.ones(1 << 20, np.uint8),))
    try:
        assert begun.wait(AT_ONCE)
        assert rpc_async(second_server.address, len, ("abc",), timeout=AT_ONCE).wait() == 3
    finally:
        gate.set()
    assert large.wait() == 1 << 20


def test_timeout_bounds_connecting_to_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        text = fails_after(0.4, lambda: rpc_async(address, len, ("abc",), timeout=0.4))
        assert "still connecting" in text
        # What waits for the answer is let go: nothing else could wake it before its own limit.
        listener.accept()[0].close()


# --- the end of workers and servers


def test_close_ends_sessions_that_drain(serve, fifo):
    server = serve("--num-workers", "1")
    future = rpc_async(server.address, tasks.read_all, (fifo,))
    draining = session_of(server.address)
    with open(fifo, "wb"):
        server.signal(signal.SIGTERM)
        wait_until(lambda: session_of(server.address) is not draining, what="news of the drain")
        start = time.monotonic()
        close_client()  # the draining session, and the one that waits for a successor
        assert time.monotonic() - start < AT_ONCE
        with pytest.raises(ConnectionLostError):
            future.wait()
    assert server.wait() == 0


def test_killed_server_fails_its_calls_at_once_and_the_next_call_finds_its_successor(serve, fifo):
    server = serve("--num-workers", "1")
    future = rpc_async(server.address, tasks.read_all, (fifo,))
    with open(fifo, "wb"):
        start = time.monotonic()
        server.signal(signal.SIGKILL)
        with pytest.raises(ConnectionLostError, match=f"{server.address}"):
            future.wait()
        assert time.monotonic() - start < AT_ONCE
    assert server.wait() == -signal.SIGKILL
    assert serve("--port", server.address.rpartition(":")[2]).address == server.address
    assert rpc_async(server.address, tasks.add, (1, 2)).wait() == 3


@pytest.fixture
def keep(call):
    """Run a function on the shared server and keep its result there."""

    def keep(func, *args, **options):
        ref = call(func, *args, rref=True, **options)
        assert type(ref) is RRef
        return ref

    return keep


# --- remote references: what they become


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


class Touches:
    """Makes a file when it is dropped."""

    def __init__(self, path):
        self.path = path

    def __del__(self):
        Path(self.path).touch()


def test_object_of_the_first_call_goes_without_another_one(shared_server, tmp_path):
    reference = rpc_async(shared_server.address, Touches, (str(tmp_path / "gone"),), rref=True).wait()
    assert not (tmp_path / "gone").exists()
    del reference
    wait_until((tmp_path / "gone").exists)


def test_reference_may_be_dropped_as_soon_as_it_was_passed_on(shared_server, call, fifo):
    gate = rpc_async(shared_server.address, tasks.read_all, (fifo,))
    # Both wait behind the gate; the second call and the release overtake nothing.
    made = rpc_async(shared_server.address, tasks.Probe, (7,), rref=True)
    open_gate(fifo)
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


# --- beside datasets


def test_call_waits_while_its_session_builds_a_dataset(shared_server, fifo, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(3 * TIMEOUT_SCALE))
    datasets, seconds = [], 3.5 * TIMEOUT_SCALE
    building = threading.Thread(
        target=lambda: datasets.append(RPCDataset([shared_server.address], tasks.read_all, fifo))
    )
    building.start()
    with open(fifo, "wb") as gate:  # the constructor runs
        future = rpc_async(shared_server.address, tasks.add, (1, 2))
        # Whoever connects waits for it, beyond the time that is given to a server that is not there.
        text = fails_after(seconds, lambda: rpc_async(shared_server.address, tasks.add, timeout=seconds))
        assert "still connecting" in text
        assert not future.done()
        gate.write(b"abc")
    assert future.wait() == 3
    building.join()
    assert len(datasets[0]) == 3


def test_what_each_process_has_one_of_comes_back_as_that_of_the_worker(shared_server, monkeypatch):
    monkeypatch.setenv("WHERE", "here")
    assert rpc_async(shared_server.address, lambda: os.environ).wait().get("WHERE") is None
    assert rpc_async(shared_server.address, lambda: (random.seed(5), random._inst)[1]).wait().random() == (
        random.Random(5).random()
    )
    missing = rpc_async(shared_server.address, lambda: dataclasses.MISSING).wait()
    assert missing is dataclasses.MISSING
