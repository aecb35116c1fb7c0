"""What is left of text that others have chosen."""

from __future__ import annotations

from rpcdataloader.wire.messages import printable


def test_only_what_can_do_something_to_a_terminal_is_escaped():
    assert printable("é日 ok") == "é日 ok"
    assert printable("two\nlines\x1b", keep="\n") == "two\nlines\\x1b"
    assert printable("\x1b[2J\r\n\u202e\x00\udcff\U000e0001.") == r"\x1b[2J\r\n\u202e\x00\udcff\U000e0001."
