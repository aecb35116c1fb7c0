"""The printer: origins, nothing that changes a terminal, and nobody waits for a terminal that is stopped."""

from __future__ import annotations

import io
import sys

import pytest

from rpcdataloader.client.background import Printer
from tests.conftest import wait_until


@pytest.fixture
def printer():
    printer = Printer()
    yield printer
    printer.close()
    assert printer._thread is None or not printer._thread.is_alive()


def test_lines_come_in_their_order_with_their_origin(printer, capsys):
    for number in range(20):
        printer.put("node01:6543 worker 3", f"line {number}")
    printer.close()
    assert capsys.readouterr().err == "".join(f"(node01:6543 worker 3) line {number}\n" for number in range(20))


def test_nothing_of_a_line_changes_the_terminal_or_begins_another_line(printer, capsys):
    printer.put("node\x1b[2J worker 1", "a\tb\x1b]0;title\x07\r\n(node02 worker 1) c\u202e\x9b1mé 😀\x00")
    printer.close()
    assert capsys.readouterr().err == (
        "(node\\x1b[2J worker 1) a\tb\\x1b]0;title\\x07\\r\\n(node02 worker 1) c\\u202e\\x9b1mé 😀\\x00\n"
    )


def test_standard_error_that_is_gone_does_no_harm(printer, monkeypatch):
    for broken in None, io.BytesIO():
        monkeypatch.setattr(sys, "stderr", broken)
        printer.put("node", "lost")
        wait_until(lambda: not printer._lines)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    printer.put("node", "seen")
    wait_until(lambda: sys.stderr.getvalue() == "(node) seen\n")
