"""States of streams, in the passes that follow a resumed one or a lost worker: each is whole, in the same process."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader
from tests.conftest import wait_until
from tests.support.streams import (
    Buffered,
    Entered,
    Lasting,
    Own,
    Paired,
    Parts,
    Placed,
    Seekable,
    Sharded,
    Tallied,
    Telling,
    Told,
    Unloadable,
    Wrapped,
    stream_number,
)

SIZES = [14, 9]
KINDS = {
    "without a state": Parts,
    "of another protocol": Told,
    "of the iterator": Seekable,
    "of a dataset that is its iterator": Own,
    "of dataset and iterator": Paired,
    "with a buffer": Buffered,
    "for the next iteration": Placed,
    "for the next iteration, with a count for each": Tallied,
    "for all iterations": Lasting,
    "for all iterations, of two parts": Sharded,
    "for all iterations, inside": lambda sizes: Wrapped(Lasting(sizes)),
}


def with_pid(samples):
    return os.getpid(), samples


def loader_of(kind, where, num_streams, **options):
    options = {"collate_fn": with_pid, "persistent_workers": True, **options}
    num_workers = 0 if where == "inline" else num_streams
    return RPCDataloader(KINDS[kind](SIZES[:num_streams]), 4, workers=where, num_workers=num_workers, **options)


def numbers(batches):
    return [number for _pid, samples in batches for number in samples]


def whole(num_streams):
    return sorted(100 * stream + number for stream in range(num_streams) for number in range(SIZES[stream]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["inline", "workers"])
def test_epochs_after_a_resumed_one_are_those_of_an_uninterrupted_training(shared_server, kind, where):
    num_streams = 1 if where == "inline" else 2
    where = "inline" if where == "inline" else shared_server.address
    torch.manual_seed(3)
    loader = loader_of(kind, where, num_streams)
    expected = [numbers(loader) for _epoch in range(4)]
    torch.manual_seed(3)
    loader = loader_of(kind, where, num_streams)
    epochs = [numbers(loader)]
    begun = numbers(itertools.islice(loader, 3))
    state = json.loads(json.dumps(loader.state_dict()))
    loader = loader_of(kind, where, num_streams)
    loader.load_state_dict(state)
    epochs += [begun + numbers(loader), numbers(loader), numbers(loader)]
    assert epochs == expected
    assert all(sorted(epoch) == whole(num_streams) for epoch in epochs)


class Chosen(Placed):
    """The script chooses its epoch, which is in its state, too."""

    def __iter__(self):
        epoch = self.epoch
        yield from super().__iter__()
        self.epoch = epoch


class ChosenByMethod(Chosen):
    """By a method."""

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize(
    ("place", "kind", "persistent"),
    [
        # The batch size is exact for one of the streams.
        *(
            ("inline", kind, persistent)
            for kind in [*KINDS, "chosen", "chosen by a method"]
            for persistent in (True, False)
        ),
        *(
            ("workers", kind, True)
            for kind in ("of dataset and iterator", "for the next iteration", "for all iterations")
        ),
    ],
)
def test_epoch_after_an_ended_one_is_the_next_one_for_another_process(place, kind, persistent):
    """Saved with the last batch, of which one stream has ended before; once its end is told; and as the next begins."""
    make_dataset = {**KINDS, "chosen": Chosen, "chosen by a method": ChosenByMethod}[kind]
    num_streams, batch_size = (1, 7) if place == "inline" else (2, 3)
    options = {"persistent_workers": persistent, "collate_fn": with_pid}
    options |= {"workers": "inline"} if place == "inline" else {"num_workers": 2}

    def make():
        dataset = make_dataset(SIZES[:num_streams])
        return RPCDataloader(dataset, batch_size, **options)

    def begin(loader, epoch):
        if "chosen" in kind and place == "inline":
            loader.dataset.epoch = epoch
        return iter(loader)

    def train(stop):
        torch.manual_seed(3)
        loader, epochs = make(), []
        for epoch in range(3):
            batches = begin(loader, epoch)
            if (stop, epoch) == ("begun", 1):
                loader, batches = elsewhere(loader, epoch)
            epochs.append(numbers(batches) if stop != "last" or epoch else [])
            if (stop, epoch) == ("last", 0):
                for _batch in range(num_batches):
                    epochs[0] += numbers([next(batches)])
                loader, batches = elsewhere(loader, epoch)
                epochs[0] += numbers(batches)
            if (stop, epoch) == ("told", 0):
                loader, _batches = elsewhere(loader, None)
        return epochs

    def elsewhere(loader, epoch):
        state, generator = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
        loader = make()
        loader.load_state_dict(state)
        torch.set_rng_state(generator)
        return loader, None if epoch is None else begin(loader, epoch)

    num_batches = sum(-(-size // batch_size) for size in SIZES[:num_streams])
    expected = train(None)
    for stop in "last", "told", "begun":
        assert train(stop) == expected, stop


@pytest.mark.parametrize("num_taken", [None, 1])
@pytest.mark.parametrize("place", ["inline", "inline, persistent", "worker, persistent"])
@pytest.mark.parametrize("kind", [Entered, Telling, Placed, Tallied])
def test_epoch_after_two_whole_ones_or_two_left_early_is_the_next_one_for_another_process(kind, place, num_taken):
    options = {"num_workers": 1} if "worker" in place else {"workers": "inline"}
    options["persistent_workers"] = "persistent" in place

    def begin():
        loader = RPCDataloader(kind([25]), 2, collate_fn=list, **options)
        for _epoch in range(2):
            list(itertools.islice(loader, num_taken))
        return loader

    loader = begin()
    expected = [list(loader), list(loader)]
    for is_begun in [True] if num_taken else [False, True]:
        loader = begin()
        batches = iter(loader) if is_begun else None
        state = json.loads(json.dumps(loader.state_dict()))
        del batches
        loader = RPCDataloader(kind([25]), 2, collate_fn=list, **options)
        loader.load_state_dict(state)
        assert [list(loader), list(loader)] == expected, is_begun


@pytest.mark.parametrize("num_epochs", [0, 1])
@pytest.mark.parametrize("num_taken", range(1, 5))
@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_state_that_holds_for_one_iteration_is_not_set_back(num_epochs, num_taken, batch_size, caplog):
    def make(seed):
        return RPCDataloader(
            Tallied([4], seed=seed),
            batch_size,
            workers="inline",
            persistent_workers=True,
            collate_fn=list if batch_size else None,
        )

    loader = make(7)
    expected = [list(loader) for _epoch in range(4)]
    loader = make(7)
    epochs = [list(loader) for _epoch in range(num_epochs)]
    begun = list(itertools.islice(loader, min(num_taken, len(expected[0]))))
    state = json.loads(json.dumps(loader.state_dict()))
    loader = make(0)  # the seed is that of the state
    loader.load_state_dict(state)
    epochs.append(begun + list(loader))
    epochs += [list(loader) for _epoch in range(3 - num_epochs)]
    assert epochs == expected
    assert not caplog.records


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_after_one_with_a_lost_worker_are_whole(shared_server, kind):
    torch.manual_seed(3)
    loader = loader_of(kind, shared_server.address, 2)
    for epoch in range(4):
        seen = []
        for number, (pid, samples) in enumerate(loader):
            seen += samples
            if epoch == 1 and number == 2:
                os.kill(pid, signal.SIGKILL)
        assert sorted(seen) == whole(2), epoch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_taken", [0, 1])
def test_resumed_pass_that_is_left_early_takes_nothing_from_the_next_one(shared_server, kind, num_taken):
    loader = loader_of(kind, shared_server.address, 2)
    list(itertools.islice(loader, 3))
    state = loader.state_dict()
    loader = loader_of(kind, shared_server.address, 2)
    loader.load_state_dict(state)
    list(itertools.islice(loader, num_taken))
    for _epoch in range(2):
        assert sorted(numbers(loader)) == whole(2)


class Restarting(Parts):
    """The state of its end is its beginning, as that of a loader of torchdata's nodes."""

    first = place = 0

    def __iter__(self):
        size = self.sizes[stream_number()]
        first, self.first = self.first % size, 0
        for place in range(first, size):
            self.place = place + 1
            yield self.make(place)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.first = state["place"]


