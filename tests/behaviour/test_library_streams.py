"""Streams of other libraries, each held to the same: shared by workers and ranks, and resumed where they were.

Hugging Face datasets, WebDataset pipelines, and graphs of torchdata's nodes.
"""

from __future__ import annotations

import importlib
import itertools
import os
from typing import Any, NamedTuple

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from tests.support.origins import Process, numbers_of, run_ranks, trace
from tests.support.quick import quick_server

NUMBERS = list(range(40))

pytestmark = pytest.mark.usefixtures("clean_client")


def hf() -> Any:
    return importlib.import_module("datasets")


def wds() -> Any:
    return importlib.import_module("webdataset")


def stamp(sample):
    """What every sample becomes in a worker."""
    number = sample["number"] if "number" in sample else sample["json"]["number"]
    return {"number": number, "pid": Process(os.getpid())}


# Hugging Face datasets


def hf_rows():
    return hf().Dataset.from_dict({"number": NUMBERS}).to_iterable_dataset(num_shards=8)


def by_rank(dataset):
    distributed = importlib.import_module("datasets.distributed")
    return distributed.split_dataset_by_node(dataset, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def hf_stream(_shards):
    return by_rank(hf_rows().map(stamp))


def hf_shuffled(_shards):
    return by_rank(hf_rows().shuffle(seed=3, buffer_size=10).map(stamp))


# WebDataset


def wds_pipeline(shards, **options):
    options = {"shardshuffle": False, "nodesplitter": wds().split_by_node, **options}
    return wds().WebDataset(shards, **options).decode().map(stamp)


def wds_shuffled(shards):
    return wds_pipeline(shards, shardshuffle=8, detshuffle=True, seed=3).compose(wds().detshuffle(10))


# torchdata's nodes


class Graph(IterableDataset):
    """A graph of nodes over a part of the numbers; each worker makes its own, with its threads.

    The state of the graph is the dataset's. That of its iterator is of no use: it can be saved, but not loaded.
    """

    def __init__(self):
        self.loader = None

    def _made(self):
        if self.loader is None:
            nodes = importlib.import_module("torchdata.nodes")
            info = get_worker_info()
            first = int(os.environ["RANK"]) * info.num_workers + info.id
            step = int(os.environ["WORLD_SIZE"]) * info.num_workers
            source = nodes.IterableWrapper([{"number": number} for number in NUMBERS[first::step]])
            mapper = nodes.ParallelMapper(source, stamp, num_workers=2, method="thread")
            self.loader = nodes.Loader(nodes.Prefetcher(mapper, 4), restart_on_stop_iteration=False)
        return self.loader

    def __iter__(self):
        return iter(self._made())

    def state_dict(self):
        return self._made().state_dict()

    def load_state_dict(self, state):
        self._made().load_state_dict(state)


def graph(_shards):
    return Graph()


# The contract


class Kind(NamedTuple):
    """A stream: how it is made, whose its state is, and whether each worker has neighbours among the numbers."""

    make: Any
    library: str
    owner: str = ""


KINDS = [
    Kind(hf_stream, "datasets", "dataset"),
    Kind(hf_shuffled, "datasets", "dataset"),
    Kind(wds_pipeline, "webdataset"),
    Kind(wds_shuffled, "webdataset"),
    Kind(graph, "torchdata.nodes", "dataset"),
]
# Its buffer is not part of its state.
RESUMED = [kind for kind in KINDS if kind.make is not hf_shuffled]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.make.__name__)
def kind(request):
    pytest.importorskip(request.param.library)
    return request.param


