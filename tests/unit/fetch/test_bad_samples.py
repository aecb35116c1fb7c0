from __future__ import annotations

import logging
import re

import pytest
import torch

from rpcdataloader.errors import BadSamplesError, RemoteTraceback
from rpcdataloader.fetch.samples import MAX_SHOWN, Reduced
from rpcdataloader.loader.tasks import Progress
from rpcdataloader.wire.pickling import dumps_reply, loads
from rpcdataloader.wire.slabs import PageablePool


def travel(reduced):
    """To another process and back."""
    encoded = dumps_reply(reduced)
    blocks = []
    for buffer in encoded.buffers:
        block = PageablePool().allocate(memoryview(buffer).nbytes)
        block.view[:] = memoryview(buffer).cast("B")
        blocks.append(block)
    return loads(encoded.payload, blocks)


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


class Unreadable(Exception):
    def __str__(self):
        raise LookupError

    def __reduce__(self):
        raise LookupError


def test_what_is_missing_travels_with_the_batch():
    reduced = Reduced(stream=3)
    reduced.leave_out([4], raised(ValueError("bad")))
    reduced.leave_out([6, 7], raised(KeyError("worse")))
    reduced.batch, reduced.is_empty = {"x": torch.arange(3)}, False
    arrived = travel(reduced)
    assert arrived.batch["x"].tolist() == [0, 1, 2]
    assert not arrived.is_empty
    assert arrived.num_skipped == 3
    assert str(arrived) == str(reduced) == "3 samples (in stream 3: 4, 6, 7): ValueError: bad"
    first, last = arrived.errors
    assert (type(first), first.args) == (ValueError, ("bad",))
    assert (type(last), last.args) == (KeyError, ("worse",))
    assert isinstance(last.__cause__, RemoteTraceback)
    assert "in raised" in str(last.__cause__)


def test_only_the_first_and_the_last_exception_are_kept():
    reduced = Reduced()
    for index in range(50):
        reduced.leave_out([index], ValueError(index))
    assert [error.args for error in reduced.errors] == [(0,), (49,)]
    assert reduced.num_skipped == 50
    assert len(reduced.shown) == MAX_SHOWN
    assert str(reduced).startswith("50 samples (indices 0, 1, 2, 3, ")
    assert ", 15, ...): ValueError: 0" in str(reduced)


def test_an_exception_that_cannot_be_sent_or_read_is_in_nobodys_way():
    reduced = Reduced()
    reduced.leave_out([1], raised(Unreadable()))
    for found in reduced, travel(reduced):
        assert re.fullmatch(r"1 sample \(indices 1\): .*Unreadable: <.*>", str(found))


def test_the_end_of_a_stream_is_told_with_and_without_a_sample():
    reduced = Reduced(stream=1, ends_stream=True)
    assert str(travel(reduced)) == "stream 1 has ended right after an exception, as a generator does that raises"
    reduced.leave_out([5], ValueError("bad"))
    assert str(reduced).startswith("1 sample (in stream 1: 5): ValueError: bad; stream 1 has ended right after")


def test_pinning_reaches_the_batch():
    class Pinnable:
        def pin_memory(self):
            return "pinned"

    reduced = Reduced()
    reduced.batch, reduced.is_empty = Pinnable(), False
    assert reduced.pin_memory().batch == "pinned"


# Counting


def reduced_by(*indices, is_empty=False):
    reduced = Reduced(where="worker 3")
    for index in indices:
        reduced.leave_out([index], ValueError(f"bad {index}"))
    if not is_empty:
        reduced.batch, reduced.is_empty = "batch", False
    return reduced


def test_each_batch_is_warned_of_and_counted(caplog):
    progress = Progress(1, 0, num_yielded=2)
    progress.account_reduced(reduced_by(4, 5), 3)
    progress.account_reduced(reduced_by(6, is_empty=True), 3)
    assert progress.num_skipped == 3
    assert progress.num_yielded == 1  # the empty one was none
    assert caplog.record_tuples == [
        ("rpcdataloader.loader", logging.WARNING, "worker 3 skipped 2 samples (indices 4, 5): ValueError: bad 4"),
        ("rpcdataloader.loader", logging.WARNING, "worker 3 skipped 1 sample (indices 6): ValueError: bad 6"),
    ]


def test_more_than_the_limit_is_an_error_and_no_warning(caplog):
    progress = Progress(1, 0, num_skipped=99)
    progress.account_reduced(reduced_by(4), 100)
    caplog.clear()
    last = reduced_by(5, 6)
    with pytest.raises(
        BadSamplesError, match=r"102 samples .* max_skipped=100; .*worker 3 .* 5, 6\): .*bad 5"
    ) as raised:
        progress.account_reduced(last, 100)
    assert raised.value.__cause__ is last.errors[-1]
    assert not caplog.messages


def test_the_end_of_a_stream_is_no_sample_too_many(caplog):
    Progress(1, 0, num_skipped=9).account_reduced(Reduced(stream=1, ends_stream=True), 3)
    assert caplog.messages == [
        "this process: stream 1 has ended right after an exception, as a generator does that raises"
    ]
