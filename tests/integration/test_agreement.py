"""Ranks that would wait for each other for ever are told so when the epoch begins, and no others are."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import wait_until

BEGIN = """
import json, os, sys
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler
from rpcdataloader import RPCDataloader, ResumableDistributedSampler
from tests.integration.datasets import Numbers, wait_for

rank = int(sys.argv[1])

def make(dataset, batch_size=2, sampler=DistributedSampler, **options):
    return RPCDataloader(dataset, batch_size, sampler=sampler(dataset), **options)

def outcome(loader):
    try:
        return len(list(loader))
    except ValueError as error:
        return str(error)

results = []
"""
WITH_FILE = "dist.init_process_group('gloo', init_method='file://' + sys.argv[2], rank=rank, world_size=2)\n"
# Once both have come: what one says last, the other may read.
END = """
dist.barrier()
dist.destroy_process_group()
print(json.dumps(results))
"""


@pytest.fixture
def run_ranks(zygote, tmp_path):
    """Run a script as two ranks; gives what each has left in ``results``."""

    def run(source):
        script = BEGIN + WITH_FILE + source + END
        ranks = [zygote.start(script, rank, tmp_path / "rendezvous", ends_quickly=True) for rank in range(2)]
        ended = [rank.wait(60) for rank in ranks]
        for one in ended:
            assert (one.status, one.errors) == (0, "")
        return [json.loads(one.output) for one in ended]

    return run


ALARMS = """
results.append(outcome(make(Numbers(20 + 2 * rank))))
results.append(outcome(make(Numbers(20), batch_size=2 + rank)))
results.append(outcome(make(Numbers(20), batch_size=3, drop_last=rank == 1)))
results.append(outcome(make(Numbers(20 + 2 * rank), batch_size=None)))
results.append(outcome(make(Numbers(20 + 4 * rank), sampler=ResumableDistributedSampler)))
results.append(outcome(make(Numbers(20 + 4 * rank), workers="inline")))

# In the second epoch.
loader = make(Numbers(20))
assert outcome(loader) == 5
dist.barrier()
loader.batch_sampler.batch_size += rank
results.append(outcome(loader))

# The second of two that the same line makes.
loaders = [make(Numbers(20 + 10 * rank * number)) for number in range(2)]
assert outcome(loaders[0]) == 5
dist.barrier()
results.append(outcome(loaders[1]))
"""
COUNTS = [(5, 6), (5, 4), (4, 3), (10, 11), (5, 6), (5, 6), (5, 4), (5, 8)]


def test_unequal_numbers_of_batches_are_an_error_on_the_rank_that_comes_second(run_ranks):
    outcomes = run_ranks(ALARMS)
    for counts, *found in zip(COUNTS, *outcomes, strict=True):
        for rank in range(2):
            if found[rank] != counts[rank]:  # of two, the one that came first goes on
                assert found[1 - rank] == counts[1 - rank]
                assert re.fullmatch(
                    rf"rank {rank} has {counts[rank]} batches in this epoch, and rank {1 - rank} has "
                    rf"{counts[1 - rank]}: .*DistributedSampler.*same length.*drop_last.*check_num_batches=False.*Join",
                    found[rank],
                )
                break
        else:
            raise AssertionError(f"nobody was told of {counts}")


NO_ALARMS = """
def check(*loaders):
    # What one leaves, the other must find.
    for loader in loaders:
        for _epoch in range(2):
            dist.barrier()
            assert (found := outcome(loader)) == len(loader), found

check(
    make(Numbers(20 + 10 * rank), check_num_batches=False),
    RPCDataloader(Numbers(20 + 10 * rank), 2),
    RPCDataloader(Numbers(20), sampler=range(3 + rank)),
    RPCDataloader(Numbers(20 + 10 * rank), 2, sampler=DistributedSampler(range(20 + 10 * rank), 1, 0)),
    RPCDataloader(Numbers(40), 2, sampler=DistributedSampler(range(20 + 10 * rank), 4, rank)),
)

class Unrepeated(DistributedSampler):
    def __init__(self, dataset):
        super().__init__(dataset)
        self.num_samples = len(range(self.rank, len(dataset), self.num_replicas))
        self.total_size = len(dataset)

