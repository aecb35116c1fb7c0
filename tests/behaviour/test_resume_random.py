"""Random jobs that are saved and resumed, against the same job without a stop: the same batches, bit for bit.

A job draws its sampler or stream, its loader and places, when it is saved, and what is called in which order then:
other states are loaded first, iterators are made before and left, workers die before and after the save.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset

from rpcdataloader import RPCDataloader
from tests.support.comparison import assert_same
from tests.support.differential import seed
from tests.support.samplers import SAMPLERS
from tests.support.streams import Buffered, Drawn, Lasting, Parts, Placed, Seekable, Sharded, Tallied, Told, Wrapped

NUM_EPOCHS = 4

STREAMS: dict[str, Any] = {
    **{kind.__name__: kind for kind in (Parts, Told, Drawn, Seekable, Buffered, Placed, Tallied, Lasting, Sharded)},
    "Wrapped": lambda sizes: Wrapped(Lasting(sizes)),
}


class Noisy(Dataset):
    """Samples with random numbers, and some that cannot be read."""

    def __init__(self, size, *, has_bad):
        self.size, self.has_bad = size, has_bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.has_bad and index % 4 == 1:
            raise LookupError("a bad sample")
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def collate(samples):
    """With its own random number; and the process, for a test that kills it."""
    return os.getpid(), samples, random.random()


@dataclass
class Job:
    """What a job draws from its number.

    Attributes:
        stops: Numbers of batches after which it is saved, each with a moment: ``"after"`` the batch, ``"told"`` the end
            of its epoch if it was the last one, or ``"begun"`` with the next epoch, before its first batch.
    """

    number: int
    address: str

    def __post_init__(self):
        self.draws = draws = random.Random(self.number)
        self.is_stream = draws.random() < 0.4
        self.persistent = draws.random() < 0.5
        self.in_order = draws.random() < 0.7
        self.size = draws.choice([1, 5, 9, 12])
        self.sizes = [draws.randrange(10) for _ in range(draws.randint(1, 3))]
        self.sizes[0] += not any(self.sizes)
        self.batch_size = draws.choice([None, 1, 2, 3, 4])
        self.drop_last = self.batch_size not in (None, 1) and draws.random() < 0.3
        self.transforms = self.is_stream and draws.random() < 0.2
        self.kind = draws.choice(list(STREAMS if self.is_stream else SAMPLERS))
        self.counts = self.is_stream and self.kind in ("Placed", "Tallied", "Lasting", "Wrapped")
        self.way = draws.choice(["sampler", "batch sampler"]) if self.batch_size else "sampler"
        self.keep = draws.choice([through_json, dict])
        self.kills = draws.random() < 0.4
        self.skips = not self.is_stream and draws.random() < 0.3
        # Epochs that the loop leaves early, of datasets and samplers to which that is the same everywhere.
        can_leave = self.is_stream and self.in_order and not self.counts and not self.transforms
        self.leaves = {epoch: draws.randint(1, 3) for epoch in range(NUM_EPOCHS) if can_leave and draws.random() < 0.2}
        self.stops = []

    def __str__(self):
        shown = {name: value for name, value in vars(self).items() if name not in ("draws", "address", "keep")}
        return f"{shown} {self.keep.__name__}"

    def loader(self):
        """A loader in a new process, so to speak."""
        options = {
            "collate_fn": collate if self.batch_size else lambda sample: (os.getpid(), sample, random.random()),
            "persistent_workers": self.persistent,
            "in_order": self.in_order,
            "max_retries": 9,
            "on_error": "skip" if self.skips else "raise",
            "workers": self.place(),
        }
        if self.is_stream:
            return self.over_stream(options)
        sampler = SAMPLERS[self.kind](self.size)
        if options["workers"] != "inline":
            options["num_workers"] = self.draws.choice([1, 2, 3])
        if self.way == "batch sampler" and self.batch_size:
            options["batch_sampler"] = BatchSampler(sampler, self.batch_size, self.drop_last)
        else:
            options |= {"batch_size": self.batch_size, "sampler": sampler, "drop_last": self.drop_last}
        return RPCDataloader(Noisy(self.size, has_bad=self.skips), **options)

    def place(self):
        # In this process, a dataset that counts its epochs goes on to count in the next pass.
        if self.is_stream and (len(self.sizes) > 1 or self.transforms or (self.counts and not self.persistent)):
            return self.address
        return self.draws.choice(["inline", self.address])

    def over_stream(self, options):
        options |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if options["workers"] != "inline":
            options["num_workers"] = len(self.sizes)
        if self.transforms:
            options |= {"transform": augmented, "source_workers": len(self.sizes), "in_order": True}
            options["num_workers"] = self.draws.randint(1, 3)
        return RPCDataloader(STREAMS[self.kind](self.sizes), **options)


def augmented(sample):
    return sample, random.random()


def through_json(state):
    return json.loads(json.dumps(state))


def begin(loader, epoch):
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    inside = getattr(loader.batch_sampler, "sampler", None)
    if hasattr(inside, "set_epoch"):
        inside.set_epoch(epoch)
    return iter(loader)


def train(job):
    """The batches of each epoch of a job that is stopped."""
    seed(5)
    loader, epochs, states = job.loader(), [], []
    stops = list(job.stops)
    count = 0
    while len(epochs) < NUM_EPOCHS:
        batches, found = begin(loader, len(epochs)), []
        epochs.append(found)
        loader, batches = stop_if_due(job, stops, (count, "begun"), loader, batches, states, len(epochs) - 1)
        while True:
            step = next(batches, None)
            if step is None:
                break
            pid, *batch = step
            found.append(batch)
            count += 1
            if job.draws.random() < 0.1:
                kill_if_due(job, pid)
            loader, batches = stop_if_due(job, stops, (count, "after"), loader, batches, states, len(epochs) - 1, pid)
            if len(found) == job.leaves.get(len(epochs) - 1):
                break
        if (count, "told") in stops:
            loader, _ended = stop_if_due(job, stops, (count, "told"), loader, batches, states, None)
    return epochs


def stop_if_due(job, stops, moment, loader, batches, states, epoch, pid=0):
    """Save the job, and go on elsewhere; returns the loader and iterator that go on."""
    if moment not in stops:
        return loader, batches
    stops.remove(moment)
    draws = job.draws
    kill_if_due(job, pid)
    state = job.keep(loader.state_dict())
    states.append(state)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    if draws.random() < 0.3:  # the old process went on for a while
        for _ in range(draws.randint(1, 2)):
            if next(batches, None) is None:
                break
    seed(99)
    way = draws.choice(["new", "new", "same loader", "other states first", "iterated before"])
    if way != "same loader":
        loader = job.loader()
    if way == "iterated before":
        left = iter(loader)
        list(itertools.islice(left, draws.randint(0, 2)))
    if way == "other states first":
        for other in draws.choices(states, k=2):
            loader.load_state_dict(other)
            if draws.random() < 0.5:
                list(itertools.islice(loader, draws.randint(0, 1)))
    for _ in range(draws.randint(1, 2)):
        loader.load_state_dict(state)
    assert job.keep(loader.state_dict()) == state
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    np.random.set_state(generators[2])
    return loader, iter(()) if epoch is None else begin(loader, epoch)


def kill_if_due(job, pid):
    if job.kills and pid not in (0, os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def numbers_in(batches):
    """The samples of a stream, without the random numbers of its transform."""
    samples = itertools.chain.from_iterable(batch if type(batch) is list else [batch] for batch, _draw in batches)
    return [sample[0] if type(sample) is tuple else sample for sample in samples]


def check(number, address):
    job = Job(number, address)
    job.kills, kills = False, job.kills
    expected = train(job)
    count = sum(map(len, expected))
    ends = list(itertools.accumulate(map(len, expected)))
    moments = [(at, "after") for at in range(1, count + 1)]
    moments += [(at, "begun") for at in [0, *ends[:-1]]] + [
        (at, "told") for epoch, at in enumerate(ends[:-1]) if epoch not in job.leaves
    ]
    job.stops = sorted(set(job.draws.choices(moments, k=job.draws.randint(1, 3))))
    job.kills = kills
    stops = list(job.stops)
    try:
        found = train(job)
        if (job.in_order or job.transforms) and not (job.counts and job.persistent):
            assert_same(found, expected)
        elif job.counts:  # in another worker, the count begins anew
            kept = len if job.drop_last else sorted
            assert [kept(numbers_in(epoch)) for epoch in found] == [kept(numbers_in(epoch)) for epoch in expected]
        else:
            for one, other in zip(found, expected, strict=True):
                assert_same(sorted(one, key=repr), sorted(other, key=repr))
    except Exception as error:
        error.add_note(f"job {number}: {job}, stopped at {stops}")
        raise


def _rows():
    yield range(20)
    for first in range(20, 1020, 100):
        is_seldom_run = first >= 520  # the others take their part of the minutes that `make instruments` has
        marks = [pytest.mark.slow] if is_seldom_run else [pytest.mark.slow, pytest.mark.instruments]
        yield pytest.param(range(first, first + 100), marks=marks)


@pytest.mark.parametrize("numbers", list(_rows()), ids=str)
def test_stopped_job_gives_the_batches_of_one_without_a_stop(wide_servers, numbers):
    for number in numbers:
        check(number, wide_servers[number % 2].address)
