"""Signals that come while something must not be left in the middle."""

from __future__ import annotations

import functools
import signal
import socket

import pytest

from rpcdataloader.host.signals import is_interrupt, signals_held, signals_let_through, suppress_errors

NUMBERS = signal.SIGUSR1, signal.SIGUSR2


class Raised(BaseException):
    """Raised by a handler, as KeyboardInterrupt is."""


@pytest.fixture
def heard():
    """The signals whose handlers have acted, each of which raises."""
    found = []

    def handle(number, frame):
        assert frame.f_code
        found.append(number)
        raise Raised

    before = {number: signal.signal(number, handle) for number in NUMBERS}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_act_at_the_end_each_once_and_all_though_the_first_one_raises(heard):
    handlers, in_the_block = [signal.getsignal(number) for number in NUMBERS], []

    def work():
        with signals_held():
            for number in NUMBERS:
                signal.raise_signal(number)
            in_the_block.append([*heard])

    with pytest.raises(Raised):
        work()
    assert in_the_block == [[]]
    assert sorted(heard) == sorted(NUMBERS)
    assert [signal.getsignal(number) for number in NUMBERS] == handlers


def test_handlers_act_at_once_in_a_wait(heard):
    with signals_held():
        with pytest.raises(Raised), signals_let_through():
            signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]


def test_loop_of_events_hears_of_a_signal_once(heard):
    """As of asyncio, by a byte for each."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno())
        try:
            with pytest.raises(Raised), signals_held():
                signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.set_wakeup_fd(before)
        assert ours.recv(10) == bytes([signal.SIGUSR1])
    assert heard == [signal.SIGUSR1]


class TimeLimitError(Exception):
    """Raised by handlers that scripts write for SIGALRM."""


def handle(_number, _frame):
    raise TimeLimitError


def handle_by(_what, number, frame):
    handle(number, frame)


class Handler:
    def __call__(self, _number, _frame):
        raise SystemExit(143)

    def handle(self, number, frame):
        handle(number, frame)


@pytest.mark.parametrize(
    "handler",
    [handle, lambda *_args: handle(*_args), Handler(), Handler().handle, functools.partial(handle_by, "a")],
    ids=["function", "lambda", "object", "method", "partial"],
)
def test_exception_of_a_handler_is_told_from_those_of_user_code(handler):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises((TimeLimitError, SystemExit)) as caught, suppress_errors():
            signal.raise_signal(signal.SIGUSR1)
        assert is_interrupt(caught.value)
        with suppress_errors():
            raise TimeLimitError
        with pytest.raises(TimeLimitError) as caught:
            raise TimeLimitError
        assert not is_interrupt(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_exit_of_a_handler_that_is_no_longer_set_comes_out():
    def leave(number, _frame):
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(143)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit), suppress_errors():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