class Counted(Parts):
    """Has one number: that of its samples in all epochs."""

    given = 0

    def __iter__(self):
        epoch, first = divmod(self.given, self.sizes[stream_number()])
        order = random.Random(epoch).sample(range(self.sizes[stream_number()]), self.sizes[stream_number()])
        for number in order[first:]:
            self.given += 1
            yield self.make(number)

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


@pytest.mark.parametrize("kind", [Restarting, Counted])
@pytest.mark.parametrize("num_taken", range(6))
def test_stream_whose_end_is_its_beginning_gives_nothing_again_after_its_last_full_batch(
    shared_server, kind, num_taken
):
    """Once a worker was asked for more, as it is while the loop has its last batch."""
    sizes, last = [12, 8], [5, 4]

    def make():
        return RPCDataloader(kind(sizes), 4, collate_fn=list, workers=shared_server.address, num_workers=2)

    loader = make()
    expected = list(loader)
    loader = make()
    batches = iter(loader)
    begun = list(itertools.islice(batches, num_taken))
    wait_until(lambda: [each[4] for each in loader.state_dict()["streams"]] == [num_taken >= each for each in last])
    state = json.loads(json.dumps(loader.state_dict()))
    loader = make()
    loader.load_state_dict(state)
    assert begun + list(loader) == expected


