"""torchdata's nodes in workers and in the trainer, and its conventions for states."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from tests.integration.origins import Process, numbers_of, run_ranks, trace

nodes = pytest.importorskip("torchdata.nodes")
samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

NUMBERS = list(range(40))

pytestmark = pytest.mark.usefixtures("clean_client")


def stamp(number):
    return {"number": number, "pid": Process(os.getpid())}


class Rows(Dataset):
    def __len__(self):
        return len(NUMBERS)

    def __getitem__(self, index):
        return stamp(NUMBERS[index])


class Graph(IterableDataset):
    """A graph of nodes over a part of the numbers; each worker makes its own, with its threads."""

    def __init__(self):
        self.loader = None

    def _made(self):
        if self.loader is None:
            info = get_worker_info()
            first = int(os.environ["RANK"]) * info.num_workers + info.id
            step = int(os.environ["WORLD_SIZE"]) * info.num_workers
            source = nodes.IterableWrapper(NUMBERS[first::step])
            mapper = nodes.ParallelMapper(source, stamp, num_workers=2, method="thread")
            self.loader = nodes.Loader(nodes.Prefetcher(mapper, 4))
        return self.loader

    def __iter__(self):
        return iter(self._made())


class StatefulGraph(Graph):
    """The state of the graph is the dataset's. That of its iterator is of no use: it can be saved, but not loaded."""

    def state_dict(self):
        return self._made().state_dict()

    def load_state_dict(self, state):
        self._made().load_state_dict(state)


def load(dataset, server, **options):
    if not isinstance(dataset, RPCDataset):
        options["workers"] = server.address
    return RPCDataloader(dataset, batch_size=4, collate_fn=trace, num_workers=2, **options)


def test_graph_runs_in_workers(server):
    for dataset in (Graph(), RPCDataset(server.address, Graph)):
        loader = load(dataset, server, persistent_workers=True)
        for _epoch in range(2):
            assert sorted(numbers_of(loader, [server.pid], 2)) == NUMBERS


@pytest.mark.parametrize(("make", "owner"), [(Graph, ""), (StatefulGraph, "dataset")])
def test_saved_pass_over_a_graph_goes_on_where_it_was(make, owner, server):
    whole = numbers_of(load(make(), server), [server.pid], 2)
    loader = load(make(), server)
    batches = iter(loader)
    begun = numbers_of((next(batches) for _ in range(5)), [server.pid], 2)
    state = loader.state_dict()
    assert [stream[2] for stream in state["streams"]] == [owner, owner]
    resumed = load(make(), server)
    resumed.load_state_dict(state)
    assert begun + numbers_of(resumed, [server.pid], 2) == whole


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_script_of_the_stateful_loader_runs_and_its_state_is_named(num_workers, server):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    old = stateful.StatefulDataLoader(Rows(), num_workers=num_workers, snapshot_every_n_steps=2)
    assert len(list(old)) == len(NUMBERS)
    loader = load(Rows(), server, snapshot_every_n_steps=2)
    with pytest.raises(ValueError, match=r"state of torchdata's StatefulDataLoader.*: begin the epoch anew"):
        loader.load_state_dict(old.state_dict())


@pytest.mark.parametrize("style", ["random", "distributed"])
def test_stateful_sampler_goes_on_where_it_was(style, server):
    def begin():
        if style == "random":
            sampler = samplers.RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(3))
        else:
            sampler = samplers.StatefulDistributedSampler(NUMBERS, 2, 1)
        return load(Rows(), server, sampler=sampler)

    whole = numbers_of(begin(), [server.pid])
    assert len(set(whole)) == len(whole) == {"random": 40, "distributed": 20}[style]
    loader = begin()
    batches = iter(loader)
    begun = numbers_of((next(batches) for _ in range(3)), [server.pid])
    resumed = begin()
    resumed.load_state_dict(loader.state_dict())
    assert begun + numbers_of(resumed, [server.pid]) == whole


def load_shares(address, pid):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sampler = samplers.StatefulDistributedSampler(NUMBERS, world_size, rank)
    rows = RPCDataloader(RPCDataset(address, Rows), 4, sampler=sampler, collate_fn=trace)
    graph = RPCDataloader(RPCDataset(address, Graph), 4, collate_fn=trace)
    return numbers_of(rows, [int(pid)]), numbers_of(graph, [int(pid)], 2)


def test_ranks_on_one_node_server_get_each_sample_once(server, zygote):
    for one, other in zip(*run_ranks(zygote, load_shares, 2, server.address, server.pid), strict=True):
        assert sorted(one + other) == NUMBERS
        assert len(one) == len(other) == 20
