"""A compiled function may loop over a loader, which Dynamo leaves alone as it does with torch's."""

from __future__ import annotations

import json

import pytest

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, Dataset
from rpcdataloader import RPCDataloader

class Rows(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.full((4,), float(index)), index

def loop(loader):
    total = 0
    for rows, labels in loader:
        total = total + rows.sum() + labels.sum()
    return float(total)

def step(rows, labels):
    return rows.sum() + labels.sum()

def attempt(loader):
    torch._dynamo.reset()
    counters.clear()
    whole = torch.compile(loop, backend="eager")
    compiled = torch.compile(step, backend="eager")
    totals = [whole(loader), whole(loader), sum(float(compiled(*batch)) for batch in loader)]
    return totals, len(counters["graph_break"]), counters["stats"]["unique_graphs"]

loaders = {
    "torch": DataLoader(Rows(), 3),
    "without": RPCDataloader(Rows(), 3),
    "inline": RPCDataloader(Rows(), 3, workers="inline"),
    "workers": RPCDataloader(Rows(), 3, workers=sys.argv[1]),
    "persistent workers": RPCDataloader(Rows(), 3, workers=sys.argv[1], persistent_workers=True),
}
print(json.dumps({name: attempt(loader) for name, loader in loaders.items()}))
"""


@pytest.mark.slow
@pytest.mark.instruments
@pytest.mark.usefixtures("clean_client")
def test_compiled_loop_gives_what_it_gives_with_the_loader_of_torch(library_zygote, shared_server):
    ended = library_zygote.start(SCRIPT, shared_server.address).wait(120)
    assert ended.status == 0, ended.errors
    found = json.loads(ended.output)
    expected = found.pop("torch")
    assert expected[0] == [330.0] * 3
    for name, (totals, num_breaks, num_graphs) in found.items():
        assert (name, totals, num_breaks) == (name, *expected[:2])
        # Samples that this process loads may be compiled, too.
        assert num_graphs == (1 if "workers" in name else expected[2]), name
