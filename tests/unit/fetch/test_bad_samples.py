from __future__ import annotations

import logging
import re

import pytest

from rpcdataloader.errors import BadSamplesError, RemoteTraceback
from rpcdataloader.fetch.samples import MAX_SHOWN, skipped
from rpcdataloader.loader.tasks import Progress
from rpcdataloader.wire.exceptions import loads_exception


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


def lacks(*indices, is_whole=False, **options):
    return skipped([(index, raised(ValueError(f"bad {index}"))) for index in indices], is_whole=is_whole, **options)


def test_missing_samples_are_named_with_the_first_exception_and_the_last_one_travels():
    found = skipped(
        [(4, raised(ValueError("bad"))), (6, raised(KeyError("worse"))), (7, raised(KeyError("worst")))],
        is_whole=False, stream=3,
    )  # fmt: skip
    assert found.text == "3 samples (in stream 3: 4, 6, 7): ValueError: bad"
    assert found.num_samples == 3
    last = loads_exception(found.error)
    assert (type(last), last.args) == (KeyError, ("worst",))
    assert isinstance(last.__cause__, RemoteTraceback)
    assert "in raised" in str(last.__cause__)


def test_many_samples_are_not_all_named():
    text = lacks(*range(50)).text
    assert text.startswith("50 samples (indices 0, 1, 2, 3, ")
    assert text.endswith(f", {MAX_SHOWN - 1}, ...): ValueError: bad 0")


def test_an_exception_that_cannot_be_sent_or_read_is_in_nobodys_way():
    found = skipped([(1, raised(Unreadable()))], is_whole=False)
    assert re.fullmatch(r"1 sample \(indices 1\): .*Unreadable: <.*>", found.text)
    assert isinstance(loads_exception(found.error), Exception)


def test_the_end_of_a_stream_is_told_with_and_without_a_sample():
    end = "stream 1 has ended right after an exception, as a generator does that raises"
    assert lacks(stream=1, ends=True).text == end
    assert lacks(5, stream=1, ends=True).text == f"1 sample (in stream 1: 5): ValueError: bad 5; {end}"


# Counting


def test_each_batch_is_warned_of_and_counted(caplog):
    progress = Progress(1, 0, num_yielded=2)
    progress.account_skipped(lacks(4, 5), "worker 3", 3)
    progress.account_skipped(lacks(6, is_whole=True), "worker 3", 3)
    assert progress.num_skipped == 3
    assert progress.num_yielded == 1  # the empty one was none
    assert caplog.record_tuples == [
        ("rpcdataloader.loader", logging.WARNING, "worker 3 skipped 2 samples (indices 4, 5): ValueError: bad 4"),
        ("rpcdataloader.loader", logging.WARNING, "worker 3 skipped 1 sample (indices 6): ValueError: bad 6"),
    ]


def test_more_than_the_limit_is_an_error_and_no_warning(caplog):
    progress = Progress(1, 0, num_skipped=99)
    progress.account_skipped(lacks(4), "worker 3", 100)
    caplog.clear()
    with pytest.raises(
        BadSamplesError, match=r"102 samples .* max_skipped=100; .*worker 3 .* 5, 6\): .*bad 5"
    ) as caught:
        progress.account_skipped(lacks(5, 6), "worker 3", 100)
    assert str(caught.value.__cause__) == "bad 6"
    assert not caplog.messages


def test_the_end_of_a_stream_is_no_sample_too_many(caplog):
    Progress(1, 0, num_skipped=9).account_skipped(lacks(stream=1, ends=True), "this process", 3)
    assert caplog.messages == [
        "this process: stream 1 has ended right after an exception, as a generator does that raises"
    ]