@pytest.fixture(scope="module")
def server(library_zygote):
    with quick_server(library_zygote, "--num-workers", "4", "--max-connections", "64") as server:
        yield server


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Eight files of five samples; gives their pattern."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(8):
        with wds().TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in NUMBERS[5 * shard : 5 * shard + 5]:
                writer.write({"__key__": f"{number:03}", "json": {"number": number}})
    return f"{folder}/{{0..7}}.tar"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """This process is the only rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def load(dataset, server, **options):
    if not isinstance(dataset, RPCDataset):
        options["workers"] = server.address
    return RPCDataloader(dataset, **{"batch_size": 4, "collate_fn": trace, "num_workers": 2, **options})


def test_workers_share_the_samples_in_the_same_order_each_time(kind, shards, server):
    orders = []
    for dataset in (kind.make(shards), RPCDataset(server.address, kind.make, shards)):
        loader = load(dataset, server, persistent_workers=True)
        orders.append(numbers_of(loader, [server.pid], 2))
        assert sorted(orders[-1]) == sorted(numbers_of(loader, [server.pid], 2)) == NUMBERS
    assert orders[0] == orders[1] != NUMBERS


def test_epoch_that_is_set_for_a_stream_reaches_persistent_workers(server):
    pytest.importorskip("datasets")
    orders = []
    for options in ({}, {"persistent_workers": True}):
        dataset = hf_rows().shuffle(seed=3, buffer_size=40)
        loader = RPCDataloader(dataset, batch_size=None, num_workers=1, workers=server.address, **options)
        orders.append([])
        for epoch in range(3):
            dataset.set_epoch(epoch)
            orders[-1].append([sample["number"] for sample in loader])
    assert orders[0] == orders[1]
    assert len(set(map(tuple, orders[0]))) == 3


@pytest.mark.parametrize("num_batches", [5, 9])  # in the middle of both streams, and at the end of one
@pytest.mark.parametrize("kind", RESUMED, ids=lambda kind: kind.make.__name__)
def test_saved_pass_goes_on_where_it_was(kind, shards, server, num_batches):
    pytest.importorskip(kind.library)
    whole = numbers_of(load(kind.make(shards), server), [server.pid], 2)
    loader = load(kind.make(shards), server)
    batches = iter(loader)
    begun = numbers_of(itertools.islice(batches, num_batches), [server.pid], 2)
    state = loader.state_dict()
    assert [stream[2] for stream in state["streams"]] == [kind.owner, kind.owner]
    resumed = load(kind.make(shards), server)
    resumed.load_state_dict(state)
    assert begun + numbers_of(resumed, [server.pid]) == whole


def test_shuffled_stream_of_hugging_face_whose_state_cannot_be_loaded_is_read_again(server):
    pytest.importorskip("datasets")
    whole = numbers_of(load(hf_shuffled(None), server), [server.pid], 2)
    loader = load(hf_shuffled(None), server)
    begun = numbers_of(itertools.islice(loader, 5), [server.pid], 2)
    resumed = load(hf_shuffled(None), server, persistent_workers=True)
    resumed.load_state_dict(loader.state_dict())
    assert begun + numbers_of(resumed, [server.pid], 2) == whole
    assert numbers_of(resumed, [server.pid], 2) == whole


@pytest.mark.parametrize("make", [hf_stream, hf_shuffled])
@pytest.mark.parametrize("sets_epoch", [False, True])
def test_epochs_of_hugging_face_after_a_resumed_one_are_whole(server, make, sets_epoch):
    pytest.importorskip("datasets")
    dataset = RPCDataset(server.address, make, None)
    loader = load(dataset, server, persistent_workers=True)
    list(itertools.islice(loader, 5))
    resumed = load(dataset, server, persistent_workers=True)
    resumed.load_state_dict(loader.state_dict())
    for epoch in range(3):
        if sets_epoch and epoch:
            dataset.call_all(lambda stream, epoch=epoch: stream.set_epoch(epoch))
        found = numbers_of(resumed, [server.pid], 2)
        assert sorted(found) == NUMBERS if epoch else len(found) == 20


def load_shares(address, shards, pid):
    """The samples of this rank, of each kind of stream that is installed here."""
    shares = {}
    for each in KINDS:
        if importlib.util.find_spec(each.library.partition(".")[0]):
            # The rank is looked up on the node.
            loader = RPCDataloader(RPCDataset(address, each.make, shards), 4, collate_fn=trace, num_workers=2)
            shares[each.make.__name__] = numbers_of(loader, [int(pid)])
    return shares


def test_ranks_on_one_node_server_get_each_sample_once(server, shards, library_zygote):
    one, other = run_ranks(library_zygote, load_shares, 2, server.address, shards, server.pid)
    for way in one:
        assert sorted(one[way] + other[way]) == NUMBERS, way
        assert len(one[way]) == len(other[way]) == 20, way


# What one of them has alone


def saved_stream(path):
    return hf().load_from_disk(path).to_iterable_dataset(num_shards=8).map(stamp)


def test_dataset_of_hugging_face_is_built_once_per_node_although_importing_it_starts_threads(serve, tmp_path, caplog):
    pytest.importorskip("datasets")
    server = serve("--num-workers", "2")
    hf().Dataset.from_dict({"number": NUMBERS}).save_to_disk(str(tmp_path / "saved"))
    dataset = RPCDataset(server.address, hf().load_from_disk, str(tmp_path / "saved"))
    assert dataset.column_names == ["number"]
    stream = RPCDataset(server.address, saved_stream, str(tmp_path / "saved"))
    assert sorted(numbers_of(load(stream, server), [server.pid], 2)) == NUMBERS
    assert not [record for record in caplog.records if "is built in every worker" in record.getMessage()]


def test_rows_of_hugging_face_are_those_that_torch_gets(server):
    pytest.importorskip("datasets")
    rows = hf().Dataset.from_dict({"number": NUMBERS}).with_format("torch")
    for shuffle in (False, True):
        found = [number for batch in load(rows, server, collate_fn=None, shuffle=shuffle) for number in batch["number"]]
        expected = [row["number"] for row in rows]
        assert sorted(found) == expected if shuffle else found == expected
        assert {type(number) for number in found} == {type(number) for number in expected}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_script_of_the_stateful_loader_of_torchdata_runs_and_its_state_is_named(num_workers, server):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    old = stateful.StatefulDataLoader(NUMBERS, num_workers=num_workers, snapshot_every_n_steps=2)
    assert len(list(old)) == len(NUMBERS)
    loader = load(NUMBERS, server, snapshot_every_n_steps=2)
    with pytest.raises(ValueError, match=r"state of torchdata's StatefulDataLoader.*: begin the epoch anew"):
        loader.load_state_dict(old.state_dict())
