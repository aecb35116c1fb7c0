"""A large dataset instance on the trainer's own machine: written once into memory that its workers map."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader
from tests.conftest import wait_until

MIB = 1 << 20


class Large(Dataset):
    """Sample i is the sum of row i, which is i, of each of its arrays."""

    def __init__(self, size_bytes):
        rows = size_bytes // 24
        self.array = np.arange(8, dtype=np.uint8).repeat(rows).reshape(8, rows)
        self.tensor = torch.from_numpy(self.array.copy())
        self.lines = [bytes(row) for row in self.array]
        self.where = Path("/dev/null")

    def __len__(self):
        return 8

    def __getitem__(self, index):
        means = (
            self.array[index].mean(),
            self.tensor[index].double().mean(),
            np.frombuffer(self.lines[index], np.uint8).mean(),
        )
        self.array[index] += 100  # in this worker alone
        self.tensor[index] += 100
        return torch.tensor([float(mean) for mean in means], dtype=torch.float64)


def descriptors_of_memory():
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.islink(link) and os.readlink(link).startswith("/memfd:rpcdataloader")]


def traffic():
    """Bytes that this process has read and written."""
    return sum(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines()[:2])


@pytest.mark.usefixtures("clean_client")
@pytest.mark.parametrize("size_bytes", [3 * MIB, 96 * MIB], ids=["sent", "copied"])
def test_instance_arrives_whole_and_each_worker_has_its_own(unix_server, size_bytes):
    dataset, before = Large(size_bytes), traffic()
    loader = RPCDataloader(dataset, None, workers=unix_server.address, num_workers=2)
    for _epoch in range(2):
        # Workers are new in each epoch, and see nothing of what those of the last one wrote.
        assert [sample.tolist() for sample in loader] == [[i] * 3 for i in range(8)]
    assert dataset.array.max() == 7
    assert len(descriptors_of_memory()) == (size_bytes > 16 * MIB)  # for a session that takes the place of this one
    del loader  # its copy is needed until the workers' ends are known
    wait_until(lambda: descriptors_of_memory() == [], what="the copy")
    assert traffic() - before < 110 * MIB  # written into memory, and no more


IN_ANOTHER_CONTAINER = """
import ctypes, os, subprocess, sys
from rpcdataloader import RPCDataloader
from tests.behaviour.test_copies import MIB, Large
CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
assert ctypes.CDLL(None).unshare(CLONE_NEWNS | CLONE_NEWPID) == 0
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
subprocess.run("mount --make-rprivate / && mount -t proc proc /proc", shell=True, check=True)
print(float(sum(RPCDataloader(Large(48 * MIB), None, workers=sys.argv[1], num_workers=1))[0]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a namespace")
def test_in_another_container_the_instance_is_sent(unix_server, zygote):
    ended = zygote.start(IN_ANOTHER_CONTAINER, unix_server.address, ends_quickly=True).wait(100)
    assert (ended.status, ended.output, ended.errors) == (0, "28.0\n", "")
