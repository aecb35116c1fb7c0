"""A training script whose dataset, functions and batch types are its own, as most are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_SCALE

SCRIPT = """
import dataclasses, enum, os, sys
from collections import namedtuple
import torch
from torch.utils.data import Dataset
from rpcdataloader import RPCDataloader, RPCDataset

class Color(enum.Enum):
    RED = 1
    BLUE = 2

@dataclasses.dataclass
class Batch:
    images: torch.Tensor
    colors: list
    made = 0

    def double(self):
        return 2 * self.images

Place = namedtuple("Place", "row column")

class DecodeError(Exception):
    def __init__(self, name, code):
        super().__init__(name, code)
        self.code = code

class Images(Dataset):
    made = 0

    def __init__(self, size):
        self.size = size
        Images.made += 1

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if hasattr(index, "row"):
            return torch.tensor([index.row, index.column])
        if index == 7:
            raise DecodeError("seven", 7)
        return scale(torch.full((2, 2), float(index))), Color(1 + index % 2)

def scale(image):
    return image * SCALE

SCALE = 10

def collate(samples):
    Batch.made += 1
    images, colors = zip(*samples)
    return Batch(torch.stack(images), list(colors))

def init(number):
    assert os.getpid() != TRAINER
    assert callable(collate)
    os.environ["NUMBER"] = str(number)

TRAINER = os.getpid()
workers = sys.argv[1]
attributes = {cls: dict(vars(cls)) for cls in (Batch, Color, Images, DecodeError, Place)}

def check(batches):
    batches = list(batches)
    assert [type(batch) for batch in batches] == [Batch] * 2, batches
    for number, batch in enumerate(batches):
        assert batch.double()[:, 0, 0].tolist() == [20.0 * index for index in range(3 * number, 3 * number + 3)]
        assert all(type(color) is Color for color in batch.colors)
        assert batch.colors[0] is Color(1 + 3 * number % 2)

options = {"batch_size": 3, "collate_fn": collate, "worker_init_fn": init}
for build in ("node", "worker"):
    check(RPCDataloader(RPCDataset(workers, Images, 6, build=build), **options))
assert Images.made == 0, "it is built there, not here"
loader = RPCDataloader(Images(6), workers=workers, persistent_workers=True, **options)
for _epoch in range(2):
    check(loader)

offset = 5
batches = RPCDataloader(Images(6), 6, workers=workers, collate_fn=lambda samples: len(samples) + offset)
assert list(batches) == [11]
places = RPCDataloader(Images(6), None, sampler=[Place(1, 2), Place(3, 4)], workers=workers)
assert torch.stack(list(places)).tolist() == [[1, 2], [3, 4]]
try:
    list(RPCDataloader(Images(8), workers=workers, **options))
except DecodeError as error:
    assert error.code == 7
    assert "in __getitem__" in str(error.__cause__)
else:
    raise AssertionError
dataset = RPCDataset(workers, Images, 6)
assert type(dataset[2][1]) is Color
assert dataset.call_all(lambda images: images.size * SCALE) == [60]

# What came back has changed nothing here.
for cls, before in attributes.items():
    after = dict(vars(cls))
    for name in ("made", "__slotnames__"):  # the latter is what pickle remembers
        after.pop(name, None), before.pop(name, None)
    assert not after.keys() ^ before.keys(), (cls, after.keys() ^ before.keys())
    assert all(after[name] is before[name] for name in before), cls
assert (Batch.made, Images.made) == (0, 4)
print("as expected")
"""


def test_classes_and_functions_of_the_training_script(zygote, shared_server):
    ended = zygote.start(SCRIPT, shared_server.address, ends_quickly=True).wait(60)
    assert ended.status == 0, ended.errors
    assert ended.output == "as expected\n"


ELSEWHERE = """
import sys
import __main__
from rpcdataloader import RPCDataloader, RPCDataset

__main__.__file__ = "/no/such/project/train.py"  # as it looks to a node that does not see that folder

class Images:
    def __init__(self, *paths):
        for path in paths:
            open(path)

    def __getitem__(self, index):
        import helpers_of_the_project

def tell(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, *getattr(error, "__notes__", [str(error.__cause__)]))

workers = sys.argv[1]
tell(lambda: next(iter(RPCDataloader(Images(), None, sampler=[0], workers=workers, num_workers=1))))
tell(lambda: RPCDataset(workers, Images, "labels.csv"))
"""


def test_node_without_the_folder_of_the_script_says_so_once_and_in_what_comes_of_it(zygote, shared_server):
    """Of which exceptions, is in ``tests/unit/host/test_environment.py``."""
    ended = zygote.start(ELSEWHERE, shared_server.address, ends_quickly=True).wait(60)
    assert re.findall(r"^(\w+)NotFoundError", ended.output, re.MULTILINE) == ["Module", "File"], ended.errors
    assert ended.output.count("no /no/such/project: put") == 2
    assert ended.errors.count("there is no /no/such/project") == 1


IN_A_THREAD = """
import threading
import numpy as np
from rpcdataloader import RPCDataloader

def train():
    threading.main_thread().join()
    print([batch.shape for batch in RPCDataloader(np.zeros((2, 1 << 17)), num_workers=1)])

threading.Thread(target=train).start()
"""


@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 2), reason="this Python starts no thread by then")
def test_a_thread_goes_on_to_train_once_the_main_thread_has_ended(zygote):
    ended = zygote.start(IN_A_THREAD).wait()
    assert (ended.status, ended.output.count("131072")) == (0, 2), ended.errors


RANK = """
import multiprocessing
import sys

from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader

SCALE = 1


class Scaled(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return SCALE * index


def shift(sample):
    return sample + SCALE


def train(address):
    global SCALE
    SCALE = 5
    print(list(RPCDataloader(Scaled(), None, collate_fn=shift, workers=address, num_workers=1)), flush=True)


if __name__ == "__main__":
    rank = multiprocessing.get_context(sys.argv[2]).Process(target=train, args=sys.argv[1:2])
    rank.start()
    rank.join()
    sys.exit(rank.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_rank_that_multiprocessing_has_started_sends_what_the_script_defines(shared_server, tmp_path, method):
    path = tmp_path / "train.py"
    path.write_text(RANK)
    command = [sys.executable, path, shared_server.address, method]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60 * TIMEOUT_SCALE)
    assert (ended.returncode, ended.stdout) == (0, "[5, 10, 15]\n"), ended.stderr
