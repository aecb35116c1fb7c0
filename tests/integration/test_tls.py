"""TLS between clients and node servers: the same batches, and a clear refusal of whatever does not fit together."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.client import pool
from rpcdataloader.errors import AuthenticationError, ConnectionLostError
from rpcdataloader.wire.certificates import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from rpcdataloader.wire.frames import MessageType, Preamble
from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.integration.quick import quick_server
from tests.integration.tampering import Bomb, num_loaded, recv_frame

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("clean_client")

# A refusal is an answer, and not a limit of time.
PROMPTLY = 8 * TIMEOUT_SCALE

BYTES = 300_000


class Images(torch.utils.data.Dataset):
    """Batches of many records, and small fields beside them."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((BYTES,), index, dtype=torch.uint8), index, torch.rand(3)


def options(folder, name="node", ca="ca"):
    return [f"--tls-cert={folder}/{name}.pem", f"--tls-key={folder}/{name}.key", f"--tls-ca={folder}/{ca}.pem"]


def use(monkeypatch, folder, name="node", ca="ca"):
    """Let this process's client use these files."""
    monkeypatch.setenv(CERT_VARIABLE, f"{folder}/{name}.pem")
    monkeypatch.setenv(KEY_VARIABLE, f"{folder}/{name}.key")
    monkeypatch.setenv(CA_VARIABLE, f"{folder}/{ca}.pem")


@pytest.fixture(scope="module")
def server(zygote, certificates):
    with quick_server(zygote, "--num-workers", "2", *options(certificates)) as server:
        yield server
        assert "ERROR" not in server.log
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def plain_server(zygote):
    with quick_server(zygote, "--num-workers", "2") as server:
        yield server


def batches(workers):
    dataset = RPCDataset(workers, Images)
    torch.manual_seed(1)
    loader = RPCDataloader(dataset, batch_size=4, shuffle=True, num_workers=2)
    return list(loader)


def test_loader_delivers_the_same_batches(server, plain_server, certificates, monkeypatch):
    expected = batches(plain_server.address)
    pool.close_client()
    use(monkeypatch, certificates)
    received = batches(server.address)
    assert len(expected) == len(received) == 6
    for one, other in zip(expected, received, strict=True):
        assert all(map(torch.equal, one, other))
    assert "over TLS" in server.log
