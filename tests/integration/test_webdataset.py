"""WebDataset pipelines in workers: tar shards, split among ranks and workers."""

from __future__ import annotations

import itertools
import os

import pytest

from rpcdataloader import RPCDataloader, RPCDataset
from tests.integration.origins import Process, numbers_of, run_ranks, trace

wds = pytest.importorskip("webdataset")

NUMBERS = list(range(40))

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Eight shards of five samples; gives their pattern."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(8):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in NUMBERS[5 * shard : 5 * shard + 5]:
                writer.write({"__key__": f"{number:03}", "json": {"number": number}})
    return f"{folder}/{{0..7}}.tar"


def stamp(sample):
    return {"number": sample["json"]["number"], "pid": Process(os.getpid())}


def pipeline(shards, **options):
    options = {"shardshuffle": False, "nodesplitter": wds.split_by_node, **options}
    return wds.WebDataset(shards, **options).decode().map(stamp)


def shuffled(shards):
    return pipeline(shards, shardshuffle=8, detshuffle=True, seed=3).compose(wds.detshuffle(10))


def stages(shards):
    """The same from single stages; batches are made in the pipeline."""
    return wds.DataPipeline(
        wds.SimpleShardList(shards),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.decode(),
        wds.map(stamp),
        wds.batched(4, collation_fn=trace),
    )


def load(dataset, server, **options):
    if not isinstance(dataset, RPCDataset):
        options["workers"] = server.address
    return RPCDataloader(dataset, **{"batch_size": 4, "collate_fn": trace, "num_workers": 2, **options})


@pytest.mark.parametrize("make", [pipeline, shuffled])
def test_workers_share_the_shards(make, shards, server):
    for dataset in (make(shards), RPCDataset(server.address, make, shards)):
        numbers = numbers_of(load(dataset, server), [server.pid], 2)
        assert sorted(numbers) == NUMBERS
        assert numbers != NUMBERS


def test_pipeline_that_makes_batches(shards, server):
    for dataset in (stages(shards), RPCDataset(server.address, stages, shards)):
        loader = load(dataset, server, batch_size=None, collate_fn=None)
        assert sorted(numbers_of(loader, [server.pid], 2)) == NUMBERS


def test_saved_pass_goes_on_where_it_was(shards, server):
    whole = numbers_of(load(shuffled(shards), server), [server.pid], 2)
    loader = load(shuffled(shards), server)
    batches = iter(loader)
    begun = numbers_of((next(batches) for _ in range(5)), [server.pid], 2)
    resumed = load(shuffled(shards), server)
    resumed.load_state_dict(loader.state_dict())
    assert begun + numbers_of(resumed, [server.pid], 2) == whole


def test_pipeline_without_a_seed_is_refused_in_the_middle_of_a_pass(shards, server):
    def begin():
        return load(pipeline(shards, shardshuffle=8).shuffle(10), server)

    loader = begin()
    numbers_of(itertools.islice(loader, 4), [server.pid])
    resumed = begin()
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"gives other samples now than those that were delivered: seed what"):
        list(resumed)


def test_saved_pass_goes_on_on_as_many_ranks(shards, server, monkeypatch):
    def begin(rank, world_size, state=None):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        loader = load(pipeline(shards), server, num_workers=1)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    numbers, states = [], []
    for rank in range(2):
        loader = begin(rank, 2)
        numbers += [number for batch in itertools.islice(loader, 2) for number in batch.numbers]
        states.append(loader.state_dict())
    for other in (1, 4):
        with pytest.raises(ValueError, match=rf"rank 0 of 2, and here is .* of {other}: .* as many ranks as before, 2"):
            begin(0, other, states[0])
    for rank in range(2):
        numbers += [number for batch in begin(rank, 2, states[rank]) for number in batch.numbers]
    assert sorted(numbers) == NUMBERS


def load_share(address, shards, pid):
    shares = []
    for make in (pipeline, shuffled):
        for dataset in (make(shards), RPCDataset(address, make, shards)):
            options = {} if isinstance(dataset, RPCDataset) else {"workers": address}
            loader = RPCDataloader(dataset, batch_size=4, collate_fn=trace, **options)
            shares.append(numbers_of(loader, [int(pid)], 2))
    return shares


def test_ranks_on_one_node_server_get_each_sample_once(shards, server, zygote):
    for one, other in zip(*run_ranks(zygote, load_share, 2, server.address, shards, server.pid), strict=True):
        assert sorted(one + other) == NUMBERS
        assert len(one) == len(other) == 20


def test_pipeline_that_does_not_split_by_rank_is_refused_in_a_distributed_job(shards, server, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = load(pipeline(shards, nodesplitter=wds.single_node_only), server)
    with pytest.raises(ValueError, match="nodesplitter"):
        next(iter(loader))
