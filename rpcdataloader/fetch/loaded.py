"""A state that was loaded into a dataset or sampler: it holds for one iteration, and is undone where it stays.

Both kinds are in use. A state of torchdata's nodes holds for the next iteration, one of Hugging Face's streams for all
that follow, whose samples would be lost in each later pass of the same process. No method tells. So the first sample of
each iteration, of a sampler the first batch, is watched: if it leaves the dataset where the first one after loading has
left it, the state still holds; apart from what runs on through all iterations, such as a count of all samples. Then the
attributes that loading has changed, and that are still what it made of them, are set back, unless the state reports
them. A dataset that counts its epochs so keeps its count. (Loading a state of the beginning would lose that; and asking
for one before loading makes some datasets ignore what is loaded, such as torchdata's.)
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import operator
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rpcdataloader.wire.digests import digest

logger = logging.getLogger("rpcdataloader.loader")

_MISSING = object()  # in place of an attribute

_CONTAINERS = (dict, list, set)

# Bytes of the pickled state of a generator: those of numpy take the least, 150.
_MIN_GENERATOR = 120


class LoadedState:
    """What loading a state has changed in a dataset of this process.

    Args:
        dataset: Dataset, into which ``load`` loads the state.
        state: That state.
    """

    def __init__(self, dataset: Any, state: Any, load: Callable[[], None]) -> None:
        self._saved = _parts(state)
        before = _attributes(dataset)
        load()
        # Each attribute that loading has changed: its owner, name, and value before and after.
        self._changed = [
            (weakref.ref(owner), name, before[key][1].get(name, _MISSING), values.get(name, _MISSING))
            for key, (owner, values) in _attributes(dataset).items()
            if key in before
            for name in before[key][1].keys() | values.keys()
            if not _same(before[key][1].get(name, _MISSING), values.get(name, _MISSING))
        ]
        # The parts of the state that the first sample after loading has changed; None before that.
        self._first: dict[Any, Any] | None = None
        self._at_begin: dict[Any, Any] = {}  # before the first sample of a later iteration
        # The attributes at that time.
        self._values: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._generators: list[Callable[[], object]] = []  # functions that set generators to where they were then
        self._is_anew = False  # True while an iteration is to begin anew that has begun at the loaded position
        self.is_told = False  # True to warn no more of a state that still holds

    def begins(self, dataset: Any) -> None:
        """Note that a later iteration begins."""
        if self._first is not None:
            self._at_begin = _parts_of(dataset)
            self._values = _attributes(dataset)
            owned = [value for _owner, values in self._values.values() for value in values.values()]
            self._generators = [restore for value in owned if (restore := _restores(value)) is not None]

    def was_used(self, dataset: Any) -> None:
        """Use the state, if the pass was left before its first sample: else one for one iteration waits for another."""
        if self._first is None:
            try:
                ended = next(iter(dataset), self) is self
            except Exception:
                logger.debug("the first sample after a loaded state has failed", exc_info=True)
                ended = False
            self.gave_first(dataset, ended=ended)

    def gave_first(self, dataset: Any, *, ended: bool) -> bool:
        """Note that an iteration has given its first sample, or that it has none.

        Returns:
            True if a later iteration has begun at the loaded position, and is to begin anew, which is tried once.
        """
        is_undone = self._compare_first(dataset, ended=ended)
        # They refer to the dataset, which would live as long as this.
        self._values, self._generators = {}, []
        return is_undone

    def _compare_first(self, dataset: Any, *, ended: bool) -> bool:
        was_anew, self._is_anew = self._is_anew, False
        # At the end, a dataset may have counted an epoch.
        now = {"ended": True} if ended else {**_parts_of(dataset), "ended": False}
        if self._first is None:
            moved = {name: part for name, part in now.items() if self._saved.get(name) != part}
            self._first = {**(moved if len(moved) > 1 else now), "ended": ended}
            return False
        # All else must be as before the sample, or as loaded: where each epoch has a count of its own, that of another
        # epoch stays.
        elsewhere = {name: part for name, part in now.items() if self._first.get(name) != part}
        running = {name for name, part in elsewhere.items() if self._runs_on(name, part)}
        if running and self._first.keys() - elsewhere.keys() <= {"ended"}:
            return False  # nothing tells of the position
        elsewhere = {name: part for name, part in elsewhere.items() if name not in running}
        if any(part not in (self._at_begin.get(name), self._saved.get(name)) for name, part in elsewhere.items()):
            return False
        if elsewhere.keys() & self._first.keys() or self._first.keys() - now.keys():
            return False
        # What has not helped leaves the state somewhere else than in attributes.
        is_undone = not was_anew and (self.cancel(dataset) or self.undo(only_if_unchanged=True))
        self._is_anew = is_undone
        if is_undone:
            self._forget_first(ended=ended)
        if not is_undone and not self.is_told:
            self.is_told = True
            logger.warning(
                "this pass over %s seems to begin where an earlier one was resumed, as if the loaded state still held: "
                "let load_state_dict() hold for one iteration, or samples are lost",
                type(dataset).__name__,
            )
        return is_undone

    def cancel(self, dataset: Any) -> bool:
        """Set back the attributes that loading has changed, without those that the state reports, such as counts.

        So the place where an iteration was to begin is forgotten; returns False if there is no such attribute.
        """
        is_undone = False
        for reference, name, before, after in self._changed:
            owner = reference()
            if owner is None or _same(before, after) or not _same(vars(owner).get(name, _MISSING), after):
                continue
            value, reported = vars(owner).get(name, _MISSING), _parts_of(dataset)
            _set(owner, name, before)
            if _parts_of(dataset) == reported:
                is_undone = True
            elif value is _MISSING:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value
        return is_undone

    def _runs_on(self, name: Any, now: Any) -> bool:
        """Whether a part of the state runs on from one iteration to the next, such as a count of all samples."""
        before, saved, first = (parts.get(name) for parts in (self._at_begin, self._saved, self._first or {}))
        if name == "ended" or None in (before, saved, first) or now == before:
            return False
        numbers = [_number(part) for part in (before, now, saved, first)]
        if None not in numbers:
            return bool(numbers[1] - numbers[0] == numbers[3] - numbers[2])
        # The state of a generator.
        return not any(type(part) is bytes and len(part) < _MIN_GENERATOR for part in (before, now, saved, first))

    def _forget_first(self, *, ended: bool) -> None:
        """Set back what an iteration has counted that began where the state says.

        All attributes, if it was empty; otherwise numbers, and generators.
        """
        for restore in self._generators:
            restore()
        by_loading = {(id(reference()), name): after for reference, name, _before, after in self._changed}
        for owner, values in self._values.values():
            for name, value in values.items():
                # Not those that are set back to before loading.
                is_held = (id(owner), name) in by_loading and _same(value, by_loading[id(owner), name])
                if not is_held and (ended or type(value) in (int, float)):
                    vars(owner)[name] = value

    def keep_later_epochs(self) -> None:
        """Set back numbers of epochs that were higher before loading: the script has chosen them for the next pass."""
        for reference, name, before, _after in self._changed:
            owner = reference()
            if owner is not None and "epoch" in name and type(before) is int:
                now = vars(owner).get(name)
                vars(owner)[name] = max(before, now) if type(now) is int else now

    def undo(self, *, only_if_unchanged: bool = False) -> bool:
        """Set back the attributes that loading has changed; returns False if it has changed nothing.

        Args:
            only_if_unchanged: Leave those that have changed since.
        """
        undone = False
        for reference, name, before, after in self._changed:
            if (owner := reference()) is None:
                continue
            now = vars(owner).get(name, _MISSING)
            if _same(now, before) or (only_if_unchanged and not _same(now, after)):
                continue
            undone = True
            _set(owner, name, before)
        return undone


def _set(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        del vars(owner)[name]
    else:
        vars(owner)[name] = _copied(value)


def _attributes(dataset: Any) -> dict[int, tuple[Any, dict[str, Any]]]:
    """The attributes of a dataset, and of those of its parts that can load a state; by the ids of their owners."""
    found: dict[int, tuple[Any, dict[str, Any]]] = {}
    todo = [dataset]
    while todo:
        owner = todo.pop()
        # The class is asked: a proxy has all attributes.
        if id(owner) not in found and hasattr(owner, "__dict__") and hasattr(type(owner), "load_state_dict"):
            found[id(owner)] = owner, {name: _copied(value) for name, value in vars(owner).items()}
            todo += vars(owner).values()
    return found


def _copied(value: Any) -> Any:
    """A value, or a copy of a container, which may change in place."""
    return value.copy() if type(value) in _CONTAINERS else value


def _same(one: Any, other: Any) -> bool:
    """Whether an attribute is the same object, or a container of the same objects."""
    if type(one) is not type(other) or type(one) not in _CONTAINERS:
        return one is other or (type(one) is type(other) and type(one) in (int, str, bool) and bool(one == other))
    if type(one) is dict:
        one, other = list(itertools.chain(*one.items())), list(itertools.chain(*other.items()))
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _parts_of(dataset: Any) -> dict[Any, Any]:
    try:
        return _parts(dataset.state_dict())
    except Exception:
        logger.debug("cannot tell whether a loaded state still holds", exc_info=True)
        return {(): object()}


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two states of a dataset are equal, as far as can be told."""
    return _parts(one) == _parts(other)


