"""What a client knows of the definitions that a process of a node has."""

from __future__ import annotations

from rpcdataloader.wire.definitions import Definition, Known


def table(**contents: str) -> dict[str, Definition]:
    """Definitions that are large enough to be inherited."""
    return {
        name: Definition(((name, text.encode()),), text.encode() * (1 << 16), frozenset(), (0,), number)
        for number, (name, text) in enumerate(contents.items())
    }


def sent(known: Known, **contents: str) -> None:
    known.sending(table(**contents).values())
    known.arrived(table(**contents).values())


def lacking(known: Known, **contents: str) -> list[str]:
    return [name for each in known.lacking(table(**contents)) for name, _token in each.tokens]


def test_process_inherits_what_its_parent_had_when_it_was_requested():
    parent = Known()
    sent(parent, one="a", other="a")
    child = parent.inherit()
    child.begun()
    assert lacking(child, one="a", other="b", third="a") == ["other", "third"]


def test_what_the_parent_is_sent_before_the_fork_counts_as_inherited_by_chance():
    parent = Known()
    sent(parent, one="a", other="a", third="a")
    child = parent.inherit()
    parent.sending(table(one="b").values())
    sent(parent, third="b")
    sent(parent, third="a")
    child.begun()
    sent(parent, other="b")
    assert lacking(child, one="a", other="a", third="a") == ["one", "third"]
