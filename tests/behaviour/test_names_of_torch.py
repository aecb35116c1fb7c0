"""Private names of torch's loader and its iterators that frameworks and scripts use.

Each test writes the idiom from scratch, and drives torch's loader by it, too.
"""

from __future__ import annotations

import os
import pickle
from multiprocessing.context import SpawnContext
from threading import Thread

import pytest
import torch
from torch.utils.data import DataLoader

from rpcdataloader import RPCDataloader
from rpcdataloader.errors import LocalProtocolError
from tests.conftest import descendants, is_running, wait_until
from tests.support.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


class Changing(Numbers):
    """Whose samples say what the dataset was when its worker began."""

    version = 1

    def __getitem__(self, index):
        return index, self.version


def told(batches):
    return [[part.tolist() for part in batch] for batch in batches]


def refreshed(kind, **options):
    dataset = Changing(4)
    loader = kind(dataset, 2, persistent_workers=True, **options)
    epochs = [told(loader)]
    dataset.version = 2
    epochs.append(told(loader))
    loader._iterator = None
    return [*epochs, told(loader)]


def test_workers_are_new_ones_once_a_script_has_dropped_torchs_iterator():
    assert refreshed(RPCDataloader, num_workers=1) == refreshed(DataLoader, num_workers=1)


def test_workers_on_a_node_get_the_changed_dataset_by_that(shared_server):
    versions = [
        [version for _, versions in epoch for version in versions]
        for epoch in refreshed(RPCDataloader, workers=shared_server.address)
    ]
    assert versions == [[1] * 4, [1] * 4, [2] * 4]


def test_workers_end_by_torchs_method_and_the_next_pass_has_others():
    before = set(descendants(os.getpid()))
    loader = RPCDataloader(Changing(4), 2, num_workers=1, persistent_workers=True)
    expected = told(loader)
    iterator = loader._iterator
    workers = set(descendants(os.getpid())) - before
    assert workers
    iterator._shutdown_workers()
    wait_until(lambda: not any(map(is_running, workers)), what="the end of the workers")
    assert next(iterator, None) is None
    assert told(loader) == expected
    assert loader._iterator is not iterator