def _restores(value: Any) -> Callable[[], object] | None:
    """A function that sets a generator of the dataset, of any kind, to where it is now; None for other objects."""
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    return None


def _number(part: Any) -> Any:
    value = pickle.loads(part) if type(part) is bytes and len(part) < _MIN_GENERATOR else None
    return value if type(value) in (int, float) else None


def _parts(state: Any, path: tuple[Any, ...] = ()) -> dict[Any, Any]:
    """What is in a state, by the keys that lead there, as values that can be compared."""
    if type(state) is dict and "bit_generator" not in state:
        return {name: part for key, value in state.items() for name, part in _parts(value, (*path, key)).items()}
    try:
        return {path: digest(state) if isinstance(state, torch.Tensor) else pickle.dumps(state, 5)}
    except Exception:
        return {path: object()}  # equal to no other


# Of the datasets and samplers of this process into which a state was loaded, by their ids: some cannot be hashed.
_loaded: dict[int, tuple[weakref.ref[Any], LoadedState]] = {}


def loaded_state(dataset: Any) -> LoadedState | None:
    """The last state that was loaded into a dataset; None without one."""
    found = _loaded.get(id(dataset))
    return None if found is None else found[1]


def note_loaded(dataset: Any, loaded: LoadedState | None) -> None:
    """Keep what loading has changed, as long as there is the dataset; None to forget it."""
    key = id(dataset)
    _loaded.pop(key, None)
    if loaded is not None and type(dataset).__weakrefoffset__:

        def forget(_gone: object, found: dict[int, Any] = _loaded) -> None:  # the global is gone at exit
            found.pop(key, None)

        _loaded[key] = weakref.ref(dataset, forget), loaded


_told: set[str] = set()  # names of classes


def tell_not_implemented(owner: Any, error: NotImplementedError) -> None:
    """Say, once per class and process, that a dataset or sampler has no state after all."""
    if (name := type(owner).__qualname__) not in _told:
        _told.add(name)
        logger.info("%s is used without a state, as its state_dict() is not implemented: %s", name, error)
