"""Modules that the pickles of a loader name are imported once on a node, and not by every worker in every pass."""

from __future__ import annotations

import pytest

from tests.support.zygote import FORK_POOLS

MODULE = """
import os
from pathlib import Path

import torch

with open(Path(__file__).with_name("imports"), "a") as file:
    file.write(f"{os.getpid()}\\n")
if Path(__file__).with_name("picky").exists() and Path("/proc/self/comm").read_text() == "rpcdl-session\\n":
    raise SystemExit("not here")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


def collate(samples):
    return samples


def start(number):
    pass
"""

SCRIPT = """
import os, sys

from rpcdataloader import RPCDataloader, RPCDataset

address, folder, picky = sys.argv[1:]
for name in "of_dataset", "of_collate", "of_start":
    sys.path.insert(0, os.path.join(folder, name))
import numbers_of_mine, collate_of_mine, start_of_mine

if picky:
    open(os.path.join(folder, "of_collate", "picky"), "w").close()
dataset = RPCDataset([address], numbers_of_mine.Numbers, build="worker")
loader = RPCDataloader(
    dataset, batch_size=2, num_workers=2, collate_fn=collate_of_mine.collate, worker_init_fn=start_of_mine.start
)
for _epoch in range(3):
    assert list(loader) == [[0, 1], [2, 3]]
    print(*(open(os.path.join(folder, name, "imports")).read().count("\\n") for name in sorted(os.listdir(folder))))
"""


@pytest.mark.parametrize("picky", ["", "picky"])
def test_later_passes_import_nothing_that_the_session_can_import(zygote, shared_server, tmp_path, picky):
    for name in "dataset", "collate", "start":
        (tmp_path / f"of_{name}").mkdir()
        name_in_script = "numbers" if name == "dataset" else name
        (tmp_path / f"of_{name}" / f"{name_in_script}_of_mine.py").write_text(MODULE)
    ended = zygote.start(SCRIPT, shared_server.address, tmp_path, picky, ends_quickly=True).wait(60)
    assert ended.status == 0, ended.errors
    collate, *others = zip(*(map(int, line.split()) for line in ended.output.splitlines()), strict=True)
    for counts in others if picky else [collate, *others]:
        assert counts[1] == counts[2]
    if picky:
        assert collate[1] < collate[2]  # in each worker, as it fails in the session


PRELOADS = """
import os, sys
from rpcdataloader import RPCDataset

class Imported:
    def __getitem__(self, name):
        return name in sys.modules

os.environ["RPCDATALOADER_PRELOAD"] = "tabnanny, wave"
dataset = RPCDataset("local:1", Imported)
print(*(not Imported()[name] and dataset[name] for name in ("tabnanny", "wave", "this")))
"""


def test_embedded_pool_preloads_the_modules_of_a_variable(zygote):
    ended = zygote.start(FORK_POOLS + PRELOADS, ends_quickly=True).wait(60)
    assert (ended.status, ended.output) == (0, "True True False\n"), ended.errors
