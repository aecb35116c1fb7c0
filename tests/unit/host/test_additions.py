"""What datasets and loaders add to sessions adds up, or contradicts what was added before."""

from __future__ import annotations

import pytest

from rpcdataloader.host import environment
from rpcdataloader.host.environment import Additions, pack

ONE = pack("one", {"one.py": b"1"})
OTHER_ONE = pack("one", {"one.py": b"2"})
TWO = pack("two", {"two.py": b"12345678"})


def test_values_add_up_and_one_that_differs_is_named():
    first = Additions({"A": "1"})
    assert first.plus(Additions({"A": "1"})) is first  # nothing to send
    both = first.plus(Additions({"B": "2"}))
    assert both == Additions({"A": "1", "B": "2"})
    with pytest.raises(ValueError, match=r"env: B is to be '3', but another dataset or loader .* has set it to '2'"):
        both.plus(Additions({"C": "4", "B": "3"}))
    assert first == Additions({"A": "1"})


def test_modules_add_up_and_another_version_is_named():
    first = Additions.of({}, [ONE], False)
    assert first.plus(Additions.of({}, [pack("one", {"one.py": b"1"})], False)) is first
    both = first.plus(Additions.of({"A": "1"}, [TWO], False))
    assert both == Additions({"A": "1"}, {"one": ONE, "two": TWO})
    assert both.since(first) == Additions({"A": "1"}, {"two": TWO})
    assert first.since(Additions()) == first
    with pytest.raises(ValueError, match="py_modules: the files of one differ from those that another"):
        both.plus(Additions.of({}, [OTHER_ONE], False))


def test_limit_holds_for_all_modules_together(monkeypatch):
    monkeypatch.setattr(environment, "MAX_BYTES", 8)
    first = Additions().plus(Additions.of({}, [TWO], False))
    with pytest.raises(ValueError, match=r"py_modules: two, one have .* together, and the limit is"):
        first.plus(Additions.of({}, [ONE], False))
