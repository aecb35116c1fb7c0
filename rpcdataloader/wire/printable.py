"""Text of others, fit for a terminal and a log. Pure."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """``text`` without what could do something to a terminal, or begin a line: a question mark is in its place.

    Args:
        keep: Characters to leave as they are.
    """
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def escaped(text: str) -> str:
    """``text`` with what could do something to a terminal written as in ``\\x1b``; tabs stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in text)
