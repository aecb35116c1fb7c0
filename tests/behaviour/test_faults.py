"""Whatever goes wrong, at whatever moment of a call: a clear error for that call, and the next one works."""

from __future__ import annotations

import os
import signal

import pytest

from rpcdataloader import rpc_async
from rpcdataloader.errors import ConnectionLostError, RemoteError, RPCTimeoutError, SerializationError
from tests.support import tasks
from tests.support.tasks import Fault, Trap

pytestmark = pytest.mark.usefixtures("clean_client")

ARGS = r"args\[0\] is a tests\.support\.tasks\.Trap, which cannot be pickled .*"
RESULT = r"result is a tests\.support\.tasks\.Trap, which cannot be pickled .*"
REBUILT = "a message cannot be rebuilt: "
STATUS_3 = r"worker 1 \(pid \d+\) on .* exited with status 3"
STATUS_0 = r"worker 1 \(pid \d+\) on .* exited with status 0"
SIGKILL = r"worker 1 \(pid \d+\) on .* was killed by SIGKILL"
STALLED = r"on worker 1 \(pid \d+\) on .* did not finish within 0\.4 s"
LOST = "lost|exited|SIGKILL|closed"  # before anything was sent; how the peer ended may not be known yet

# When, how, and what comes of it: an error and its text, or None for the result. What happens to a peer while the
# client pickles the arguments or rebuilds the result, happens to the worker.
FAULTS = [
    ("pickling", "exception", SerializationError, ARGS + "ValueError: a fault"),
    ("pickling", "system_exit", SerializationError, ARGS + "SystemExit: 3"),
    *(("pickling", how, ConnectionLostError, LOST) for how in ("exit_process", "killed", "peer_closes")),
    ("pickling", "peer_stalls", RPCTimeoutError, STALLED),
    ("running", "exception", ValueError, "a fault"),
    ("running", "system_exit", RemoteError, r"worker 1 \(pid \d+\) on .* raised SystemExit: 3"),
    ("replying", "exception", SerializationError, RESULT + "ValueError: a fault"),
    ("replying", "system_exit", SerializationError, RESULT + "SystemExit: 3"),
    *(
        (when, "exception", SerializationError, REBUILT + "ValueError: a fault")
        for when in ("unpickling", "collecting")
    ),
    *((when, "system_exit", SerializationError, REBUILT + "SystemExit: 3") for when in ("unpickling", "collecting")),
    *(
        (when, *fault)
        for when in ("unpickling", "running", "replying")
        for fault in (
            ("exit_process", ConnectionLostError, STATUS_3),
            ("killed", ConnectionLostError, SIGKILL),
            ("peer_closes", ConnectionLostError, STATUS_0),
            ("peer_stalls", RPCTimeoutError, STALLED),
        )
    ),
    *(("collecting", how, None, None) for how in ("exit_process", "killed", "peer_closes", "peer_stalls")),
]

DEADLY = ("exit_process", "killed", "peer_closes")


@pytest.mark.parametrize(("when", "how", "error", "text"), FAULTS, ids=[f"{row[0]}-{row[1]}" for row in FAULTS])
def test_fault_is_a_clear_error_and_the_next_call_works(shared_server, tmp_path, when, how, error, text):
    address = shared_server.address
    worker, _session = rpc_async(address, tasks.whereabouts).wait()
    if when in ("pickling", "collecting"):
        orders = tmp_path / "orders"
        os.mkfifo(orders)
        rpc_async(address, tasks.obey, (str(orders),)).wait()
        fault = Fault(how, worker, str(orders))
    else:
        fault = Fault(how)
    func, argument = {
        "pickling": (type, Trap("pickled", fault)),
        "unpickling": (type, Trap("rebuilt", fault)),
        "running": (Fault.happen, fault),
        "replying": (tasks.set_trap, ("pickled", fault)),
        "collecting": (tasks.set_trap, ("rebuilt", fault)),
    }[when]
    limit = {"timeout": 0.4} if error is RPCTimeoutError else {}

    def call():
        return rpc_async(address, func, (argument,), **limit).wait()

    if error is None:
        assert type(call()) is Trap
    else:
        with pytest.raises(error, match=text) as caught:
            call()
        assert type(caught.value) is error

    if how == "peer_stalls":
        os.kill(worker, signal.SIGCONT)
    try:
        next_worker, _session = rpc_async(address, tasks.whereabouts).wait()
    except ConnectionLostError:
        # The worker died after it had answered; we may only learn of that when we ask again.
        assert when == "collecting"
        next_worker, _session = rpc_async(address, tasks.whereabouts).wait()
    assert (next_worker == worker) == (how not in DEADLY)
