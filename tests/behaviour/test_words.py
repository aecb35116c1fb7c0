"""What users read who have configured nothing."""

from __future__ import annotations

import pytest

from tests.conftest import TIMEOUT_SCALE

SCRIPT = """
import os, signal, sys
from rpcdataloader import RPCDataloader
from rpcdataloader.errors import ConnectionLostError

class Deadly:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

loader = RPCDataloader(Deadly(), num_workers=1, max_retries=1)
try:
    list(loader)
except ConnectionLostError as error:
    print(error)
print(loader.diagnosis())
"""


@pytest.fixture(scope="module")
def ended(zygote):
    return zygote.start(SCRIPT).wait(60 * TIMEOUT_SCALE)


def test_embedded_pool_is_called_local(ended):
    assert ") on local was killed by SIGKILL" in ended.output
    assert "socket" not in ended.output + ended.errors


def test_warnings_of_a_script_without_logging_name_the_package(ended):
    lines = ended.errors.splitlines()
    assert lines
    assert [line for line in lines if not line.startswith("rpcdataloader: ")] == []


def test_diagnosis_is_printed_as_its_sentence(ended):
    sentence = ended.output.splitlines()[-1]
    assert sentence.startswith(("step ", "No batch after "))
    assert sentence.endswith(".")
