"""States of streams, in the passes that follow a resumed one or a lost worker: each is whole, in the same process."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import weakref

import pytest
import torch

from rpcdataloader import RPCDataloader
from tests.support.streams import (
    Buffered,
    Lasting,
    Parts,
    Placed,
    Seekable,
    Sharded,
    Tallied,
    Told,
    Unloadable,
    Wrapped,
)

SIZES = [14, 9]
KINDS = {
    "without a state": Parts,
    "of another protocol": Told,
    "of the iterator": Seekable,
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


def test_dataset_into_which_a_state_was_loaded_is_freed():
    loader = loader_of("for all iterations", "inline", 1)
    list(itertools.islice(loader, 2))
    loader.load_state_dict(loader.state_dict())
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


def test_methods_of_another_protocol_are_not_called():
    loader = RPCDataloader(Told(SIZES), 4, workers="inline")
    list(itertools.islice(loader, 2))
    assert loader.state_dict()["streams"][0][2] == ""
