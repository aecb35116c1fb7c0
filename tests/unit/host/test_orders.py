"""Which lists of a module differ in their order alone: on nodes, see ``tests/behaviour/test_sources.py``."""

from __future__ import annotations

from rpcdataloader.host.orders import orders_in


def order_of(value, key=b"secret"):
    return orders_in("module", {"value": value}, key).get("value")


def test_digests_tell_nothing_without_the_key():
    assert order_of(["cat", "dog"]) == order_of(["cat", "dog"])
    one, other = order_of(["cat", "dog"]), order_of(["cat", "dog"], b"another")
    assert not {*one} & {*other} - {b""}


def test_values_of_other_types_or_bounds_are_others():
    for one, other in [
        (["1", 2], [2, 1]),
        (["a", "b,c"], ["a,b", "c"]),
        ([b"a", "b"], ["b", "a"]),
        ([1, 2], [2.0, 1.0]),
    ]:
        assert not order_of(one).differs(order_of(other))


def test_list_that_contains_itself_or_too_much_is_not_compared():
    endless = [1]
    endless.append(endless)
    assert order_of(endless) is None
    assert order_of(["x" * (1 << 20), "y"]) is None
    order_of([10**5000, 1])  # which Python may refuse to write
