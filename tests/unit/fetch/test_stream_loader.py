from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import IterableDataset

from rpcdataloader.fetch import seeding
from rpcdataloader.fetch.stream_loader import StreamLoader
from tests.unit.fetch.loading import make_spec

pytestmark = pytest.mark.usefixtures("_process_restored")


class BadStream(IterableDataset):
    """Numbers and draws; goes on after an exception, or, as a generator, does not."""

    def __init__(self, size, *bad, generator=False):
        self.size = size
        self.bad = bad
        self.generator = generator

    def make(self, number):
        torch.rand(number)
        if number in self.bad:
            raise ValueError(f"bad {number}")
        return number, random.random()

    def __iter__(self):
        return (
            (self.make(number) for number in range(self.size)) if self.generator else map(self.make, range(self.size))
        )


def stream(dataset, batch_size=3, state=None, **changes):
    """The batches, each with what it lacks; and the states after them."""
    loader = StreamLoader(
        dataset,
        make_spec(
            **{"collate_fn": list, **changes}, iterable=True, skips=True, worker_id=1, num_workers=2, stream=state
        ),
    )
    batches, states = [], []
    while True:
        asked = [None] * batch_size if changes.get("auto_collation", True) else None
        _metrics, batch, lacks, after = loader.load(asked, 0, 0)
        if after is None:
            assert (batch, lacks) == (None, None)
            assert loader.load(asked, 0, 0)[1:] == (None, None, None)
            return batches, states
        batches.append((batch, lacks))
        states.append(after)


def words(batches):
    found = [(batch and [number for number, _draw in batch], lacks) for batch, lacks in batches]
    return [numbers if lacks is None else (numbers, lacks.text) for numbers, lacks in found]


ENDED = "stream 1 has ended right after an exception, as a generator does that raises"


def test_a_stream_goes_on_with_the_next_sample():
    batches, _states = stream(BadStream(11, 1, 3, 4, 5))
    assert words(batches) == [
        ([0, 2], "1 sample (in stream 1: 1): ValueError: bad 1"),
        (None, "3 samples (in stream 1: 3, 4, 5): ValueError: bad 3"),
        [6, 7, 8],
        [9, 10],
    ]
    whole, _states = stream(BadStream(11))
    drawn = dict(sample for batch, _lacks in whole for sample in batch)
    assert all(drawn[number] == draw for batch, _lacks in batches for number, draw in batch or [])


@pytest.mark.parametrize(
    ("bad", "changes", "expected"),
    [
        (4, {}, [[0, 1, 2], ([3], f"1 sample (in stream 1: 4): ValueError: bad 4; {ENDED}")]),
        (4, {"drop_last": True}, [[0, 1, 2], (None, f"1 sample (in stream 1: 4): ValueError: bad 4; {ENDED}")]),
        (2, {}, [([0, 1], "1 sample (in stream 1: 2): ValueError: bad 2"), (None, ENDED)]),
        (0, {}, [(None, f"1 sample (in stream 1: 0): ValueError: bad 0; {ENDED}")]),
    ],
)
def test_a_generator_that_raises_ends_its_stream_which_is_told(bad, changes, expected):
    assert words(stream(BadStream(9, bad, generator=True), **changes)[0]) == expected


def test_single_samples_of_a_stream_are_skipped():
    batches, _states = stream(BadStream(3, 1), auto_collation=False, collate_fn=lambda sample: [sample])
    assert words(batches) == [[0], (None, "1 sample (in stream 1: 1): ValueError: bad 1"), [2]]


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("bad", [2, 4, 8])
def test_a_stream_goes_on_from_any_state_as_it_would_have(generator, bad):
    dataset = BadStream(9, bad, generator=generator)
    batches, states = stream(dataset)
    for number, state in enumerate(states, 1):
        assert words(stream(dataset, state=state)[0]) == words(batches[number:])


def test_a_dataset_that_cannot_be_iterated_over_is_no_bad_sample():
    class Closed(IterableDataset):
        def __iter__(self):
            raise ValueError("closed")

    with pytest.raises(ValueError, match="closed"):
        stream(Closed())


def test_collating_counts_batches_whether_or_not_samples_are_missing():
    """Seeds and states do not depend on what was skipped."""

    def seeds(dataset, state=None):
        batches, states = stream(dataset, state=state, collate_fn=lambda _samples: seeding.get_sample_seed())
        return [batch for batch, _lacks in batches], states

    drawn, states = seeds(BadStream(9, 1, 4))
    assert drawn == seeds(BadStream(9))[0]
    assert [state.num_batches for state in states] == [1, 2, 3]
    assert seeds(BadStream(9, 1, 4), states[0])[0] == drawn[1:]


def test_other_samples_are_refused_when_resuming_and_reported_after_the_loss_of_a_worker(caplog):
    dataset = BadStream(200)
    _batches, states = stream(dataset, 50)
    dataset.make = lambda number: number // 2
    with pytest.raises(ValueError, match=r"stream 1 of BadStream gives other samples now .*: seed what"):
        stream(dataset, 50, states[1], resumes=True)
    assert not caplog.records
    batches, _states = stream(dataset, 50, states[1])
    assert sum(len(batch) for batch, _lacks in batches) == 100
    assert "on its new worker, stream 1 of BadStream gives other samples now" in caplog.text
