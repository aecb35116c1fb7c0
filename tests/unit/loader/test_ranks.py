"""Errors name the rank that they are of, where there are several."""

from __future__ import annotations

import pytest

from rpcdataloader.client.sharing import Partition, errors_of_rank, of_rank
from rpcdataloader.errors import ConnectionLostError, RemoteTraceback, RPCTimeoutError

RANK = Partition(3, 8)


@pytest.mark.parametrize("kind", [ConnectionLostError, RPCTimeoutError])
def test_error_of_the_package_begins_with_the_rank_however_often_it_is_raised(kind):
    error = kind("no worker is left")
    error.__cause__ = KeyError()
    for _ in range(2):
        named = of_rank(error, RANK)
        assert type(named) is kind
        assert str(named) == "[rank 3 of 8] no worker is left"
        assert named.__cause__ is error.__cause__
    assert of_rank(error, Partition()) is error


@pytest.mark.parametrize("kind", [ValueError, ConnectionLostError])
def test_exception_of_a_worker_stays_and_its_cause_names_the_rank(kind):
    error = kind("image 6 is broken")
    error.__cause__ = RemoteTraceback("worker 1 on node01:6543:\n\nTraceback")
    for _ in range(2):
        assert of_rank(error, RANK) is error
        assert str(error) == "image 6 is broken"
        assert str(error.__cause__) == "\n[rank 3 of 8] worker 1 on node01:6543:\n\nTraceback"


def test_exception_of_user_code_in_this_process_stays():
    class OwnError(ConnectionLostError):
        def __init__(self, code, reason):
            super().__init__(code, reason)

    for error in (ValueError("text"), OwnError(3, "text")):
        assert of_rank(error, RANK) is error


def test_errors_of_a_block_are_named():
    with pytest.raises(ConnectionLostError, match=r"^\[rank 3 of 8\] gone$") as caught, errors_of_rank(RANK):
        raise ConnectionLostError("gone")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    with pytest.raises(ValueError, match=r"^text$"), errors_of_rank(RANK):
        raise ValueError("text")
