"""Streams of iterable-style datasets that go on with another number of ranks."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.integrations import gather_states
from tests.integration.origins import run_ranks
from tests.integration.streams import Buffered

pytestmark = pytest.mark.usefixtures("clean_client")


class OfRank(IterableDataset):
    """Samples say which stream of which rank they are of, and what was drawn for them."""

    def __init__(self, sizes):
        self.sizes = sizes  # of the streams of each rank

    def __iter__(self):
        rank, info = int(os.environ["RANK"]), get_worker_info()
        for number in range(self.sizes[rank][info.id]):
            yield rank, int(os.environ["WORLD_SIZE"]), info.id, info.num_workers, number, random.random(), info.seed


class WithState(Buffered):
    """Shuffled, with a state of its own: ``1000 * rank + 100 * stream + number``."""

    def __init__(self, sizes):
        super().__init__([])
        self.of_ranks = sizes

    def __iter__(self):
        self.sizes = self.of_ranks[int(os.environ["RANK"])]
        return super().__iter__()

    def make(self, number):
        return 1000 * int(os.environ["RANK"]) + super().make(number)


@pytest.fixture
def loaders(monkeypatch, wide_servers):
    """Make the loaders of all ranks of a job, one after the other in this process."""

    def make(dataset, num_ranks, states=None, num_workers=2, **options):
        for rank in range(num_ranks):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
            torch.manual_seed(rank)  # ranks need not begin with the same seed
            if not isinstance(dataset, RPCDataset):
                options["workers"] = [server.address for server in wide_servers]
            loader = RPCDataloader(dataset, 2, num_workers=num_workers, collate_fn=list, **options)
            if states is not None:
                loader.load_state_dict(states)
            yield loader

    return make


def run(loaders, num_batches=None):
    """Batches of all ranks, each as far as given, and the states after them."""
    batches, states = [], []
    for rank, loader in enumerate(loaders):
        length = num_batches[rank] if isinstance(num_batches, list) else num_batches
        batches += itertools.islice(loader, length)
        states.append(json.loads(json.dumps(loader.state_dict())))
    return batches, states


def by_stream(batches):
    streams = {}
    for sample in itertools.chain.from_iterable(batches):
        streams.setdefault(tuple(sample[:4]), []).append(tuple(sample[4:]))
    return streams


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 1), (1, 2), (3, 2)])
def test_streams_keep_who_they_were_on_another_number_of_ranks(loaders, before, after):
    dataset = OfRank([[7, 5], [6, 9], [0, 8], [3, 4]])
    whole, _states = run(loaders(dataset, before))
    begun, states = run(loaders(dataset, before), [3, 0, 2, 1][:before])
    rest, states = run(loaders(dataset, after, random.sample(states, before)), 1)  # in any order
    more, _states = run(loaders(dataset, after, states))
    assert by_stream(begun + rest + more) == by_stream(whole)


def test_state_of_the_new_rank_alone_is_enough_for_it(loaders):
    dataset = OfRank([[5, 5], [5, 5]])
    whole, _states = run(loaders(dataset, 2))
    begun, states = run(loaders(dataset, 2), 2)
    rest, states = run(loaders(dataset, 1, states), 3)
    more, _states = run(loaders(dataset, 1, states[0]))
    assert by_stream(begun + rest + more) == by_stream(whole)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_datasets_with_a_state_of_their_own_go_on(loaders, before, after):
    dataset = WithState([[7, 5], [6, 9], [1, 8], [3, 4]])
    whole, _states = run(loaders(dataset, before))
    begun, states = run(loaders(dataset, before), 3)
    rest, _states = run(loaders(dataset, after, states))
    numbers = list(itertools.chain.from_iterable(begun + rest))
    assert sorted(numbers) == sorted(itertools.chain.from_iterable(whole))
    stream = [number for number in numbers if number // 100 == 11]
    assert stream == [number for number in itertools.chain.from_iterable(whole) if number // 100 == 11]


def test_next_epoch_has_the_ranks_of_the_new_job(loaders):
    dataset = OfRank([[3, 3], [3, 3], [3, 3], [3, 3]])
    _begun, states = run(loaders(dataset, 4), 1)
    for loader in loaders(dataset, 2, states, persistent_workers=True):
        assert {sample[1] for batch in loader for sample in batch} == {4}
        assert {sample[1:4:2] for batch in loader for sample in batch} == {(2, 2)}


def test_stream_is_who_it_was_after_the_loss_of_its_worker(loaders, serve):
    dataset = RPCDataset(serve("--num-workers", "2").address, OfRank, [[40], [40]])
    whole, _states = run(loaders(dataset, 2, num_workers=1))
    begun, states = run(loaders(dataset, 2, num_workers=1), 2)
    (loader,) = loaders(dataset, 1, states, num_workers=1)
    iterator = iter(loader)
    rest = [next(iterator)]
    os.kill(iterator.driver.workers[0].pid, signal.SIGKILL)
    rest += iterator
    assert by_stream(begun + rest) == by_stream(whole)


def test_ranks_at_their_ends_give_nothing_more(loaders):
    dataset = OfRank([[4, 4]] * 4)
    whole, states = run(loaders(dataset, 2), [None, 1])
    rest, _states = run(loaders(dataset, 4, states))
    assert {sample[0] for batch in rest for sample in batch} == {1}
    assert sum(map(len, whole + rest)) == 16
    _batches, states = run(loaders(dataset, 2))
    assert states[0]["finished"]
    rest, _states = run(loaders(dataset, 4, states, persistent_workers=True))
    assert {sample[1] for batch in rest for sample in batch} == {4}  # the next epoch


def test_states_that_do_not_fit_are_refused(loaders):
    dataset = OfRank([[4, 4], [4, 4], [4, 4]])
    _begun, states = run(loaders(dataset, 3), 1)
    for given, message in [
        (states, "6 streams, those of 3 ranks, cannot be dealt out evenly to 4 ranks.* divides 6"),
        (states[:2], "give the states of all ranks, each once: these are of rank 0 of 3, 1 of 3"),
        ([*states, states[0]], "each once: these are of rank 0 of 3, 0 of 3, 1 of 3, 2 of 3"),
        ([*states[:2], {"version": 2}], "1 of the 3 states are of ranks that had not begun"),
        ([*states[:2], {**states[2], "epoch": 1}], r"different epochs when they were saved: \[0, 1\]"),
        ([], "empty list: give the states of all ranks"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(loaders(dataset, 4, given))
    with pytest.raises(TypeError, match="but is a int"):
        list(loaders(dataset, 4, [1]))
    with pytest.raises(ValueError, match=r"load a list of the states of all 3 ranks \(gather_states\)"):
        run(loaders(dataset, 4, states[0]))


def gather(store):
    alone = gather_states({"of": "this rank"})
    dist.init_process_group("gloo", f"file://{store}", rank=int(os.environ["RANK"]), world_size=2)
    found = gather_states({"of": f"rank {dist.get_rank()}"})
    dist.barrier()
    dist.destroy_process_group()
    return alone, found


def test_states_of_all_ranks_are_gathered(zygote, tmp_path):
    for alone, found in run_ranks(zygote, gather, 2, tmp_path / "store"):
        assert alone == [{"of": "this rank"}]
        assert found == [{"of": "rank 0"}, {"of": "rank 1"}]
