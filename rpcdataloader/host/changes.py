"""Changes of a dataset, numbered by its client: each process makes each of them once, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Change(NamedTuple):
    """A function of the dataset that changes it."""

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


# Number of the last change made in this process, by the key of the dataset; workers inherit it with the dataset.
_made: dict[int, int] = {}


def catch_up(dataset: Any, key: int, changes: Sequence[Change]) -> Any:
    """Make those of ``changes`` that are new to this process; returns the result of the last one."""
    result = None
    for number, function, args in changes:
        if number > _made.get(key, 0):
            result = function(dataset, *args)
            _made[key] = number
    return result


def without_overwritten(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Drop attributes set again later, so that ``dataset.epoch = n`` does not make the list grow without limit.

    Only within a row of attributes: any other change in between may have read the value.
    """
    left: list[Change] = []
    for change in changes:
        if change.function is setattr:
            start = len(left)
            while start > 0 and left[start - 1].function is setattr:
                start -= 1
            left[start:] = [other for other in left[start:] if other.args[0] != change.args[0]]
        left.append(change)
    return tuple(left)
