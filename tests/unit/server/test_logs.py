"""What sessions and workers print, and what of it their client is told."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings

import pytest

from rpcdataloader.server import logs as module
from rpcdataloader.server.logs import (
    MAX_LEFT_BYTES,
    MAX_LINE,
    MAX_RECORDS,
    RECORDS_PERIOD,
    ClientHandler,
    Forwarding,
    OutputReader,
    RateLimit,
    forward_warnings,
    redirect_output,
    stop_forwarding,
)


class Pipe:
    """A pipe whose read end belongs to an OutputReader."""

    def __init__(self):
        self.lines = []
        descriptor, self.write_end = os.pipe()
        self.reader = OutputReader(descriptor, self.lines.append)

    def write(self, data):
        os.write(self.write_end, data)

    def close(self):
        if self.write_end is not None:
            os.close(self.write_end)
            self.write_end = None


@pytest.fixture
def pipe():
    pipe = Pipe()
    yield pipe
    pipe.close()
    try:
        os.fstat(pipe.reader.fileno())
    except OSError:
        return
    pipe.reader.finish()


def test_lines_are_taken_one_by_one(pipe):
    pipe.write(b"one\ntwo\n")
    assert pipe.reader.read()
    assert pipe.lines == ["one", "two"]


def test_line_is_written_when_it_is_complete(pipe):
    pipe.write(b"be")
    assert pipe.reader.read()
    assert pipe.lines == []
    pipe.write(b"gin\nend")
    assert pipe.reader.read()
    assert pipe.lines == ["begin"]


def test_end_of_file_gives_the_rest_and_closes(pipe):
    pipe.write(b"last words")
    pipe.close()
    assert pipe.reader.read()
    assert not pipe.reader.read()
    assert pipe.lines == ["last words"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pipe.reader.fileno())


def test_nothing_there_is_not_the_end(pipe):
    assert pipe.reader.read()
    assert pipe.lines == []


def test_output_that_is_not_text_arrives_all_the_same(pipe):
    pipe.write(b"caf\xe9 \xff\n")
    pipe.reader.read()
    assert pipe.lines == ["caf\ufffd \ufffd"]


def test_endless_line_is_cut_and_memory_stays_bounded(pipe):
    for _ in range(100):
        pipe.write(b"x" * 60_000)
        pipe.reader.read()
        assert len(pipe.reader._rest) <= MAX_LINE
    assert all(len(line) <= MAX_LINE for line in pipe.lines)


def test_finish_takes_what_is_there_although_somebody_holds_the_other_end(pipe):
    pipe.write(b"one\ntwo")
    pipe.reader.finish()
    assert pipe.lines == ["one", "two"]


def test_finish_ends_although_somebody_never_stops_writing(pipe, monkeypatch):
    """A daemon that user code left behind."""
    taken = []

    def read(_descriptor, size):
        taken.append(size)
        return b"x" * size

    monkeypatch.setattr(module.os, "read", read)
    pipe.reader.finish()
    assert sum(taken) == MAX_LEFT_BYTES


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_redirected_output_is_that_of_the_descriptors(tmp_path):
    """In a fork, since it replaces what pytest has put in place."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
            descriptor, theirs = os.pipe()
            redirect_output(theirs)
            print("printed")  # noqa: T201
            os.write(1, b"written to 1\n")
            print("error", file=sys.stderr)  # noqa: T201
            os.write(2, b"written to 2\n")
            lines = []
            reader = OutputReader(descriptor, lines.append)
            reader.read()
            (tmp_path / "lines").write_text("\n".join(lines))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "lines").read_text() == "printed\nwritten to 1\nerror\nwritten to 2"


# --- what the client is told


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def told(monkeypatch):
    """A client that is told; what it was told, and a clock."""
    clock = Clock()
    # The standard library uses the module of the same name, so only this module gets another one.
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    records = []
    forward_warnings(records.append)
    yield records, clock
    stop_forwarding()


def test_records_of_warning_level_and_above_reach_the_client(told):
    records, _clock = told
    logger = logging.getLogger("user.code")
    logger.setLevel(logging.DEBUG)
    logger.info("not this")
    logger.warning("file %s is short", "a.jpg")
    logger.error("no disk")
    assert records == [
        {"level": logging.WARNING, "logger": "user.code", "text": "file a.jpg is short"},
        {"level": logging.ERROR, "logger": "user.code", "text": "no disk"},
    ]


def test_python_warnings_reach_the_client_and_the_log(told, capsys):
    records, _clock = told
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = module._show_warning
        warnings.warn("old format", DeprecationWarning, stacklevel=1)
    [record] = records
    assert (record["level"], record["logger"]) == (logging.WARNING, "py.warnings")
    assert re.fullmatch(rf"DeprecationWarning: old format \({re.escape(__file__)}:\d+\)", record["text"])
    assert "DeprecationWarning: old format" in capsys.readouterr().err


