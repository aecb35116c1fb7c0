"""Whether the lists of the script's own modules are in the same order on a node. Pure.

A set of texts has another order in each process, as their hashes begin with a random number, and a folder may have
another one on each machine. Where a module makes a list of these as it is imported, or numbers them, an index means
something else on each node, and nobody notices. So nodes are told how the script's lists are ordered, by digests alone.

Lists that differ in more than their order are the node's own, such as what a module finds on its machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

# Of one variable; larger ones are not compared.
_MAX_VALUES, _MAX_CHARACTERS = 1 << 15, 1 << 20
_MAX_DEPTH = 4

# Lists in a dictionary that are compared by themselves.
_MAX_LISTS = 100

# Exactly these, and no truth values: of two features, one machine may have the first, and another one the second.
_ATOMS = (str, int, float, bytes, type(None))
_CONTAINERS = (list, tuple, dict)


class Order(NamedTuple):
    """Digests of a list, tuple or dictionary."""

    values: bytes  # of all texts and numbers in it, in any order
    order: bytes  # of its items in their order; of a dictionary, of its keys
    items: bytes  # of a dictionary, of its items in any order

    def differs(self, other: Order) -> bool:
        """Whether the other one has the same values in another order.

        Not if it has the same values by the same keys, as these are looked up.
        """
        is_moved = self.values == other.values and self.order != other.order
        return is_moved and (not self.items or self.items != other.items)


def orders_in(module: str, namespace: Mapping[str, Any], key: bytes, prefix: str = "") -> dict[str, Order]:
    """The orders of what a module has, and its classes, by the names of variables.

    Args:
        key: Secret without which the digests tell nothing about a content that may be guessed.
    """
    found: dict[str, Order] = {}
    for name, value in list(namespace.items()):
        if issubclass(type(value), type):  # a proxy would make what it stands for, to tell its class
            if value.__module__ == module and value.__qualname__ == prefix + name:
                found |= orders_in(module, vars(value), key, f"{prefix}{name}.")
        elif type(value) in _CONTAINERS and not (name.startswith("__") and name.endswith("__")):
            found.update(_orders_of(prefix + name, value, key))
    return found


def _orders_of(name: str, value: Any, key: bytes) -> Iterator[tuple[str, Order]]:
    try:
        order = _order_of(value, key)
    except (TypeError, OverflowError, RuntimeError, ValueError):
        # It has other parts, or too many, or too many digits, or a thread changes it.
        return
    if len(value) > 1:
        yield name, order
    if type(value) is dict and len(value) <= _MAX_LISTS:
        for each, part in list(value.items()):
            if type(part) in _CONTAINERS:
                yield from _orders_of(f"{name}[{each!r}]", part, key)


def _order_of(value: Any, key: bytes) -> Order:
    texts, num_characters = list[str](), 0
    for text in map(repr, _values_in(value, 0)):
        texts.append(text)
        num_characters += len(text)
        if len(texts) > _MAX_VALUES or num_characters > _MAX_CHARACTERS:
            raise OverflowError
    items = _digest(sorted(map(repr, value.items())), key) if type(value) is dict else b""
    return Order(_digest(sorted(texts), key), _digest(map(repr, value), key), items)


def _values_in(value: Any, depth: int) -> Iterator[Any]:
    if type(value) in _ATOMS:
        yield value
    elif depth == _MAX_DEPTH or type(value) not in _CONTAINERS:
        raise TypeError(type(value))
    else:
        for each in value:
            yield from _values_in(each, depth + 1)
        for each in value.values() if type(value) is dict else ():
            yield from _values_in(each, depth + 1)


def _digest(texts: Iterable[str], key: bytes) -> bytes:
    content = "\0".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, key=key, digest_size=16, person=b"rpcdl-orders").digest()