class Again(Parts):
    """Counts its epochs as they begin, without a state."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        yield from (1000 * self.epoch + number for number in super().__iter__())


@pytest.mark.parametrize(("kind", "drop_last"), [(Again, False), (Placed, True)])
def test_stream_that_has_ended_is_begun_again_where_that_may_matter(shared_server, kind, drop_last):
    """It counts its epochs as it begins; or ``drop_last`` has left samples out, which this loader gives."""
    options = {"collate_fn": list, "persistent_workers": True, "workers": shared_server.address, "num_workers": 2}
    sizes = [4, 13] if drop_last else [4, 12]
    loader = RPCDataloader(kind(sizes), 2, drop_last=drop_last, **options)
    batches = iter(loader)
    begun = list(itertools.islice(batches, 6))
    wait_until(lambda: not batches.driver.engine.table.needs(0))  # the end of stream 0 was answered
    state, rest = loader.state_dict(), list(batches)
    following = list(loader)
    loader = RPCDataloader(kind(sizes), 2, **options)
    loader.load_state_dict(state)
    if drop_last:
        found = [number for batch in [*begun, *loader] for number in batch]
        assert sorted(found) == [*range(4), *range(100, 113)]
    else:
        assert [list(loader), list(loader)] == [rest, following]


@pytest.mark.parametrize("kind", [Placed, Lasting])
@pytest.mark.parametrize("where", ["inline", "workers"])
@pytest.mark.parametrize("transform", [None, float])
def test_epochs_after_a_state_of_the_last_batch_are_whole(shared_server, kind, where, transform):
    def make():
        place = {"workers": "inline"} if where == "inline" else {"workers": shared_server.address, "num_workers": 1}
        return RPCDataloader(kind([8]), 4, transform=transform, persistent_workers=True, **place)

    loader = make()
    list(itertools.islice(loader, 2))
    state = json.loads(json.dumps(loader.state_dict()))
    loader = make()
    loader.load_state_dict(state)
    epochs = [[int(number) for batch in loader for number in batch] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[], [*range(8)], [*range(8)]]


@pytest.mark.parametrize("persistent", [False, True])
def test_state_in_a_dataset_of_this_process_holds_for_no_other_loader(persistent):
    dataset = Lasting(SIZES)

    def make():
        return RPCDataloader(dataset, 4, workers="inline", collate_fn=with_pid, persistent_workers=persistent)

    loader = make()
    list(itertools.islice(loader, 2))
    states = [loader.state_dict()]
    list(itertools.islice(loader, 1))
    states.append(loader.state_dict())
    for state in states:
        loader.load_state_dict(state)
        assert len(numbers(loader)) == SIZES[0] - state["streams"][0][0]
        assert sorted(numbers(make())) == whole(1)


@pytest.mark.parametrize("num_passes", [1, 2])
def test_dataset_into_which_a_state_was_loaded_is_freed(num_passes):
    loader = loader_of("for all iterations", "inline", 1)
    list(itertools.islice(loader, 2))
    loader.load_state_dict(loader.state_dict())
    for _ in range(num_passes):
        numbers(loader)
    gone = weakref.ref(loader.dataset)
    del loader
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("stop", ["killed", "saved"])
def test_stream_whose_state_cannot_be_loaded_is_read_again(shared_server, stop):
    def make():
        return RPCDataloader(Unloadable(SIZES), 4, workers=shared_server.address, num_workers=2, collate_fn=with_pid)

    expected, loader, seen = numbers(make()), make(), []
    for number, (pid, samples) in enumerate(loader):
        seen += samples
        if number == 2 and stop == "killed":
            os.kill(pid, signal.SIGKILL)
        if number == 2 and stop == "saved":
            state, loader = json.loads(json.dumps(loader.state_dict())), make()
            loader.load_state_dict(state)
            seen += numbers(loader)
            break
    assert seen == expected


class Other(Unloadable):
    """Refuses the state, and is another dataset."""

    def make(self, number):
        self.place += 1
        return super().make(number)


def test_state_that_another_dataset_refuses_is_not_replayed():
    loader = RPCDataloader(Placed(SIZES), 4, workers="inline")
    list(itertools.islice(loader, 2))
    other = RPCDataloader(Other(SIZES), 4, workers="inline")
    other.load_state_dict(loader.state_dict())
    with pytest.raises(IndexError, match="list index out of range"):
        list(other)


class Opaque(Lasting):
    """Keeps what was loaded where nobody can see it."""

    def __init__(self, sizes):
        super().__init__(sizes)
        first = 0

        def access(*loaded):
            nonlocal first
            if loaded:
                (first,) = loaded
            return first

        self.access = access

    @property
    def first(self):
        return self.access() if "access" in vars(self) else 0

    @first.setter
    def first(self, value):
        if "access" in vars(self):
            self.access(value)


def test_loaded_state_that_holds_and_cannot_be_set_back_is_told(caplog):
    loader = RPCDataloader(Opaque(SIZES), 4, workers="inline", persistent_workers=True)
    list(itertools.islice(loader, 2))
    loader.load_state_dict(loader.state_dict())
    list(loader)
    assert not caplog.records
    list(loader)
    (record,) = caplog.records
    assert "begin where an earlier one was resumed" in record.getMessage()


class Within:
    """A stream, or a sampler, whose position is that of an object inside, and one of its own that is set again."""

    def __init__(self):
        self.inside, self.start, self.place = SimpleNamespace(place=0), 0, 0

    def __len__(self):
        return 8

    def __iter__(self):
        self.start = self.inside.place
        for number in range(self.start, 8):
            self.place = number + 1
            yield number

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.inside.place = self.start = state["place"]


class WithinStream(Within, IterableDataset):
    pass


@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_loaded_state_that_holds_inside_is_told_once(kind, caplog):
    dataset, sampler = (WithinStream(), None) if kind == "stream" else (range(8), Within())
    loader = RPCDataloader(dataset, 4, sampler=sampler, workers="inline", persistent_workers=True, collate_fn=list)
    list(itertools.islice(loader, 1))
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == [[4, 5, 6, 7]]
    assert not caplog.records
    assert [list(loader) for _ in range(2)] == [[[4, 5, 6, 7]]] * 2
    (record,) = caplog.records
    assert "begin where an earlier one was resumed" in record.getMessage()


class Abstract(Within):
    """Its base class has methods that it does not implement."""

    def state_dict(self):
        raise NotImplementedError

    def load_state_dict(self, state):
        raise NotImplementedError


class AbstractStream(Abstract, IterableDataset):
    pass


@pytest.mark.parametrize("where", ["inline", "local:1"])
@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_state_that_is_not_implemented_is_none(kind, where):
    def make():
        dataset, sampler = (AbstractStream(), None) if kind == "stream" else (range(8), Abstract())
        return RPCDataloader(dataset, 2, sampler=sampler, workers=where, num_workers=1, collate_fn=list)

    loader = make()
    assert list(itertools.islice(loader, 2)) == [[0, 1], [2, 3]]
    state, loader = json.loads(json.dumps(loader.state_dict())), make()
    loader.load_state_dict(state)
    assert [list(loader) for _ in range(2)] == [[[4, 5], [6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]]


def test_methods_of_another_protocol_are_not_called():
    loader = RPCDataloader(Told(SIZES), 4, workers="inline")
    list(itertools.islice(loader, 2))
    assert loader.state_dict()["streams"][0][2] == ""


class Counting(IterableDataset):
    """A stream that counts its epochs, each of which has another order of all, of which each worker takes its share."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def __iter__(self):
        return iter(self.order())

    def order(self):
        self.epoch += 1
        generator, worker = torch.Generator().manual_seed(self.epoch), get_worker_info()
        return torch.randperm(self.size, generator=generator).tolist()[worker.id :: worker.num_workers]


