"""The progress of a pass whose batches come in another order."""

from __future__ import annotations

import signal
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler

from rpcdataloader import RPCDataloader
from rpcdataloader.loader.tasks import (
    Progress,
    ResumedSource,
    Returned,
    Task,
    TaskSource,
    describe,
    describe_end,
    load_request,
)
from rpcdataloader.wire.digests import digest


def deliver(progress, numbers):
    for number in numbers:
        progress.returned += (Returned(number, 1, digest([number]), None, None, None, None),)
        progress.settle()


@pytest.mark.parametrize("order", [[2, 1, 0, 3], [3, 1, 0, 2], [1, 2, 3, 0]])
def test_progress_does_not_depend_on_the_order(order):
    progress, expected = Progress(0, 0), Progress(0, 0)
    deliver(progress, order)
    deliver(expected, range(4))
    assert progress == expected


@pytest.mark.parametrize(
    "indices", [torch.arange(5000), np.arange(50_000), list(torch.arange(300))], ids=["tensor", "array", "tensors"]
)
def test_large_indices_are_in_the_part_of_a_request_that_has_a_digest(indices):
    assert load_request(Task(indices, 3, 40, 1)).buffers == []


class Unspeakable:
    def __repr__(self):
        raise ValueError("it has no name")


@pytest.mark.parametrize("index", [torch.tensor(5), Unspeakable(), "a name", 5])
def test_whatever_the_index_is_the_end_of_a_worker_can_be_told(index):
    assert describe_end(Task(index, 3, 40, 1), 40).startswith("while it loaded sample ")
    assert describe_end(Task([index] * 2, 3, 40, 2), 41).startswith("while it loaded sample ")
    assert describe(Task([index] * 40, 3, 40, 40)).startswith("batch 3 (indices ")


@pytest.mark.parametrize("samples", [BatchSampler(torch.arange(10**6), 32, False), torch.arange(10**6).split(32)])
def test_requests_have_the_indices_of_their_batch_and_no_more_of_the_tensor(samples):
    task = next(TaskSource(iter(samples), auto_collation=True, makes_requests=True))
    assert task.num_samples == 32
    assert task.request.size_bytes < 10_000


class Stateful:
    """A sampler whose state cannot be had, by a mistake."""

    def __iter__(self):
        return iter([1, 2])

    def state_dict(self):
        return next(iter([]))

    def load_state_dict(self, state):
        pass


def test_state_of_a_sampler_that_raises_stop_iteration_ends_no_epoch():
    loader = RPCDataloader([0, 10, 20], batch_size=None, sampler=Stateful(), workers="inline")
    with pytest.raises(RuntimeError, match=r"state_dict\(\) of the sampler raised StopIteration"):
        list(loader)


def test_batch_past_a_missing_one_costs_the_same_after_thousands():
    progress = Progress(0, 0)
    deliver(progress, range(1, 10_000))
    tracemalloc.start()
    try:
        deliver(progress, range(10_000, 10_010))
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - current < 10_000, "something is copied"
    deliver(progress, [0])
    assert progress.num_batches == 10_010
    assert not progress.ahead


@pytest.mark.parametrize("kind", [map, lambda function, numbers: (function(number) for number in numbers)])
@pytest.mark.parametrize("moment", ["in the batch", "after it"])
def test_batch_that_can_be_read_once_is_never_shortened_by_an_interruption(kind, moment):
    interrupted = []

    def interrupt_at(number, wanted):
        if number == wanted and not interrupted:
            interrupted.append(number)
            raise KeyboardInterrupt
        return number

    wanted = 2 if moment == "in the batch" else "state"
    batches = iter([kind(lambda number: interrupt_at(number, wanted), range(4)), [4, 5]])
    source = TaskSource(batches, True, get_state=lambda: interrupt_at("state", wanted), makes_requests=True)
    with pytest.raises(KeyboardInterrupt):
        source.draw()
    if moment == "after it":
        assert [task.indices for task in source] == [[0, 1, 2, 3], [4, 5]]
        return
    assert list(source) == []
    with pytest.raises(RuntimeError, match="KeyboardInterrupt has ended the sampler before its end"):
        source.check_end()


class TimeLimitError(Exception):
    """Raised by the script's handler of a signal, which may come at any moment."""


class Index:
    """During a call of one of its methods, the first time, a signal comes."""

    def __init__(self, moment):
        self.moment = moment

    def come(self, moment):
        if self.moment == moment:
            self.moment = ""
            signal.raise_signal(signal.SIGUSR1)

    def tobytes(self):
        self.come("digested")
        return b"index"

    def __deepcopy__(self, _memo):
        self.come("copied")
        return self

    def __reduce__(self):
        self.come("pickled")
        return Index, ("",)

    def __iter__(self):
        self.come("read")
        return iter([7, 8])


def exit_at_once(_number, _frame):
    raise SystemExit(143)


def end_in_time(_number, _frame):
    raise TimeLimitError


@pytest.mark.parametrize("moment", ["digested", "pickled", "copied", "read"])
@pytest.mark.parametrize("handler", [exit_at_once, end_in_time])
def test_exception_of_a_signal_handler_comes_out_while_a_batch_is_drawn_and_none_is_lost(moment, handler):
    indices = Index(moment) if moment == "read" else [Index(moment), 1]
    options = {"get_state": lambda: None} if moment == "copied" else {"makes_requests": True}
    source = TaskSource(iter([indices, [2]]), True, **options)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises((SystemExit, TimeLimitError)):
            source.draw()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [(task.number, task.num_samples) for task in source] == [(0, 2), (1, 1)]


def test_resumed_pass_asks_no_more_often_than_the_saved_one_past_batches_delivered_early():
    asked = []

    def give(num_batches):
        for number in range(num_batches):
            asked.append(number)
            yield [number]
        asked.append("end")

    progress = Progress(0, 0, num_batches=1)
    sampler = give(6)
    next(sampler)
    source = ResumedSource(sampler, True, progress, number=1, position=1, leave_out={2: None, 3: digest([3])})
    source.draw_again(4)
    assert asked == [0, 1, 2, 3]
    assert [task.number for task in source] == [1, 4, 5]
    assert asked == [0, 1, 2, 3, 4, 5, "end"]
    source = ResumedSource(give(2), True, Progress(0, 0))
    source.draw_again(3)  # the end is asked for, too
    assert asked[-1] == "end"
    assert [task.number for task in source] == [0, 1]
    source = ResumedSource(give(2), True, Progress(0, 0), leave_out={1: digest([9])})
    with pytest.raises(ValueError, match="gives other indices now"):
        source.draw_again(2)
