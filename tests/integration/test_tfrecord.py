"""TFRecord shards in workers, read without tensorflow."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from tests.integration.origins import Process, numbers_of, run_ranks, trace

tfrecord = pytest.importorskip("tfrecord")
tfrecord_tools = pytest.importorskip("tfrecord.tools")
tfrecord_torch = pytest.importorskip("tfrecord.torch.dataset")

NUMBERS = list(range(40))
DESCRIPTION = {"number": "int"}

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Eight shards of five records, and all of them in one file with an index; gives the folder."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(8):
        write(folder / f"{shard}.tfrecord", NUMBERS[5 * shard : 5 * shard + 5])
    write(folder / "whole", NUMBERS)
    tfrecord_tools.create_index(str(folder / "whole"), str(folder / "index"))
    return str(folder)


def write(path, numbers):
    writer = tfrecord.TFRecordWriter(str(path))
    for number in numbers:
        writer.write({"number": (number, "int"), "name": (b"record %d" % number, "byte")})
    writer.close()


def stamp(record):
    return {"number": record["number"][0], "pid": Process(os.getpid())}


class Shards(IterableDataset):
    """Every file is read by one worker of one rank."""

    def __init__(self, folder):
        self.paths = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".tfrecord"))

    def __iter__(self):
        info = get_worker_info()
        first = int(os.environ["RANK"]) * info.num_workers + info.id
        step = int(os.environ["WORLD_SIZE"]) * info.num_workers
        for path in self.paths[first::step]:
            yield from map(stamp, tfrecord.tfrecord_loader(path, None, DESCRIPTION))


def indexed(folder, **options):
    """One file, of which every worker reads a range."""
    paths = os.path.join(folder, "whole"), os.path.join(folder, "index")
    return tfrecord_torch.TFRecordDataset(*paths, DESCRIPTION, transform=stamp, **options)


def load(dataset, server, **options):
    if not isinstance(dataset, RPCDataset):
        options["workers"] = server.address
    return RPCDataloader(dataset, batch_size=4, collate_fn=trace, num_workers=2, **options)


@pytest.mark.parametrize("make", [Shards, indexed])
def test_workers_share_the_records(make, shards, server):
    for dataset in (make(shards), RPCDataset(server.address, make, shards)):
        numbers = numbers_of(load(dataset, server), [server.pid], 2)
        assert sorted(numbers) == NUMBERS
        assert numbers == numbers_of(load(dataset, server), [server.pid], 2)


def test_shuffled_records_are_the_same_again_and_for_a_saved_pass(shards, server):
    """The shuffle of the library draws from numpy's global generator, which is seeded."""

    def begin():
        torch.manual_seed(0)
        return load(indexed(shards, shuffle_queue_size=8), server)

    whole = numbers_of(begin(), [server.pid], 2)
    assert sorted(whole) == NUMBERS
    loader = begin()
    batches = iter(loader)
    begun = numbers_of((next(batches) for _ in range(5)), [server.pid], 2)
    resumed = load(indexed(shards, shuffle_queue_size=8), server)
    resumed.load_state_dict(loader.state_dict())
    assert begun + numbers_of(resumed, [server.pid], 2) == whole


def load_share(address, folder, pid):
    dataset = RPCDataset(address, Shards, folder)
    return numbers_of(RPCDataloader(dataset, batch_size=4, collate_fn=trace), [int(pid)], 2)


def test_ranks_on_one_node_server_get_each_record_once(shards, server, zygote):
    one, other = run_ranks(zygote, load_share, 2, server.address, shards, server.pid)
    assert sorted(one + other) == NUMBERS
    assert len(one) == len(other) == 20
