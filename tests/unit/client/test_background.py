"""The threads behind a client: woken by any thread, at any time."""

from __future__ import annotations

import io
import sys
import threading
from unittest.mock import Mock

import pytest

from rpcdataloader.client import background
from rpcdataloader.client.background import Callers, Printer
from tests.conftest import wait_until


@pytest.fixture
def printer():
    printer = Printer()
    yield printer
    printer.close()
    assert printer._thread is None or not printer._thread.is_alive()


def test_lines_come_at_the_end_of_an_interpreter_that_starts_no_thread(printer, capsys, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    printer.put("node01:6543 worker 3", "last words")
    printer.close()
    assert capsys.readouterr().err == "(node01:6543 worker 3) last words\n"


def test_standard_error_that_is_gone_does_no_harm(printer, monkeypatch):
    for broken in None, io.BytesIO():
        monkeypatch.setattr(sys, "stderr", broken)
        printer.put("node", "lost")
        wait_until(lambda: not printer._lines)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    printer.put("node", "seen")
    wait_until(lambda: sys.stderr.getvalue() == "(node) seen\n")


def test_callbacks_that_wait_for_those_that_hang_do_not_hang_the_end(monkeypatch):
    monkeypatch.setattr(background, "MAX_CALLERS", 1)
    callers, go_on, ran_in = Callers(), threading.Event(), []
    callers.call(go_on.wait)
    callers.call(lambda: ran_in.append(threading.current_thread()))
    callers.close(0.01)
    assert ran_in == []
    go_on.set()
    wait_until(lambda: ran_in)
    callers.close(10)
    assert ran_in[0] is not threading.current_thread()


def test_callbacks_run_at_the_end_where_no_thread_starts(monkeypatch):
    callers, ran_in = Callers(), []
    monkeypatch.setattr(background, "_started", Mock(side_effect=RuntimeError("can't start new thread")))
    callers.call(lambda: ran_in.append(threading.current_thread()))
    callers.close(10)
    assert ran_in == [threading.current_thread()]