def test_workers_that_torchs_method_has_ended_early_are_an_error():
    loader = RPCDataloader(Changing(40), 2, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    loader._iterator._shutdown_workers()
    with pytest.raises(LocalProtocolError, match=r"_shutdown_workers\(\) has ended the workers in the middle"):
        list(batches)
    assert len(told(loader)) == 20


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_iterator_is_there_while_workers_persist(persistent_workers):
    for kind in DataLoader, RPCDataloader:
        loader = kind(range(4), num_workers=1, persistent_workers=persistent_workers)
        assert loader._iterator is None
        batches = iter(loader)
        assert loader._iterator is (batches if persistent_workers else None)


def test_subclass_may_keep_an_iterator_of_its_own_under_that_name():
    def drive(base):
        class Kept(base):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self._iterator = super().__iter__()

            def __next__(self):
                return next(self._iterator)

            def __iter__(self):
                return self

        return [batch.tolist() for batch in Kept(range(4), 2, num_workers=1)]

    assert drive(RPCDataloader) == drive(DataLoader)


class Around:
    """Does something with each batch, in the training process, as loaders for graphs do."""

    def __init__(self, batches):
        self.batches, self.num_passes = batches, 1

    def __iter__(self):
        return self

    def __next__(self):
        return [self.num_passes, next(self.batches)]

    def _reset(self, loader, first_iter=False):
        self.num_passes += 1
        self.batches._reset(loader, first_iter)


def surrounded(base):
    class Surrounded(base):
        num_begun = 0

        def _get_iterator(self):
            self.num_begun += 1
            return Around(super()._get_iterator())

    return Surrounded


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("place", ["num_workers", "local", "node", "inline"])
def test_what_is_around_an_iterator_begins_the_next_pass_with_the_same_workers(
    shared_server, place, persistent_workers
):
    def drive(base, **options):
        torch.manual_seed(3)
        loader = surrounded(base)(range(8), 2, shuffle=True, persistent_workers=persistent_workers, **options)
        epochs = [[[number, batch.tolist()] for number, batch in loader] for _epoch in range(3)]
        return epochs, loader.num_begun

    places = {"local": "local:1", "node": shared_server.address, "inline": "inline"}
    options = {"workers": places[place]} if place in places else {"num_workers": 1}
    expected = drive(DataLoader, num_workers=1)
    assert expected[1] == (1 if persistent_workers else 3)
    assert drive(RPCDataloader, **options) == expected


def test_what_is_around_an_iterator_is_new_after_a_state_was_loaded():
    loader = surrounded(RPCDataloader)(range(8), 2, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for _, batch in batches]
    loader.load_state_dict(state)
    assert [batch.tolist() for _, batch in loader] == rest
    assert len(list(loader)) == 4
    assert loader.num_begun == 2


def test_iterator_says_why_it_cannot_be_pickled():
    batches = iter(RPCDataloader(range(4), num_workers=1))
    with pytest.raises(TypeError, match="an iterator over an RPCDataloader belongs to its process"):
        pickle.dumps(batches)


def saveable(base, *, leaves_out):
    """A loader whose position a checkpoint has, as SpeechBrain's: a number of batches that the next pass leaves out.

    torch's loader does it by another iterator over the sampler here, in place of a change of torch's classes.
    """

    class Saveable(base):
        _speechbrain_recovery_skip_to = None
        batches = None

        def __iter__(self):
            self.batches = super().__iter__()
            if leaves_out and self._speechbrain_recovery_skip_to is not None:
                for _number in range(self._speechbrain_recovery_skip_to):
                    next(self.batches)
                self._speechbrain_recovery_skip_to = None
            return self.batches

    return Saveable


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("place", ["num_workers", "local", "node", "inline"])
def test_position_of_a_checkpoint_is_where_the_next_pass_begins(shared_server, place, persistent_workers):
    def drive(base, **options):
        options["persistent_workers"] = persistent_workers
        kind = saveable(base, leaves_out=base is DataLoader)
        torch.manual_seed(3)
        loader = kind(range(10), 2, shuffle=True, **options)
        begun = iter(loader)
        numbers = [loader.batches._num_yielded]
        for _number in range(2):
            next(begun)
        numbers.append(loader.batches._num_yielded)
        rest = [batch.tolist() for batch in begun]
        torch.manual_seed(3)
        loader = kind(range(10), 2, shuffle=True, **options)
        loader._speechbrain_recovery_skip_to = numbers[-1]
        again = [batch.tolist() for batch in loader]
        assert again == rest
        return rest, [*numbers, loader.batches._num_yielded], [batch.tolist() for batch in loader]

    places = {"local": "local:1", "node": shared_server.address, "inline": "inline"}
    options = {"workers": places[place]} if place in places else {"num_workers": 1}
    expected = drive(DataLoader, num_workers=1)
    assert expected[1] == [0, 2, 5]
    assert drive(RPCDataloader, **options) == expected


def test_state_of_a_pass_that_began_at_such_a_position_has_it():
    loaders = [RPCDataloader(range(10), 2, shuffle=True, num_workers=1) for _ in range(2)]
    loaders[0]._speechbrain_recovery_skip_to = 2
    batches = iter(loaders[0])
    next(batches)
    loaders[1].load_state_dict(loaders[0].state_dict())
    rest = [batch.tolist() for batch in batches]
    assert len(rest) == 2
    assert [batch.tolist() for batch in loaders[1]] == rest


def test_position_after_the_last_batch_is_refused():
    loader = RPCDataloader(range(4), 2, num_workers=1)
    loader._speechbrain_recovery_skip_to = 3
    with pytest.raises(ValueError, match="has only 2 now"):
        iter(loader)


class Threads(SpawnContext):
    """Workers that are threads, as MONAI has them."""

    Process = Thread  # type: ignore[assignment]


def test_context_that_starts_threads_is_refused():
    with pytest.raises(ValueError, match="starts objects of Thread in place of processes"):
        RPCDataloader(range(4), num_workers=1, multiprocessing_context=Threads())
    assert len(RPCDataloader(range(4), num_workers=1, multiprocessing_context=SpawnContext())) == 4
