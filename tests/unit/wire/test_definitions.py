"""What a client knows of the definitions that a process of a node has."""

from __future__ import annotations

import pytest

from rpcdataloader.wire import by_value, definitions
from rpcdataloader.wire.definitions import Definition
from rpcdataloader.wire.known import Known


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


def refuse(name, user, value, error):
    raise AssertionError(name, user, value) from error


def test_other_threads_may_collect_meanwhile(monkeypatch):
    script = definitions._Script()
    script._objects = {name: (lambda: None, 0) for name in ("gone", "another")}

    def meanwhile(name):
        script._objects[f"new beside {name}"] = (lambda: None, 0)
        return False

    monkeypatch.setattr(definitions, "is_patch", meanwhile)
    assert script.collect({}, refuse) == {}


class Lazy:
    """Makes what it stands for when it is asked for its class, as proxies of libraries do."""

    @property  # type: ignore[misc]
    def __class__(self):
        raise AssertionError("it is made")


@pytest.mark.parametrize("with_rest", [False, True])
def test_lazy_globals_that_nobody_uses_stay_so(monkeypatch, with_rest):
    namespace = {"__name__": "__main__", "lazy": Lazy(), "number": 1}
    monkeypatch.setattr(definitions, "main_globals", lambda: namespace)
    found = definitions._Script().collect({"number": ""}, refuse, with_rest=with_rest)
    assert list(found) == ["number"]


def test_code_that_asks_for_subclasses_leaves_lazy_globals_so(monkeypatch):
    class Own:
        pass

    Own.__module__ = "__main__"
    monkeypatch.setattr(by_value, "main_globals", lambda: {"lazy": Lazy(), "Own": Own})
    assert "Own" in by_value.globals_of_script((lambda kind: kind.__subclasses__()).__code__)