def test_traceback_travels_with_an_exception(told):
    records, _clock = told
    try:
        raise LookupError("gone")
    except LookupError:
        logging.getLogger("user").exception("while decoding")
    (record,) = records
    assert record["text"].startswith("while decoding\nTraceback (most recent call last):")
    assert record["text"].endswith("LookupError: gone")


def test_equal_texts_are_told_once(told):
    records, clock = told
    for _ in range(1000):
        logging.getLogger("user").warning("slow disk")
        clock.now += 1
    assert len(records) == 1
    logging.getLogger("other").warning("slow disk")
    assert len(records) == 2


def test_rate_is_limited_and_recovers(told):
    records, clock = told
    for number in range(500):
        logging.getLogger("user").warning("sample %d", number)
    assert len(records) == MAX_RECORDS
    clock.now += RECORDS_PERIOD + 1
    for number in range(500):
        logging.getLogger("user").warning("sample %d", number)
    assert len(records) == 2 * MAX_RECORDS


def test_what_is_remembered_is_bounded(told, monkeypatch):
    _records, clock = told
    monkeypatch.setattr(module, "MAX_REMEMBERED", 30)
    (handler,) = module._client_handlers()
    for number in range(100):
        logging.getLogger("user").warning("%d" + "x" * 2 * MAX_LINE, number)
        clock.now += RECORDS_PERIOD
    assert len(handler._seen) <= 30
    assert all(len(text) <= MAX_LINE for _logger, text in handler._seen)


def test_record_that_cannot_be_formatted_harms_nobody(told, monkeypatch):
    records, _clock = told
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("user").warning("%d", "no number")
    assert records == []


def test_telling_again_replaces_and_telling_nobody_undoes(told):
    records, _clock = told
    others = []
    forward_warnings(others.append)
    logging.getLogger("user").warning("to the new one")
    stop_forwarding()
    logging.getLogger("user").warning("to nobody")
    assert (records, [record["text"] for record in others]) == ([], ["to the new one"])
    assert not any(isinstance(handler, ClientHandler) for handler in logging.getLogger().handlers)


# --- limits


def test_limit_holds_for_a_period_and_tells_how_much_it_has_refused(monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    limit = RateLimit(3, 10.0)
    assert [limit.take() for _ in range(5)] == [0, 0, 0, None, None]
    now += 10.5
    assert [limit.take() for _ in range(4)] == [2, 0, 0, None]
    now += 10.5
    assert limit.take() == 1
    now += 10.5
    assert limit.take() == 0


class Session:
    """The link to a session, with room or without."""

    def __init__(self):
        self.texts = []
        self.has_room = True

    def offer(self, event):
        if self.has_room:
            self.texts.append((event.text, event.printed_by))
        return self.has_room


class Timers:
    """A loop whose functions are called by hand."""

    def __init__(self):
        self.waiting = []

    def call_at(self, when, function):
        self.waiting.append((when, function))

    def call(self):
        (_when, function), *self.waiting = self.waiting
        function()


@pytest.fixture
def forwarding(monkeypatch):
    clock, session, timers = Clock(), Session(), Timers()
    monkeypatch.setattr(module, "time", clock)
    return Forwarding(session, timers), session, timers, clock


def test_lines_pass_up_to_the_bytes_of_a_second_and_the_others_are_counted(forwarding):
    lines, session, timers, clock = forwarding
    for _ in range(99):
        lines.take("é" * 500, "worker 3")
    assert session.texts == [("é" * 500, "worker 3")] * 61  # of 1000 bytes, and 64 besides
    (end,) = [when for when, _function in timers.waiting]
    clock.now = end
    lines.take("before the note", "session")
    timers.call()
    assert session.texts[61:] == [("39 lines left out", "")]
    lines.take("after it", "session")
    assert session.texts[62:] == [("after it", "session")]


def test_short_line_does_not_slip_in_after_a_long_one_that_did_not_pass(forwarding):
    lines, session, timers, _clock = forwarding
    for _ in range(2000):
        lines.take("x" * 1000, "worker 1")
    lines.take("x", "worker 1")
    assert len(session.texts) == 61
    timers.call()
    assert session.texts[-1] == (f"{2001 - 61} lines left out", "")


def test_session_without_room_costs_lines_and_no_time(forwarding):
    lines, session, timers, clock = forwarding
    session.has_room = False
    lines.take("lost", "worker 1")
    timers.call()
    session.has_room = True
    clock.now += 2.0
    lines.take("lost, too", "worker 1")
    timers.call()
    lines.take("10 %\r20 %\r", "worker 1")
    assert session.texts == [("2 lines left out", ""), ("20 %", "worker 1")]
