"""Samples whose dataset raises an exception are left out of their batches, and no others change."""

from __future__ import annotations

import itertools
import json
import random
import re
import time

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, get_worker_info

from rpcdataloader import RPCDataloader
from rpcdataloader.errors import BadSamplesError, ConnectionLostError, RemoteTraceback
from tests.conftest import AT_ONCE
from tests.support.datasets import Augmented, Deadly, Numbers, note, notes

BAD = (1, 6, 7, 8, 14)


class Lost(Exception):
    """May pass."""


class Bad(Augmented):
    """20 samples with random numbers, some of which cannot be loaded."""

    def __init__(self, *bad):
        super().__init__(20)
        self.bad = bad

    def __getitem__(self, index):
        torch.rand(index)  # what one has drawn before it fails
        if index in self.bad:
            raise ValueError(f"bad sample {index}")
        return super().__getitem__(index)


class BadBatches(Bad):
    """Asked for a batch at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class BadStream(IterableDataset):
    """Workers take every second number. Goes on after an exception or, as a generator, does not."""

    def __init__(self, *bad, generator=False):
        self.bad = bad
        self.generator = generator

    def __len__(self):
        return 18

    def make(self, number):
        torch.rand(number)
        if number in self.bad:
            raise ValueError(f"bad sample {number}")
        return number, random.random()

    def __iter__(self):
        worker = get_worker_info()
        numbers = range(worker.id, 18, worker.num_workers)
        return (self.make(number) for number in numbers) if self.generator else map(self.make, numbers)


class Flaky(Bad):
    """Connections are lost before the sample is there: so many times."""

    def __init__(self, log, losses, *bad):
        super().__init__(*bad)
        self.log = log
        self.losses = losses

    def __getitem__(self, index):
        if notes(self.log).count(str(index)) < self.losses.get(index, 0):
            note(self.log, index)
            torch.rand(index)
            raise Lost(index)
        return super().__getitem__(index)


@pytest.fixture(params=["inline", "workers"])
def where(request, server):
    return "inline" if request.param == "inline" else server.address


def make(dataset, workers, **options):
    options = {"batch_size": 3, "on_error": "skip", "generator": torch.Generator().manual_seed(1), **options}
    return RPCDataloader(dataset, workers=workers, num_workers=0 if workers == "inline" else 2, **options)


def rows(batches):
    """Index, random numbers and seed of each sample, batch by batch."""
    return [
        [(int(index), draws.tolist(), int(seed)) for index, draws, seed in zip(*batch.values(), strict=True)]
        for batch in batches
    ]


def without(batches, bad):
    """What is left of whole batches."""
    left = [[row for row in batch if row[0] not in bad] for batch in batches]
    return [batch for batch in left if batch]


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rpcdataloader.loader"]


@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"shuffle": True}, {"prefetch_factor": 1}], ids=str)
def test_batches_without_bad_samples_are_otherwise_the_same(where, options, caplog):
    expected = rows(make(Bad(), where, **options))
    caplog.clear()
    loader = make(Bad(*BAD), where, max_skipped=5, **options)
    actual = rows(loader)
    assert sorted(actual) == sorted(without(expected, BAD))
    assert options.get("in_order") is False or actual == without(expected, BAD)
    assert loader.num_skipped == 5
    assert len(warned(caplog)) == sum(any(row[0] in BAD for row in batch) for batch in expected)


def test_warnings_say_who_has_skipped_what_and_why(where, caplog):
    list(make(Bad(*BAD), where))
    who = "this process" if where == "inline" else r"worker \d+ \(pid \d+\) on"
    _first, second, _third = warned(caplog)
    assert re.fullmatch(rf"{who}.* skipped 3 samples \(indices 6, 7, 8\): ValueError: bad sample 6", second)


def test_batches_that_are_asked_for_at_once_are_skipped_as_a_whole(where):
    expected = rows(make(BadBatches(), where))
    loader = make(BadBatches(*BAD), where)
    assert rows(loader) == [batch for batch in expected if not {row[0] for row in batch} & set(BAD)]
    assert loader.num_skipped == 9


WRAPPED = [
    lambda bad: Subset(bad, range(20)),
    lambda bad: Subset(Subset(bad, range(20)), range(20)),
    lambda bad: ConcatDataset([Subset(bad, range(20))]),
    lambda bad: StackDataset(index=PickedDataset(Subset(bad, range(20)), "index"), draws=bad, seed=Numbers(20)),
]


class PickedDataset(Dataset):
    """One part of each sample."""

    def __init__(self, dataset, name):
        self.dataset, self.name = dataset, name

    def __getitem__(self, index):
        return self.dataset[index][self.name]

    def __len__(self):
        return len(self.dataset)


@pytest.mark.parametrize("wrap", WRAPPED, ids=["Subset", "twice", "ConcatDataset", "StackDataset"])
def test_wrapper_of_a_dataset_that_loads_single_samples_lacks_only_the_bad_ones(where, wrap):
    expected = make(wrap(Bad()), where)
    loader = make(wrap(Bad(*BAD)), where)
    left = [[int(index) for index in batch["index"] if index not in BAD] for batch in expected]
    assert [batch["index"].tolist() for batch in loader] == [batch for batch in left if batch]
    assert loader.num_skipped == 5


def test_wrapper_of_a_dataset_that_loads_batches_passes_these_on(where):
    expected = rows(make(BadBatches(), where))
    loader = make(Subset(Subset(BadBatches(*BAD), range(20)), range(20)), where)
    assert rows(loader) == [batch for batch in expected if not {row[0] for row in batch} & set(BAD)]
    assert loader.num_skipped == 9


def test_no_sample_may_be_bad_and_one_is_no_plural(where):
    with pytest.raises(BadSamplesError, match=r"^1 sample was skipped in this pass, more than max_skipped=0; "):
        list(make(Bad(BAD[0]), where, max_skipped=0))


def test_too_many_bad_samples_are_an_error_that_has_the_last_one_as_its_cause(where):
    loader = make(Bad(*BAD), where, max_skipped=2)
    iterator = iter(loader)
    assert [len(next(iterator)["index"]) for _ in range(2)] == [2, 3]
    with pytest.raises(BadSamplesError, match=r"4 samples .* max_skipped=2; .*indices 6, 7, 8\): ValueError") as raised:
        next(iterator)
    cause = raised.value.__cause__
    assert (type(cause), cause.args) == (ValueError, ("bad sample 8",))
    assert where == "inline" or isinstance(cause.__cause__, RemoteTraceback)
    assert loader.num_skipped == 4
    # It took the place of the batch, as any exception does.
    assert next(iterator)["index"].tolist() == [9, 10, 11]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"in_order": False, "prefetch_factor": 4}], ids=str)
def test_a_pass_goes_on_after_skipped_batches(where, options):
    def loader():
        return make(Bad(*BAD), where, **options)

    torch.manual_seed(3)
    whole = rows(loader())
    for num_batches in 0, 1, 3, len(whole):
        torch.manual_seed(3)
        first = loader()
        iterator = iter(first)
        batches = rows(itertools.islice(iterator, num_batches))
        second = loader()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        batches += rows(second)
        assert sorted(batches) == sorted(whole)
        assert second.num_skipped == 5  # of the whole pass


# Streams


def numbers(batches):
    return [batch[0].tolist() for batch in batches]


def test_streams_go_on_with_the_next_sample(where, caplog):
    whole = dict(zip(*map(torch.cat, zip(*make(BadStream(), where), strict=True)), strict=True))
    whole = {int(number): float(draw) for number, draw in whole.items()}
    caplog.clear()
    loader = make(BadStream(4, 6, 7, 8, 10), where)
    batches = list(loader)
    assert all(whole[int(number)] == draw for batch in batches for number, draw in zip(*batch, strict=True))
    if where == "inline":
        assert numbers(batches) == [[0, 1, 2], [3, 5], [9, 11], [12, 13, 14], [15, 16, 17]]
        assert "this process skipped 3 samples (in stream 0: 6, 7, 8): ValueError: bad sample 6" in warned(caplog)
    else:
        assert numbers(batches) == [[0, 2], [1, 3, 5], [9, 11], [12, 14, 16], [13, 15, 17]]
        assert "skipped 3 samples (in stream 0: 3, 4, 5): ValueError: bad sample 6" in caplog.text
    assert loader.num_skipped == 5


class RaisesOnce:
    """A batch sampler."""

    def __iter__(self):
        self.number = 0
        return self

    def __next__(self):
        self.number += 1
        if self.number == 3:
            raise OSError("once")
        if self.number > 6:
            raise StopIteration
        return [self.number]


def test_sampler_that_raises_after_a_skipped_batch_ends_nothing(where):
    num_workers = 0 if where == "inline" else 1
    loader = RPCDataloader(
        Bad(2), batch_sampler=RaisesOnce(), workers=where, num_workers=num_workers, on_error="skip", collate_fn=len
    )
    batches, found = iter(loader), []
    while True:
        try:
            found.append(next(batches))
        except OSError as error:
            found.append(str(error))
        except StopIteration:
            break
    assert sorted(map(str, found)) == ["1", "1", "1", "1", "once"]


class Interrupted(BadStream):
    is_due = True

    def make(self, number):
        if number == 5 and self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return super().make(number)


def test_sample_that_was_skipped_before_an_interrupt_is_skipped_once():
    loader = make(Interrupted(4), "inline")
    batches = iter(loader)
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert loader.num_skipped == 0
    loader.load_state_dict(loader.state_dict())
    assert next(iter(loader))[0].tolist() == [3, 5]
    assert loader.num_skipped == 1


def refuse_large(sample):
    if sample[0] > 14:
        raise ValueError(f"{sample[0]} is too large")
    return sample


def test_limit_is_for_the_stream_and_for_its_transform(where):
    loader = make(BadStream(0, 1, 2), where, transform=refuse_large, max_skipped=3)
    assert sorted(itertools.chain(*numbers(loader))) == [*range(3, 15)]
    assert loader.num_skipped == 6
    for bad in [0, 1, 2], []:
        with pytest.raises(BadSamplesError, match="3 samples were skipped in this pass, more than max_skipped=2"):
            list(make(BadStream(*bad), where, transform=refuse_large, max_skipped=2))


def test_a_generator_that_raises_ends_its_stream(where, caplog):
    loader = make(BadStream(4, generator=True), where)
    assert numbers(loader) == ([[0, 1, 2], [3]] if where == "inline" else [[0, 2], [1, 3, 5], [7, 9, 11], [13, 15, 17]])
    assert loader.num_skipped == 1
    assert "stream 0 has ended right after an exception" in warned(caplog)[-1]


class Unreadable(Exception):
    """Can neither be shown nor sent."""

    def __str__(self):
        raise LookupError

    def __reduce__(self):
        raise LookupError


class AllBad(Bad):
    def __getitem__(self, index):
        raise Unreadable(index)


def test_many_samples_are_not_all_named_and_an_exception_that_cannot_be_read_is_in_nobodys_way(where, caplog):
    assert list(make(AllBad(), where, batch_size=None)) == []
    assert list(make(AllBad(), where, batch_size=20)) == []
    text = warned(caplog)[-1]
    assert re.search(r"skipped 20 samples \(indices (\d+, ){16}\.\.\.\): .*Unreadable: <.*>", text), text


# With retry_on


def test_what_may_pass_is_tried_again_before_it_is_skipped(where, tmp_path, caplog):
    log = str(tmp_path / "log")
    expected = rows(make(Bad(), where))
    dataset = Flaky(log, {2: 1, 9: 99}, 10)
    loader = make(dataset, where, retry_on=Lost, max_retries=1)
    assert rows(loader) == without(expected, {9, 10})
    assert loader.num_skipped == 2
    assert notes(log).count("2") == 1
    assert notes(log).count("9") >= 2  # a backup task may have failed, too
    assert set(re.findall(r" is retried in 0.5 s: (\w+)", caplog.text)) == {"Lost"}
    (warning,) = (text for text in warned(caplog) if "skipped" in text)
    assert "skipped 2 samples (indices 9, 10)" in warning


def test_sample_that_kills_workers_stays_an_error(server):
    iterator = iter(make(Deadly(20, {4}, "SIGKILL"), server.address))
    next(iterator)
    with pytest.raises(
        ConnectionLostError, match=r"batch 1 .*has ended 3 workers in a row: .* while it loaded sample 4"
    ):
        next(iterator)
    assert len(list(iterator)) == 5


class Unmounted(Dataset):
    """One of the workers finds no files."""

    def __len__(self):
        return 240

    def __getitem__(self, index):
        if get_worker_info().id == 0:
            raise FileNotFoundError("there is no /data on this node")
        time.sleep(0.005)
        return index


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_worker_that_fails_at_once_gets_no_more_than_its_share(on_error):
    loader = RPCDataloader(Unmounted(), 4, num_workers=2, on_error=on_error, max_skipped=1000)
    batches, num_loaded = iter(loader), 0
    while True:
        try:
            num_loaded += len(next(batches))
        except FileNotFoundError:
            continue
        except StopIteration:
            break
    assert num_loaded >= 60  # 120 with torch


def fail(_worker):
    raise LookupError("nothing works")


def test_dataset_that_fails_everywhere_is_at_its_end_at_once():
    batches, num_errors = iter(RPCDataloader(Numbers(200), num_workers=2, worker_init_fn=fail)), 0
    began = time.monotonic()
    while True:
        try:
            next(batches)
        except LookupError:
            num_errors += 1
        except StopIteration:
            break
    assert num_errors == 200
    assert time.monotonic() - began < AT_ONCE
