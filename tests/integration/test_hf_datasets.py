"""Hugging Face datasets, map-style and iterable-style, in workers."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from rpcdataloader import RPCDataloader, RPCDataset
from tests.integration.origins import Process, numbers_of, run_ranks, trace
from tests.integration.quick import quick_server

hf = pytest.importorskip("datasets")
hf_distributed = pytest.importorskip("datasets.distributed")

NUMBERS = list(range(40))

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture(scope="module")
def server(zygote):
    # Importing it takes a session more than a second.
    with quick_server(zygote, "--num-workers", "4", "--max-connections", "64", "--preload", "datasets") as server:
        yield server


def add_pid(row):
    return {**row, "pid": Process(os.getpid())}


def add_pids(columns):
    return {**columns, "pid": [Process(os.getpid())] * len(columns["number"])}


def rows():
    return hf.Dataset.from_dict({"number": NUMBERS})


class WithPid:
    """Rows as the format of a map-style dataset gives them."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, indices):
        rows = self.dataset.__getitems__(indices)
        assert all(isinstance(row["number"], torch.Tensor) for row in rows)
        return [add_pid(row) for row in rows]

    def __getitem__(self, index):
        return self.__getitems__([index])[0]


def torch_rows():
    return WithPid(rows().with_format("torch"))


def transformed_rows():
    dataset = rows()
    dataset.set_transform(add_pids)
    return dataset


def stream(num_shards=8):
    return rows().to_iterable_dataset(num_shards=num_shards).map(add_pid)


def shuffled_stream():
    return rows().to_iterable_dataset(num_shards=8).shuffle(seed=3, buffer_size=10).map(add_pid)


def saved_stream(path):
    return hf.load_from_disk(path).to_iterable_dataset(num_shards=8).map(add_pid)


class Replayed(IterableDataset):
    """A dataset without its ``state_dict``."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(self.dataset)


def load(dataset, server, **options):
    if not isinstance(dataset, RPCDataset):
        options["workers"] = server.address
    return RPCDataloader(dataset, batch_size=4, collate_fn=trace, num_workers=2, **options)


@pytest.mark.parametrize("make", [torch_rows, transformed_rows])
def test_rows_of_a_map_style_dataset(make, server):
    for dataset in (make(), RPCDataset(server.address, make)):
        assert numbers_of(load(dataset, server), [server.pid]) == NUMBERS
        assert sorted(numbers_of(load(dataset, server, shuffle=True), [server.pid])) == NUMBERS


def test_batches_are_torch_s_own(server):
    dataset = rows().with_format("torch")
    batches = list(RPCDataloader(dataset, 7, workers=server.address))
    expected = list(torch.utils.data.DataLoader(dataset, 7))
    assert [batch["number"].tolist() for batch in batches] == [batch["number"].tolist() for batch in expected]
    assert batches[0]["number"].dtype == expected[0]["number"].dtype


def test_dataset_is_built_once_per_node_although_importing_it_starts_threads(serve, tmp_path, caplog):
    server = serve("--num-workers", "2")
    rows().save_to_disk(str(tmp_path / "saved"))
    dataset = RPCDataset(server.address, hf.load_from_disk, str(tmp_path / "saved"))
    assert dataset.column_names == ["number"]
    stream = RPCDataset(server.address, saved_stream, str(tmp_path / "saved"))
    assert sorted(numbers_of(load(stream, server), [server.pid], 2)) == NUMBERS
    assert not [record for record in caplog.records if "is built in every worker" in record.getMessage()]


@pytest.mark.parametrize("style", ["plain", "torch", "shuffled"])
def test_streams_share_the_shards(style, server):
    def make():
        if style == "shuffled":
            return shuffled_stream()
        return stream().with_format("torch") if style == "torch" else stream()

    for dataset in (make(), RPCDataset(server.address, make)):
        numbers = numbers_of(load(dataset, server), [server.pid], 2)
        assert sorted(numbers) == NUMBERS
        assert numbers != NUMBERS
        assert numbers == numbers_of(load(dataset, server), [server.pid], 2)


def test_epoch_changes_the_order_of_a_shuffled_stream(server):
    sent = shuffled_stream()
    built = RPCDataset(server.address, shuffled_stream)
    orders = []
    for epoch in range(2):
        sent.set_epoch(epoch)
        built.call_all(lambda dataset, epoch=epoch: dataset.set_epoch(epoch))
        orders.append(numbers_of(load(sent, server), [server.pid], 2))
        assert numbers_of(load(built, server), [server.pid], 2) == orders[-1]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == NUMBERS


@pytest.mark.parametrize(
    ("make", "owner"),
    [(stream, "dataset"), (lambda: Replayed(shuffled_stream()), "")],
    ids=["its own state", "replayed shuffle"],
)
def test_saved_pass_goes_on_where_it_was(make, owner, server):
    whole = numbers_of(load(make(), server), [server.pid], 2)
    loader = load(make(), server)
    batches = iter(loader)
    begun = numbers_of((next(batches) for _ in range(5)), [server.pid], 2)
    state = loader.state_dict()
    assert [saved[2] for saved in state["streams"]] == [owner, owner]
    resumed = load(make(), server)
    resumed.load_state_dict(state)
    assert begun + numbers_of(resumed, [server.pid], 2) == whole


@pytest.mark.parametrize(
    "make", [stream, lambda: Replayed(shuffled_stream())], ids=["its own state", "replayed shuffle"]
)
def test_samples_of_a_killed_worker_are_loaded_once(make, server):
    whole = numbers_of(load(make(), server), [server.pid], 2)
    batches = iter(load(make(), server))
    first = next(batches)
    os.kill(first.collated, signal.SIGKILL)
    assert first.numbers + numbers_of(batches, [server.pid]) == whole


def uneven_stream():
    return stream(num_shards=5)


def split_here(make):
    return hf_distributed.split_dataset_by_node(make(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def load_shares(address, pid):
    """The samples of this rank, for each way to split a dataset."""
    shares = {}
    dataset = RPCDataset(address, transformed_rows)
    sampler = DistributedSampler(dataset, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), shuffle=True)
    shares["sampler"] = numbers_of(RPCDataloader(dataset, 4, sampler=sampler, collate_fn=trace), [int(pid)])
    for make in (transformed_rows, stream, shuffled_stream, uneven_stream):
        # The rank is looked up on the node.
        dataset = RPCDataset(address, split_here, make)
        shares[make.__name__] = numbers_of(RPCDataloader(dataset, 4, collate_fn=trace), [int(pid)])
    return shares


def test_ranks_on_one_node_server_get_each_sample_once(server, library_zygote):
    one, other = run_ranks(library_zygote, load_shares, 2, server.address, server.pid)
    for way in one:
        assert sorted(one[way] + other[way]) == NUMBERS, way
        assert len(one[way]) == len(other[way]) == 20, way


def test_sampler_over_a_stream_is_refused(server):
    with pytest.raises(ValueError, match="sampler"):
        load(stream(), server, sampler=DistributedSampler(NUMBERS, 2, 0))