class Bucketed(BatchSampler):
    def __len__(self):
        return super().__len__() - rank
    def __iter__(self):
        return iter(list(super().__iter__())[:len(self)])

numbers = Numbers(21)
bucketed = Bucketed(DistributedSampler(numbers), 2, False)
check(make(numbers, 1, Unrepeated), RPCDataloader(numbers, batch_sampler=bucketed))

# Two of the same line, in any order.
pair = [make(Numbers(20 + 10 * number)) for number in range(2)]
for number in (rank, 1 - rank):
    dist.barrier()
    assert (found := outcome(pair[number])) == (5, 8)[number], found

# Only one rank validates, looks at a batch, or has one more loader.
train = make(numbers)
if rank == 0:
    next(iter(train))
    assert outcome(make(Numbers(30))) == 8
    assert outcome(RPCDataloader(Numbers(30), 2)) == 15
dist.barrier()
for epoch in range(4):
    train.sampler.set_epoch(epoch)
    assert outcome(train) == 6
    if rank == 0:
        assert outcome(RPCDataloader(Numbers(30), 2)) == 15
# The same, on a line of their own, with numbers that go with the epoch.
loader = make(numbers)
if rank == 0:
    next(iter(loader))
for epoch in range(3):
    if rank == 0:
        dist.barrier()
    loader.sampler.set_epoch(epoch)
    loader.sampler.num_samples = 12 - 2 * epoch
    loader.sampler.total_size = 2 * loader.sampler.num_samples
    numbers.size = loader.sampler.total_size
    assert (found := outcome(loader)) == 6 - epoch, found
    if rank == 1:
        dist.barrier()
    dist.barrier()

# Each goes on where it was.
sampler = ResumableDistributedSampler(whole := Numbers(24))
loader = RPCDataloader(whole, 2, sampler=sampler)
iterator = iter(loader)
for _ in range(1 + 2 * rank):
    next(iterator)
dist.barrier()
loader.load_state_dict(loader.state_dict())
assert (found := outcome(loader)) == 5 - 2 * rank, found
dist.barrier()
assert outcome(loader) == 6
"""


def test_ranks_that_may_differ_are_left_alone(run_ranks):
    run_ranks(NO_ALARMS)


MANY_EPOCHS = """
store = dist.distributed_c10d._get_default_store()
loaders = [make(Numbers(4)) for _ in range(3)]
for loader in loaders:
    list(loader)
dist.barrier()
before = store.num_keys()
dist.barrier()
for epoch in range(50):
    for loader in loaders:
        loader.sampler.set_epoch(epoch)
        list(loader)
    list(make(Numbers(4)))
    if epoch == 0:
        dist.barrier()
        results.append(store.num_keys() - before)
        dist.barrier()
dist.barrier()
results.append(store.num_keys() - before)
"""


def test_store_does_not_grow_with_the_epochs(run_ranks):
    # One key for the line that makes a loader in each epoch.
    for first, last in run_ranks(MANY_EPOCHS):
        assert (first, last) == (1, 1)


STORE_THAT_GOES = """
from datetime import timedelta
port = int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, port == 0, timeout=timedelta(seconds=30), wait_for_workers=False)
if port == 0:
    print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
loader = make(Numbers(20))
assert outcome(loader) == 5
dist.barrier()
print("ready", flush=True)
wait_for(sys.argv[3])
assert [outcome(loader) for _epoch in range(3)] == [5, 5, 5]
print("done", flush=True)
os._exit(0)  # a process group that has lost its store need not end well
"""


def test_training_goes_on_without_the_store(zygote, fifo):
    first = zygote.start(BEGIN + STORE_THAT_GOES, 0, 0, fifo)
    wait_until(lambda: "\n" in first.output, 30)
    second = zygote.start(BEGIN + STORE_THAT_GOES, 1, first.output.split()[0], fifo)
    wait_until(lambda: "ready" in first.output and "ready" in second.output, 30)
    first.kill()
    first.wait()
    with open(fifo, "w"):
        pass
    ended = second.wait(60)
    assert ended.status == 0, ended.errors
    assert ended.output == "ready\ndone\n"
