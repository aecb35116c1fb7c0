"""What a dataset depends on in its process: the random generators that it is built from, and changes to it since.

And whether it has a state of its own.

A dataset that draws random numbers in its constructor is built from the trainer's state, so that it is the same on
every node, and the same as one built in the trainer. Its client numbers the changes, and each process makes each of
them once, in the same order.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import random
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


def get_states() -> tuple[Any, ...]:
    """The states of this process's global random generators, python's, numpy's and torch's; picklable, about 10 KB."""
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state().numpy().tobytes()


def set_states(states: tuple[Any, ...]) -> None:
    """Put the generators of this process into ``states``."""
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    kind = numpy_state["bit_generator"]  # the user may have set another (numpy.random.set_bit_generator)
    if kind != np.random.get_state(legacy=False)["bit_generator"]:
        np.random.set_bit_generator(getattr(np.random, kind)())  # type: ignore[attr-defined]  # numpy's stubs lack it
    np.random.set_state(numpy_state)
    torch.default_generator.set_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))


def states_to_plain(states: tuple[Any, ...]) -> dict[str, Any]:
    """The states as numbers, strings and lists, for files that may hold only these."""
    (version, python_state, gauss), numpy_state, torch_state = states
    return {
        "python": [version, list(python_state), gauss],
        "numpy": _without_arrays(numpy_state),
        "torch": torch_state.hex(),
    }


def states_from_plain(plain: dict[str, Any]) -> tuple[Any, ...]:
    """The states again."""
    version, python_state, gauss = plain["python"]
    return (version, tuple(python_state), gauss), plain["numpy"], bytes.fromhex(plain["torch"])


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_arrays(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def has_state(owner: Any) -> bool:
    """Whether an object has a state that can be saved and loaded, by torchdata's protocol.

    Methods of these names that need other arguments are of another one, such as that of streams which are told how many
    samples were taken.
    """
    return _takes(getattr(owner, "state_dict", None), 0) and _takes(getattr(owner, "load_state_dict", None), 1)


def _takes(method: Any, num_arguments: int) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:  # of compiled code, which does not say
        pass
    return True


class Change(NamedTuple):
    """A call that changes the dataset, and the seed of what it draws, which is the same in each process."""

    number: int
    attribute: str | None  # that it only sets, by :func:`assign`; None for another change
    call: Any  # the ``function`` and its ``args`` after the dataset; at the client, :class:`Frozen`
    seed: int


def assign(dataset: Any, name: str, value: Any) -> bool:
    """Set an attribute; returns whether only its last value counts, as no code of the class runs with it."""
    kind: Any = type(dataset)
    setattr(dataset, name, value)
    member = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    has_setter = hasattr(type(member), "__set__") and not isinstance(member, types.MemberDescriptorType)
    return kind.__setattr__ is object.__setattr__ and not has_setter


# Number of the last change made in this process, by the key of the dataset; workers inherit it with the dataset.
_made: dict[int, int] = {}


# What this process has built itself, described as ``wire/built.py`` does, by the key of the dataset.
built: dict[int, Any] = {}


def catch_up(dataset: Any, key: int, changes: Sequence[Change]) -> Any:
    """Make those of ``changes`` that are new to this process, each with its seed; returns the result of the last."""
    result = None
    for number, _attribute, call, seed in changes:
        if number > _made.get(key, 0):
            # Once per change. Those of a sample are faster to set, and in a room that stands on this one.
            random.seed(seed)
            np.random.seed(np.random.SeedSequence(seed).generate_state(4))
            torch.default_generator.manual_seed(seed)
            result = call["function"](dataset, *call["args"])
            _made[key] = number
    return result


def derive_seed(number: int) -> int:
    """The seed of a change: one for each number, and each state of this process's generators, which stays as it is."""
    return int.from_bytes(hashlib.blake2b(pickle.dumps((number, get_states())), digest_size=8).digest(), "little") >> 1


def forget_changes(key: int) -> None:
    """Let the changes to a dataset be made again, in another construction of it."""
    _made.pop(key, None)


def append_change(changes: tuple[Change, ...], change: Change) -> tuple[Change, ...]:
    """The changes, and one more. ``dataset.epoch = n`` replaces the last value, so that the list does not grow with it.

    Only within a row of plain attributes: any other change in between may have read the value, as the setter of a
    property may.
    """
    start = len(changes)
    while change.attribute is not None and start > 0 and changes[start - 1].attribute is not None:
        start -= 1
    return *changes[:start], *(other for other in changes[start:] if other.attribute != change.attribute), change


def last_of(changes: tuple[Change, ...]) -> int:
    """The number of the last change; 0 without one."""
    return changes[-1].number if changes else 0


def changes_after(number: int, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Those of ``changes`` that a copy lacks which has made them up to ``number``."""
    return tuple(change for change in changes if change.number > number)
