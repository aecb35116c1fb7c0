"""Several trainers share the workers without a word to each other."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import re
import signal
import time
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import ConnectError, ConnectionLostError, RPCTimeoutError
from rpcdataloader.integrations import gather_states
from tests.conftest import close_client, wait_until
from tests.support import datasets
from tests.support.datasets import Augmented, Numbers, augment_batch, notes

pytestmark = pytest.mark.usefixtures("clean_client")


def note_server(log, _number):
    """An init function, once it has its log: notes on which node server the worker is."""
    datasets.note(log, datasets.node_server())


def servers_of(dataset, log, num_expected, **options):
    """How many workers of a loader there are on each server."""
    before = len(notes(log))
    loader = RPCDataloader(dataset, worker_init_fn=partial(note_server, log), persistent_workers=True, **options)
    list(loader)
    wait_until(lambda: len(notes(log)) - before >= num_expected, what="all workers of the loader")
    found = Counter(int(line) for line in notes(log)[before:])
    assert found.total() == num_expected
    return found


@pytest.fixture
def log(tmp_path):
    return str(tmp_path / "log")


def test_num_workers_limits_the_share_and_partition_overrides_the_environment(wide_servers, log, as_rank):
    addresses = [server.address for server in wide_servers]
    first, second = (server.pid for server in wide_servers)
    as_rank(1, 2)
    # Of two ranks on two nodes, each has a node to itself.
    for options, expected in [
        ({"num_workers": 3}, {second: 3}),
        ({"num_workers": 100}, {second: 8}),
        ({"partition": (0, 2)}, {first: 8}),
        ({"partition": None}, {first: 8, second: 8}),
    ]:
        assert servers_of(Numbers(), log, sum(expected.values()), workers=addresses, **options) == expected


def test_more_ranks_than_workers_share_with_one_warning(shared_server, log, as_rank, caplog):
    for rank in (0, 4):
        as_rank(rank, 5)
        dataset = RPCDataset(shared_server.address, Numbers)
        for _epoch in range(2):
            assert servers_of(dataset, log, 1) == Counter({shared_server.pid: 1})
    (record,) = [record for record in caplog.records if "share" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "5 ranks share 2 workers: some are used by more than one rank"


@pytest.mark.parametrize(("rank", "world_size"), [("two", "4"), ("4", "4"), ("-1", "4")])
def test_malformed_environment_is_named(shared_server, as_rank, rank, world_size):
    as_rank(rank, world_size)
    with pytest.raises(ValueError, match="environment variables RANK and WORLD_SIZE"):
        RPCDataset(shared_server.address, Numbers)


def test_groups_share_samples_and_nodes_and_ranks_of_a_group_get_the_same_batches(
    shared_server, second_server, log, as_rank
):
    servers, found = (shared_server, second_server), []
    idle = [set(server.processes()) for server in servers]
    for rank in range(4):
        # Those before it have left: a node that is still full would be passed over.
        close_client()
        wait_until(lambda: all(set(each.processes()) <= idle[number] for number, each in enumerate(servers)))
        as_rank(rank, 4)
        group, before = (rank // 2, 2), len(notes(log))
        # What a rank has drawn before must not matter.
        torch.manual_seed(rank)
        random.seed(rank)
        dataset = RPCDataset([server.address for server in servers], Augmented, 41)
        sampler = DistributedSampler(dataset, group[1], group[0], seed=5)
        loader = RPCDataloader(
            dataset, 4, sampler=sampler, partition=group, generator=torch.Generator().manual_seed(1),
            collate_fn=augment_batch, worker_init_fn=partial(note_server, log),
        )  # fmt: skip
        found.append([])
        for epoch in range(2):
            sampler.set_epoch(epoch)
            found[-1] += [{name: value.tolist() for name, value in batch.items()} for batch in loader]
        # Each group has a node to itself.
        assert {int(line) for line in notes(log)[before:]} == {servers[rank // 2].pid}
    one, like_one, other, like_other = found
    assert (one, other) == (like_one, like_other)
    assert len(one) == 12
    for epoch in slice(6), slice(6, 12):
        indices = [[index for batch in batches[epoch] for index in batch["index"]] for batches in (one, other)]
        # 41 samples for two: one is loaded twice.
        assert set(indices[0] + indices[1]) == set(range(41))
        assert len(indices[0]) == len(indices[1]) == 21
    draws = [{draw for batch in batches for each in batch["draws"] for draw in each} for batches in (one, other)]
    assert len(draws[0]) == len(draws[1]) == 2 * 21 * 4
    assert not draws[0] & draws[1]


class Kinds(Numbers):
    """Each index goes wrong in another way."""

    def __getitem__(self, index):
        if index == 0:
            os._exit(7)
        if index == 1:
            time.sleep(60)
        raise ValueError(f"image {index} is broken")


def take_errors_of_samples(iterator):
    while True:
        with contextlib.suppress(ValueError):
            next(iterator)


def test_errors_name_the_rank(serve, as_rank):
    as_rank(3, 8)
    server = serve("--num-workers", "2")
    options = {"max_retries": 2, "task_timeout": 1.0, "reconnect_timeout": 0.3, "partition": None}
    iterator = iter(RPCDataloader(Kinds(100_000), workers=server.address, **options))
    with pytest.raises(ConnectionLostError, match=r"^\[rank 3 of 8\] batch 0 .* exited with status 7"):
        next(iterator)
    with pytest.raises(RPCTimeoutError, match=r"^\[rank 3 of 8\] batch 1 .* took longer than 1 s"):
        next(iterator)
    with pytest.raises(ValueError, match=r"(?m)^image 2 is broken$") as caught:
        next(iterator)
    assert re.match(r"\n\[rank 3 of 8\] worker \d \(pid ", str(caught.value.__cause__))
    server.signal(signal.SIGKILL)
    with pytest.raises(ConnectionLostError, match=r"^\[rank 3 of 8\] no worker is left"):
        take_errors_of_samples(iterator)


def test_timeout_and_a_node_that_is_not_there_name_the_rank(serve, as_rank, monkeypatch):
    as_rank(3, 8)
    server = serve("--num-workers", "1")
    with pytest.raises(RuntimeError, match=r"^\[rank 3 of 8\] DataLoader timed out after 1 seconds") as caught:
        next(iter(RPCDataloader(Kinds(), workers=server.address, sampler=[1], timeout=1)))
    assert re.search(
        rf"for batch 0 .*, which is at worker 1 \(pid \d+\) on {server.address} \(tasks: ", str(caught.value)
    )
    assert "in __getitem__" in str(caught.value)  # the stack
    server.stop()
    close_client()
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "0.1")
    with pytest.raises(ConnectError, match=r"^\[rank 3 of 8\] cannot connect to "):
        iter(RPCDataloader(Numbers(), workers=server.address))


# Checkpoints with the states of all ranks, from which each takes its own


class OfRank(IterableDataset):
    """Samples say which stream of which rank they are of, and what was drawn for them."""

    def __iter__(self):
        rank, info = int(os.environ["RANK"]), get_worker_info()
        for number in range(7):
            yield rank, int(os.environ["WORLD_SIZE"]), info.id, info.num_workers, number, random.random(), info.seed


@pytest.fixture
def run(as_rank, shared_server):
    """Run the loaders of all ranks of a job, one after the other; returns their samples, and their states."""

    def run(num_ranks, states=None, num_batches=None):
        samples, after = [], []
        for rank in range(num_ranks):
            as_rank(rank, num_ranks)
            torch.manual_seed(rank)  # ranks need not begin with the same seed
            loader = RPCDataloader(OfRank(), 2, num_workers=2, collate_fn=list, workers=shared_server.address)
            if states is not None:
                loader.load_state_dict(states)
            samples += itertools.chain.from_iterable(itertools.islice(loader, num_batches))
            after.append(json.loads(json.dumps(loader.state_dict())))
        return samples, after

    return run


def test_each_rank_takes_its_own_of_the_states_of_all(run):
    """They are gathered in ``test_accelerate``."""
    assert gather_states({"of": "this rank"}) == [{"of": "this rank"}]  # without others
    whole, _states = run(3)
    begun, states = run(3, num_batches=3)
    rest, _states = run(3, random.sample(states, 3))  # in any order
    assert sorted(begun + rest) == sorted(whole)


def test_streams_on_another_number_of_ranks_are_refused(run):
    _begun, states = run(2, num_batches=2)
    for after, given in itertools.product((1, 4), (states, states[0])):
        with pytest.raises(ValueError, match=r"rank 0 of 2, and here is .*: .*go on with as many ranks as before, 2"):
            run(after, given)
