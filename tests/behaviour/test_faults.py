"""Whatever goes wrong, at whatever moment of a call: a clear error for that call, and the next one works."""

from __future__ import annotations

import os
import signal

import pytest

from rpcdataloader import rpc_async
from rpcdataloader.errors import ConnectionLostError, RemoteError, RPCTimeoutError, SerializationError
from tests.conftest import stat_of, wait_until
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

# What cannot be pickled or rebuilt, when, and what is said of how it fails.
WHERE = {"pickling": ARGS, "replying": RESULT, "unpickling": REBUILT, "collecting": REBUILT}
SAID = {"exception": "ValueError: a fault", "system_exit": "SystemExit: 3"}
ENDS = [
    ("exit_process", ConnectionLostError, STATUS_3),
    ("killed", ConnectionLostError, SIGKILL),
    ("peer_closes", ConnectionLostError, STATUS_0),
    ("peer_stalls", RPCTimeoutError, STALLED),
]

# When, how, and what comes of it: an error and its text. A worker is a peer, too.
FAULTS = [
    *((when, how, SerializationError, text + said) for when, text in WHERE.items() for how, said in SAID.items()),
    ("running", "exception", ValueError, "a fault"),
    ("running", "system_exit", RemoteError, r"worker 1 \(pid \d+\) on .* raised SystemExit: 3"),
    # Neither an Exception nor one that ends a process.
    *((when, "cancelled", RemoteError, "CancelledError: a fault") for when in ("unpickling", "running", "replying")),
    ("collecting", "cancelled", SerializationError, REBUILT + "CancelledError: a fault"),
    *((when, *end) for when in ("unpickling", "running", "replying") for end in ENDS),
]

DEADLY = ("exit_process", "killed", "peer_closes")


@pytest.mark.parametrize(("when", "how", "error", "text"), FAULTS, ids=[f"{row[0]}-{row[1]}" for row in FAULTS])
def test_fault_is_a_clear_error_and_the_next_call_works(shared_server, when, how, error, text):
    address, fault = shared_server.address, Fault(how)
    worker, _session = rpc_async(address, tasks.whereabouts).wait()
    func, argument = {
        "pickling": (type, Trap("pickled", fault)),
        "unpickling": (type, Trap("rebuilt", fault)),
        "running": (Fault.happen, fault),
        "replying": (tasks.set_trap, ("pickled", fault)),
        "collecting": (tasks.set_trap, ("rebuilt", fault)),
    }[when]
    limit = {"timeout": 0.4} if error is RPCTimeoutError else {}
    with pytest.raises(error, match=text) as caught:
        rpc_async(address, func, (argument,), **limit).wait()
    assert type(caught.value) is error
    if how == "peer_stalls":
        wait_until(lambda: stat_of(worker)[0] == "T")
        os.kill(worker, signal.SIGCONT)
    next_worker, _session = rpc_async(address, tasks.whereabouts).wait()
    assert (next_worker == worker) == (how not in DEADLY)
