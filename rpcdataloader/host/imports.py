"""Which of the script's own modules a node may import otherwise than the script has done. Pure but for generators.

A module computes from others as it is imported. If the script had changed one of these by then, or if the module has
drawn random numbers, a node that imports it anew gets other data.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

# How often a module is looked at before others run: a script may import hundreds of modules, each of which uses most of
# those before it.
_MAX_LOOKS = 20


@dataclass
class Imports:
    """What imports of own modules have depended on.

    Thread-safe without a lock; imports in several threads at a time may count as one that contains the other.

    Attributes:
        moved: Modules in which the script has changed something.
        differing: Modules that a node may import otherwise.
    """

    moved: set[str] = field(default_factory=set)
    differing: set[str] = field(default_factory=set)
    _named: dict[str, Set[str]] = field(default_factory=dict)  # what a module names
    _used: dict[str, Set[str]] = field(default_factory=dict)  # own modules that it uses, also by others
    _by_name: dict[str, set[str]] = field(
        default_factory=dict
    )  # modules by their names, and by the last parts of these
    _running: list[_Running] = field(default_factory=list)
    _unsure: dict[str, set[str]] = field(default_factory=dict)  # modules that use one that was not looked at then
    _num_looks: Counter[str] = field(default_factory=Counter)
    _seen: set[str] = field(default_factory=set)  # modules that need no look before the outermost import has ended

    def begin(self, name: str, code: types.CodeType) -> Set[str]:
        """Note that a module is about to run; the modules to look at before it does.

        Each is looked at once, before the first one that uses it, and not if it is itself as new: what modules change
        in each other as they are imported, they change on a node, too.
        """
        if not self._running:
            self._seen.clear()
        for outer in self._running[-1:]:
            self._note_generators(outer)
        self._named[name] = _names_in(code)
        used = self._used_by(name) - self._seen
        self._seen |= {*used, name}
        looks = {each for each in used if self._num_looks[each] < _MAX_LOOKS}
        for each in used - looks:
            self._unsure.setdefault(each, set()).add(name)
        self._num_looks.update(looks)
        self._running.append(_Running(name, _generators()))
        return looks

    def end(self, name: str) -> Set[str]:
        """Note that a module has run, or failed; at the end of the outermost import, what was looked at before."""
        running = next((each for each in reversed(self._running) if each.name == name), None)
        if running is None:
            return frozenset()
        self._note_generators(running)
        self._running.remove(running)
        for outer in self._running[-1:]:
            outer.generators = _generators()
        self._set_used(name, self._used_by(name))
        self._judge(name)
        return frozenset() if self._running else {each for each in self._seen if self._num_looks[each] < _MAX_LOOKS}

    def forget(self, name: str) -> None:
        """Begin anew with a module, for tests."""
        for each in (self.moved, self.differing):
            each.discard(name)
        self._named.pop(name, None)
        self._used.pop(name, None)
        for found in self._by_name.values():
            found.discard(name)

    def take_early(self, name: str, code: types.CodeType) -> None:
        """Note a module that was imported before anything was noted."""
        self._named[name] = _names_in(code)
        self._set_used(name, frozenset())

    def judge_early(self, names: Set[str]) -> None:
        """Note what follows from what has been found of early modules."""
        for name in names & self._named.keys():
            self._used[name] = self._used_by(name)
        for name in names & self._used.keys():
            self._judge(name)

    def judge_unsure(self) -> None:
        """Note what follows of modules that were not looked at before others used them, and have changed by now."""
        unsure: set[str] = set().union(*(self._unsure.pop(each, set()) for each in self.moved)) - self.differing
        if unsure:
            self.differing |= unsure
            for name in self._used:  # in the order of imports
                self._judge(name)

    def _judge(self, name: str) -> None:
        if not self._used[name].isdisjoint(self.moved | self.differing):
            self.differing.add(name)

    def _used_by(self, name: str) -> Set[str]:
        found = {each for known in self._named[name] & self._by_name.keys() for each in self._by_name[known]}
        return found.union(*(self._used[each] for each in found)) - {name}

    def _set_used(self, name: str, used: Set[str]) -> None:
        self._used[name] = used
        for each in name, name.rpartition(".")[2]:
            self._by_name.setdefault(each, set()).add(name)

    def _note_generators(self, running: _Running) -> None:
        if self._named[running.name].isdisjoint(_SEEDING) and _have_drawn(running.generators, _generators()):
            self.differing.add(running.name)


@dataclass
class _Running:
    """A module that is being imported, and the generators' states since it, or another one, began or ended."""

    name: str
    generators: tuple[Any, ...]


# What a module names that seeds the generators: a node draws the same numbers then.
_SEEDING = frozenset({"manual_seed", "seed", "seed_all", "seed_everything", "set_random_seeds", "set_seed", "setstate"})


def _names_in(code: types.CodeType) -> Set[str]:
    """All that code names, modules included; and its texts, by which modules are found, too."""
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, str):
            found.add(each)
        elif isinstance(each, types.CodeType):
            found |= _names_in(each)
    return found


def _generators() -> tuple[Any, ...]:
    """States of the global random generators; None of a library that is not imported."""
    numpy = torch = None
    with contextlib.suppress(Exception):  # it is being imported
        state = sys.modules["numpy.random"].get_state(legacy=False)
        numpy = state["state"]["pos"], state["state"]["key"].tobytes(), state["has_gauss"]
    with contextlib.suppress(Exception):
        torch = sys.modules["torch"].default_generator.get_state().numpy().tobytes()
    return random.getstate(), numpy, torch


# Where the generator of numpy is before its first number.
_BEFORE_THE_FIRST = 624


def _have_drawn(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether numbers were drawn. What torch draws first is the same in each process."""
    (python, numpy, torch), (python_after, numpy_after, torch_after) = before, after
    if numpy is None and numpy_after is not None:
        numpy = (_BEFORE_THE_FIRST, *numpy_after[1:])
    return bool(python != python_after or numpy != numpy_after or torch not in (None, torch_after))
