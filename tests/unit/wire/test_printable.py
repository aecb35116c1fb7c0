"""What is left of text that others have chosen."""

from __future__ import annotations

from rpcdataloader.wire.messages import escaped, printable


def test_only_what_can_do_something_to_a_terminal_is_replaced():
    assert printable("é日 ok") == "é日 ok"
    assert printable("\x1b[2J\r\n\t\u202e\x00\udcff.") == "?[2J??????."
    assert printable("two\nlines\x1b", keep="\n") == "two\nlines?"


def test_only_what_can_do_something_to_a_terminal_is_escaped():
    assert escaped("é日\tok") == "é日\tok"
    assert escaped("\x1b[2J\r\n\u202e\x00\udcff\U000e0001.") == r"\x1b[2J\r\n\u202e\x00\udcff\U000e0001."