class CountingLate(Counting):
    """It counts as its first sample is taken."""

    def __iter__(self):
        yield from self.order()


@pytest.mark.parametrize("kind", [Counting, CountingLate])
@pytest.mark.parametrize("num_taken", [None, 0, 1])
@pytest.mark.parametrize("where", ["here", "node"])
def test_epochs_that_a_stream_counts_are_whole_after_one_that_was_left(shared_server, kind, num_taken, where):
    options = {"workers": shared_server.address} if where == "node" else {}
    loader = RPCDataloader(kind(12), 2, num_workers=2, persistent_workers=True, **options)
    if num_taken is not None:
        list(loader)
    list(itertools.islice(loader, num_taken or 1))
    if num_taken == 0:
        iter(loader)  # it is left at once
    for _epoch in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(12))


class CountingSamples(Counting):
    """It counts its epochs, and the samples of each."""

    def __init__(self, size):
        super().__init__(size)
        self.position = 0

    def __iter__(self):
        for number in self.order()[self.position :]:
            self.position += 1
            yield number
        self.position = 0


@pytest.mark.parametrize("kind", [Counting, CountingLate, CountingSamples])
@pytest.mark.parametrize("num_taken", [None, 3])
def test_epochs_that_a_stream_counts_are_whole_after_the_loss_of_a_worker(shared_server, kind, num_taken, caplog):
    options = {"collate_fn": with_pid, "persistent_workers": True, "workers": shared_server.address, "num_workers": 2}
    loader = RPCDataloader(kind(12), 2, **options)
    for epoch in range(4):
        iterator = iter(loader)
        batches = list(itertools.islice(iterator, num_taken))
        if num_taken is not None:
            os.kill(batches[-1][0], signal.SIGKILL)
        batches += iterator
        assert sorted(numbers(batches)) == list(range(12)), epoch
        if num_taken is None:
            os.kill(batches[-1][0], signal.SIGKILL)
    assert "gives other samples" not in caplog.text


def test_stream_that_counts_its_epochs_goes_on_in_another_process(shared_server):
    def make():
        return RPCDataloader(
            Counting(12), 2, num_workers=2, persistent_workers=True, workers=shared_server.address, collate_fn=list
        )

    loader = make()
    expected = [list(loader) for _epoch in range(3)][-1]
    loader = make()
    for _epoch in range(2):
        list(loader)
    begun = list(itertools.islice(loader, 2))
    other = make()
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert begun + list(other) == expected
