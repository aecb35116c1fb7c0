"""What users read who have configured nothing, and while they wait."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from rpcdataloader import RPCDataloader
from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.support.clocks import shorten
from tests.support.crew import wait_for_crew
from tests.support.datasets import Gated

SCRIPT = """
from rpcdataloader import RPCDataloader
from rpcdataloader.errors import ConnectionLostError
from tests.support.datasets import Deadly

loader = RPCDataloader(Deadly(4, {2}, "SIGKILL"), num_workers=1, max_retries=1)
try:
    list(loader)
except ConnectionLostError as error:
    print(error)
print(loader.diagnosis())
"""


def test_script_that_has_configured_nothing(zygote):
    ended = zygote.start(SCRIPT).wait(60 * TIMEOUT_SCALE)
    assert ") on local was killed by SIGKILL" in ended.output
    assert "socket" not in ended.output + ended.errors
    lines = ended.errors.splitlines()
    assert lines
    assert [line for line in lines if not line.startswith("rpcdataloader: ")] == []
    sentence = ended.output.splitlines()[-1]
    assert sentence.startswith(("step ", "No batch after "))
    assert sentence.endswith(".")


# A loop that waits long for a batch says for which, and where that is.


@pytest.mark.usefixtures("clean_client")
def test_a_long_wait_is_told_with_the_stack_of_the_worker_and_nothing_ends(shared_server, fifo, monkeypatch, caplog):
    shorten(monkeypatch, "long wait", "longer wait", "wait with a stack")
    batches = iter(RPCDataloader(Gated(8, 3, fifo), batch_size=None, workers=shared_server.address, num_workers=2))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    wait_for_crew(batches, 2)
    caplog.clear()

    def told():
        return [message for message in caplog.messages if "has waited" in message]

    def stacks():
        return [message for message in told() if "\n" in message]

    with ThreadPoolExecutor(1) as thread:
        opened = thread.submit(lambda: wait_until(lambda: len(told()) > 3 and stacks()) or open(fifo, "w").close())
        assert list(batches) == [3, 4, 5, 6, 7]
        opened.result()
    for message in told():
        assert re.match(r"the loop has waited \d+ s for batch 3 \(indices 3\), which is at worker \d+ \(pid ", message)
        assert re.search(r" \(tasks: \d at workers.*; workers: 2 at work; nodes: 1 up; next decision in ", message)
    (with_stack,) = stacks()
    assert re.search(r'datasets\.py", line \d+ in wait_for\n', with_stack)
