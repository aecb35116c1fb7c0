"""What a worker changes in its modules as the script has changed them, and undoes; see ``patches`` for the keys."""

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch

from rpcdataloader.host.patches import ABSTRACT, dispatcher_of, is_content
from rpcdataloader.host.refill import refill, refilling
from rpcdataloader.host.snapshots import Deleted, cells_of, parts_of
from rpcdataloader.host.sources import has_imported


def patched(name: str, received: Mapping[str, Any]) -> Any:
    """The object that a key means in this process.

    Args:
        received: Values of keys that are not given to :func:`patch` yet.
    """
    place = name.partition("[")[0]
    values = {**_later.values, **received}
    with contextlib.suppress(Exception):  # it is not imported, which must wait for what computes from it
        module, _colon, path = place.partition(":")
        own: Any = sys.modules[module]
        for each in path.split("."):
            own = parts_of(own)[each] if each.startswith("<") else getattr(own, each)
        if name not in values or (is_content(name) and refilling(own, values[name])):
            return own
    return values[name]


def patch(name: str, value: Any) -> None:
    """Change a module as the script has done, once it is imported here; without effect where it is missing."""
    _later.values[name] = value
    if not _later.is_importing:
        _later.change_imported()
    if _later.values and _later not in sys.meta_path:
        sys.meta_path.insert(0, _later)


def keep(names: Set[str]) -> list[str]:
    """Undo what :func:`patch` has changed here, and in the processes of which this one is a fork, but for ``names``.

    Returns:
        The names of what was undone.
    """
    undone = [name for name in _later.values if name not in names]
    for name in undone:
        del _later.values[name]
    for place, changes in list(_changes_here.items()):
        if next(reversed(changes.values)) not in names:
            del _changes_here[place]
            for undo in reversed(changes.undo.values()):
                with contextlib.suppress(AttributeError, TypeError):
                    undo()
            for name, value in changes.values.items():
                if name in names:
                    _apply(name, value)
                else:
                    undone.append(name)
    return undone


class _ChangesHere(NamedTuple):
    """What was changed in one place."""

    owner: Any
    name: str
    before: Any  # Deleted if there was nothing
    undo: dict[str, Callable[[], object]]  # by name; the first one first
    values: dict[str, Any]  # the last one last


_changes_here: dict[str, _ChangesHere] = {}


def _note(name: str, value: Any, place: Any, last: str) -> None:
    """Note a change before it is made."""
    key = name.partition("[")[0]
    changes = _changes_here.get(key) or _ChangesHere(place, last, _attribute(place, last), {}, {})
    _changes_here[key] = changes
    if name not in changes.undo:
        changes.undo[name] = _undo_of(name, place, last, value)
    changes.values.pop(name, None)
    changes.values[name] = value


def _undo_of(name: str, place: Any, last: str, value: Any) -> Callable[[], object]:
    """What makes an attribute have its present value again, with its present content if that is about to change."""
    before = _attribute(place, last)
    if before is Deleted:
        return lambda: delattr(place, last)
    if isinstance(before, types.MappingProxyType) and is_content(name):  # a function of functools.singledispatch
        former = {kind: place.dispatch(kind) for kind in value}
        return lambda: [place.register(*each) for each in former.items()]
    is_cell, content = last.startswith("<"), None
    if (is_content(name) or is_cell) and type(before) is type(value):
        with contextlib.suppress(Exception):  # it cannot be copied
            content = (copy.deepcopy if isinstance(before, torch.Tensor) else copy.copy)(before)

    def undo() -> None:
        if content is not None:
            refill(before, content)
        if is_cell:
            cells_of(place)[last].cell_contents = before
        else:
            setattr(place, last, before)

    return undo


def _attribute(owner: Any, name: str) -> Any:
    """What an owner has itself; Deleted without such an attribute."""
    if not isinstance(owner, types.FunctionType):
        return vars(owner).get(name, Deleted)
    return cells_of(owner)[name].cell_contents if name.startswith("<") else getattr(owner, name, Deleted)


def _apply(name: str, value: Any) -> None:
    module, _colon, attribute = name.partition("[")[0].partition(":")
    owner, _dot, last = attribute.rpartition(".")
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        place: Any = sys.modules[module]
        for each in owner.split(".") if owner else ():
            place = parts_of(place)[each] if each.startswith("<") else getattr(place, each)
        if last == "registry" and is_content(name) and hasattr(place, "register"):
            place = dispatcher_of(place)
        _note(name, value, place, last)
        if last.startswith("<"):
            cell = cells_of(place)[last]
            if not refill(cell.cell_contents, value):
                cell.cell_contents = value
        elif value is Deleted:
            delattr(place, last)
        elif last == ABSTRACT:
            for kind in value:
                place.register(kind)
        elif isinstance(registry := vars(place).get(last), types.MappingProxyType) and is_content(name):
            for kind in [kind for kind in value if registry.get(kind) is not value[kind]]:
                place.register(kind, value[kind])
        elif not is_content(name) or not refill(vars(place).get(last), value):
            setattr(place, last, value)


class _Later(importlib.abc.MetaPathFinder):
    """Changes modules as they are imported: those that no worker needs are not imported for that.

    A module that imports others gets them unchanged, as the script has first imported all of them: what it computes
    from them is what the script has.

    Attributes:
        values: What :func:`patch` has got, by name, until its module is imported.
        is_importing: True within an import.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.is_importing = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The spec that others find, with a loader that makes the changes."""
        if self.is_importing or not (self.values or (_changes_here and has_imported(name))):
            return None
        for finder in [*sys.meta_path]:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None or finder is self else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Let values be those before the changes: the script has imported the module that is about to run by then.

        What was imported after a change gets the script's data anyway (``imports.py``).
        """
        changed = [
            (owner, name, before, _attribute(owner, name))
            for owner, name, before, *_rest in _changes_here.values()
            if before is not Deleted and not name.startswith("<")
        ]
        for owner, name, before, _now in changed:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(owner, name, before)
        try:
            yield
        finally:
            for owner, name, before, now in changed:
                if _attribute(owner, name) is not before or now is before:
                    continue  # the module has set it, or it was none that can be set
                if now is Deleted:
                    delattr(owner, name)
                else:
                    setattr(owner, name, now)

    def change_imported(self) -> None:
        """Change the modules that are imported."""
        for name in [name for name in self.values if name.partition(":")[0] in sys.modules]:
            _apply(name, self.values.pop(name))


class _Loader(importlib.abc.Loader):
    """Makes the changes once another loader has run the module, which then is that loader's."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        was_importing, _later.is_importing = _later.is_importing, True
        is_late = not was_importing and has_imported(module.__name__) and not _has_other_threads()
        try:
            with _later.as_before() if is_late else contextlib.nullcontext():
                self._loader.exec_module(module)
        finally:
            _later.is_importing = was_importing
        if not was_importing:
            _later.change_imported()


_later = _Later()


def _has_other_threads() -> bool:
    """Whether user code may run in another thread, which must not meet values from before a change."""
    return any(
        not each.name.startswith("rpcdl-") for each in threading.enumerate() if each is not threading.main_thread()
    )
