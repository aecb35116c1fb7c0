"""What the script defines: it travels once to each process, and everything else names it.

A worker cannot import ``__main__`` of its client. It has a module of that name, into which the client's functions,
classes and other globals are put as they are needed: *the same object here is the same object there*. A message brings
those that its receiver lacks, and those that the script has bound anew since they were sent, or whose content it has
changed. All else stays as the receiver has made it.

Each global is a pickle of its own, in which others are named; those that contain each other share one, and those that
have parts in common which are no globals themselves.

Code may find names in other ways than by writing them: a file of pickles names its classes. With a dataset, a node gets
all functions, classes and plain constants of the script that can be sent, and rebuilds those that are asked for.
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
import pickle
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rpcdataloader.errors import RPCError
from rpcdataloader.host.patches import find_patches, is_compared, is_content, is_patch
from rpcdataloader.host.signals import USER_ERRORS, is_interrupt
from rpcdataloader.host.snapshots import Deleted, snapshots
from rpcdataloader.wire.adopted import adopted
from rpcdataloader.wire.by_value import CachedFunction, digest_of, is_of_main, main_globals
from rpcdataloader.wire.picklers import (
    DefinitionPickler,
    Limited,
    PersistentId,
    adopt,
    name_among_own,
)
from rpcdataloader.wire.tensors import find_views, place_of

client_logger = logging.getLogger("rpcdataloader.client")

# Globals that the receiver's module has of its own.
_OF_EVERY_MODULE = ("__builtins__", "__doc__", "__loader__", "__name__", "__spec__")


# Larger ones are sent when they are needed.
_MAX_REST_BYTES = 1 << 16

# Of what has changed in the script's modules: larger objects stay as the node's modules make them. A value that the
# script's source assigns has no limit.
_MAX_CONTENT_BYTES, _MAX_VALUE_BYTES = 1 << 20, 1 << 24


@dataclass(frozen=True, eq=False)
class Definition:
    """A global of the script, or several that are one pickle."""

    tokens: tuple[tuple[str, bytes], ...]  # for each name, what tells its value from the one before
    pickled: bytes  # of a dict of the values by name
    modules: frozenset[str]  # in which an unpickler looks for functions and classes
    objects: tuple[int, ...]  # for each name, a number that tells the object from those that it named before
    order: int  # later definitions have higher numbers
    on_demand: tuple[str, ...] | None = None  # names that it uses, if it is rebuilt when asked for; None for at once
    contained: tuple[str, ...] = ()  # those that are parts of it

    def identity_of(self, name: str) -> Any:
        """What tells the object that ``name`` means from another one at the receiver, where a class stays the same."""
        tokens = zip(self.tokens, self.objects, strict=True)
        token, number = next((token, number) for (each, token), number in tokens if each == name)
        return number if isinstance(main_globals().get(name), type) else token


#: Makes an error of a name, what uses it, its value, and the error in pickling that.
Explain = Callable[[str, str, Any, BaseException], Exception]

#: Tells whether a receiver has had a global of the script, as it is now, since its beginning.
Have = Callable[[str], bool]

#: Definitions by name; one of several names is there under each.
Table = Mapping[str, Definition]


def merge(one: Table, other: Table) -> Table:
    """Both tables; where they differ, the later definitions."""
    return {**one, **{name: each for name, each in other.items() if name not in one or each.order > one[name].order}}


class _Part(NamedTuple):
    """A global by itself."""

    token: bytes
    pickled: bytes
    number: int
    pickler: DefinitionPickler  # which knows what it needs
    contained: frozenset[str]  # names of those that are there before it is rebuilt


class _Script:
    """The definitions of this process as a client.

    Thread-safe without a lock, as it runs code of the user: threads that collect the same make equal definitions.
    """

    def __init__(self) -> None:
        # The object that each name meant last, or a weak reference to it, with a number.
        self._objects: dict[str, tuple[Callable[[], Any], int]] = {}
        self._known: set[str] = set()  # names that have ever been there
        self._order = itertools.count()
        self._last: weakref.WeakValueDictionary[str, Definition] = weakref.WeakValueDictionary()
        self._rest: dict[str, tuple[Any, Definition | None]] = {}
        # Patches that cannot be sent, each with the number of its object, and whether that is too large.
        self._left_out: dict[str, tuple[int, bool]] = {}

    def collect(
        self,
        names: Mapping[str, str],
        explain: Explain,
        *,
        reference_of: PersistentId | None = None,
        have: Have | None = None,
        with_rest: bool = False,
        with_patches: bool = False,
    ) -> Table:
        """The definitions of ``names``, and of all that they refer to, as they are now.

        Args:
            names: The names, each with what uses it.
            explain: Function that makes the error for a global that cannot be pickled.
            reference_of: Function called with every object; its result replaces the object, None keeps it.
            have: Tells of which globals the receiver has; None if of none.
            with_rest: Also give what may be asked for in other ways.
            with_patches: Also give what the script has changed in libraries; what cannot be sent is left out.
        """
        namespace, parts = main_globals(), dict[str, _Part]()
        view, waiting = _View(self._with_deleted(namespace), _owners(namespace), reference_of, have), dict(names)
        if waiting and namespace.get("__package__"):  # for imports of ``python -m package.train``
            waiting.setdefault("__package__", "")
        self._follow(waiting, parts, view, explain)
        if with_patches and (patches := find_patches(namespace)):
            view, parts = self._add_patches(patches, view, parts, explain)
        found: dict[str, Definition] = {}
        objects = [*itertools.chain.from_iterable(part.pickler.objects for part in parts.values())]
        joined = _joined(parts) if len(objects) > len(set(objects)) else parts
        for name in parts:
            if name not in found:
                group = sorted(_circle(name, joined))
                found |= dict.fromkeys(group, self._definition(group, parts, view))
        self._last.update(found)
        return {**self._collect_rest(view), **found} if with_rest else found

    def _with_deleted(self, namespace: Mapping[str, Any]) -> Mapping[str, Any]:
        """The globals, with :class:`Deleted` for those that were there before: a receiver may have them."""
        self._known |= {name for name in list(self._objects) if not is_patch(name)}
        for name in self._known.difference(namespace):
            self._objects.pop(name, None)
        return {**dict.fromkeys(self._known, Deleted), **namespace}

    def _add_patches(
        self, patches: Mapping[str, Any], view: _View, parts: dict[str, _Part], explain: Explain
    ) -> tuple[_View, dict[str, _Part]]:
        """Add what the script has changed in other modules, as far as it can be sent."""
        # Not as the global of the script that it may be, too: its content is what counts.
        contents = {id(value) for name, value in patches.items() if is_content(name)}
        owners = {number: name for number, name in view.owners.items() if number not in contents}
        owners = {**_owners_among(patches), **owners}
        view = view._replace(namespace={**view.namespace, **patches}, owners=owners)
        for name, value in patches.items():
            number = self._number(name, value)
            if self._left_out.get(name) == (number, True):  # to pickle it takes time
                continue
            trial = dict(parts)
            try:
                self._follow({name: ""}, trial, view, explain)
                parts = trial
            except USER_ERRORS as error:
                if is_interrupt(error):
                    raise
                # Not in a variable of this frame: it would keep the frames of its callers, and the script's loop.
                left_out = number, isinstance(error.__cause__ or error, OverflowError)
                if self._left_out.get(name) != left_out:
                    self._left_out[name] = left_out
                    _tell_of_left_out(name, value, error.__cause__ or error)
        return view, parts

    def _follow(self, waiting: dict[str, str], parts: dict[str, _Part], view: _View, explain: Explain) -> None:
        """Add the globals of these names to ``parts``, and all that they use."""
        while waiting:
            name, user = waiting.popitem()
            if name in parts or name not in view.namespace or name in _OF_EVERY_MODULE:
                continue
            if view.have is not None and view.have(name):
                continue
            try:
                parts[name] = self._part(name, view)
            except RPCError:  # already clear, such as for a reference to an object of another worker
                raise
            except USER_ERRORS as error:
                if is_interrupt(error):
                    raise
                raise explain(name, user, view.namespace[name], error) from error
            waiting |= parts[name].pickler.used

    def _collect_rest(self, view: _View) -> Table:
        """What the script defines, but for values that may be large; what cannot be sent is left out."""
        namespace = view.namespace
        for name in self._rest.keys() - namespace.keys():
            self._rest.pop(name, None)
        waiting = [name for name, value in list(namespace.items()) if _may_be_rest(name, value)]
        names = dict.fromkeys(waiting)
        while waiting:
            name = waiting.pop()
            value, definition = self._rest.get(name, (self, None))
            if value is not namespace[name]:
                value, definition = namespace[name], None
                try:
                    definition = self._definition_on_demand(self._part(name, view, Limited(_MAX_REST_BYTES)), name)
                except USER_ERRORS as error:
                    if is_interrupt(error):
                        raise
                self._rest[name] = value, definition
            if definition is not None:
                new = [each for each in definition.contained if each in namespace and each not in names]
                names |= dict.fromkeys(new)
                waiting += new
        return {name: found for name in names if (found := self._rest[name][1]) is not None}

    def _definition_on_demand(self, part: _Part, name: str) -> Definition:
        used, contained = (*part.pickler.used,), (*part.contained,)
        tokens, numbers = ((name, part.token),), (part.number,)
        return Definition(tokens, part.pickled, frozenset(), numbers, next(self._order), used, contained)

    def _part(self, name: str, view: _View, file: io.BytesIO | None = None) -> _Part:
        number = self._number(name, view.namespace[name])
        if file is None and is_compared(name):
            file = Limited(_MAX_CONTENT_BYTES if is_content(name) else _MAX_VALUE_BYTES)
        pickled, pickler = view.pickle([name], file or io.BytesIO())
        token = adopted.tokens.get(name) or digest_of(pickled + number.to_bytes(8, "little"))
        # What is in memory that another global may have, too, by its address.
        pickler.objects.update((each.untyped_storage().data_ptr(), each) for each in pickler.dense)
        return _Part(token, pickled, number, pickler, frozenset(pickler.contained))

    def _number(self, name: str, value: Any) -> int:
        """The number of the object that ``name`` means: another one after it was bound to another object."""
        before, number = self._objects.get(name, (None, -1))
        if before is not None and before() is value:
            return number
        try:
            refer: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            refer = functools.partial(_same, value)
        self._objects[name] = refer, number + 1
        return number + 1

    def _definition(self, group: list[str], parts: Mapping[str, _Part], view: _View) -> Definition:
        tokens = tuple((name, _token_with_content(name, parts, view.namespace)) for name in group)
        if (last := self._last.get(group[0])) is not None and last.tokens == tokens:
            return last
        pickled = parts[group[0]].pickled if len(group) == 1 else view.pickle(group, io.BytesIO())[0]
        modules = frozenset[str]().union(*(parts[name].pickler.modules for name in group))
        return Definition(tokens, pickled, modules, tuple(parts[name].number for name in group), next(self._order))


class _View(NamedTuple):
    """The globals, and how they refer to others."""

    namespace: Mapping[str, Any]
    owners: Mapping[int, str]
    reference_of: PersistentId | None
    have: Have | None

    def pickle(self, names: Sequence[str], file: io.BytesIO) -> tuple[bytes, DefinitionPickler]:
        """Pickle some of them together."""
        pickler = DefinitionPickler(file, names, self.owners, self.reference_of)
        pickler.dump({name: self.namespace[name] for name in names})
        pickler.clear_memo()  # which has copies of tensors
        return file.getvalue(), pickler


def _same(value: Any) -> Any:
    return value


def _tell_of_left_out(name: str, value: Any, reason: BaseException) -> None:
    place = name.partition("[")[0].replace(":", ".")
    if isinstance(reason, OverflowError):
        limit = _MAX_CONTENT_BYTES if is_content(name) else _MAX_VALUE_BYTES
        why = f"it has more than {limit >> 20} MiB, or is on a device; {place} = ... in the script has no limit"
        client_logger.warning("workers of nodes do not get what has changed in %s: %s", place, why)
    else:
        level = logging.INFO if is_compared(name) and snapshots.may_stay(name, value) else logging.WARNING
        advice = "; set it in worker_init_fn" * (not is_content(name))
        client_logger.log(level, "workers of nodes do not get what has changed in %s: %s%s", place, reason, advice)


def _may_be_rest(name: str, value: Any) -> bool:
    if issubclass(type(value), (types.FunctionType, type, CachedFunction)):
        return is_of_main(value)
    return not name.startswith("_") and (value is None or type(value) in (bool, int, float, str))


def _owners(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Names of the objects that only one global should own, by their ids: globals, and variables of closures."""
    owners: dict[int, str] = {}
    for name, value in list(namespace.items()):
        # Its type, not by ``isinstance``: a lazy proxy makes what it stands for when it is asked for its class.
        kind = type(value)
        if issubclass(kind, (types.ModuleType, str, bytes, int, float, complex, bool, type(None), tuple, type)):
            continue
        owners.setdefault(id(value), name)
        if kind is types.FunctionType:
            for number, cell in enumerate(value.__closure__ or ()):
                owners.setdefault(id(cell), f"{name}.{number}")
    return owners


def _owners_among(patches: Mapping[str, Any]) -> dict[int, str]:
    """Names of the objects that several patches may be, or contain: first of those that the receiver has already."""
    order = sorted(patches, key=lambda name: 0 if is_content(name) else 1 + is_compared(name))
    return _owners({name: patches[name] for name in order if not isinstance(patches[name], types.FunctionType)})


def _joined(parts: Mapping[str, _Part]) -> Mapping[str, _Part]:
    """The same, where those that have objects in common contain each other, and what contains one of them.

    The receiver binds all of these anew when it lacks one, and what it keeps would refer to the former ones.
    """
    owners, links, common = dict[int, str](), {name: set(part.contained) for name, part in parts.items()}, set[str]()
    views = find_views([*itertools.chain.from_iterable(part.pickler.dense for part in parts.values())])
    for name, part in parts.items():
        objects, tensors = ({}, []) if is_patch(name) else (part.pickler.objects, part.pickler.dense)
        own = [number for number, each in objects.items() if number == id(each) and name_among_own(each) is None]
        own += [id(views[place][0]) for each in tensors if (place := place_of(each)) in views]
        others = {owners[number] for number in owners.keys() & own}
        owners |= dict.fromkeys(own, name)
        for other in others:
            common |= {name, other}
            links[name].add(other)
            links[other].add(name)
    for name in parts:
        for other in _reachable(name, parts) & common:
            links[other].add(name)
    return {name: part._replace(contained=frozenset(links[name])) for name, part in parts.items()}


def _circle(name: str, parts: Mapping[str, _Part]) -> set[str]:
    """The globals that contain ``name``, and are contained in it."""
    return {other for other in _reachable(name, parts) if name in _reachable(other, parts)} | {name}


def _reachable(name: str, parts: Mapping[str, _Part]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for other in parts[waiting.pop()].contained & parts.keys() - found:
            found.add(other)
            waiting.append(other)
    return found


def _token_with_content(name: str, parts: Mapping[str, _Part], namespace: Mapping[str, Any]) -> bytes:
    """What tells a global from the one before, and from one that contains others.

    A receiver binds a global that has changed to another object, so it needs those anew that contain it. Classes stay.
    """
    contained = [other for other in _reachable(name, parts) - {name} if not isinstance(namespace[other], type)]
    if not contained or isinstance(namespace[name], type):
        return parts[name].token
    return digest_of(b"".join(parts[other].token for other in [name, *sorted(contained)]))


script = _Script()


def prefix(definitions: Iterable[Definition]) -> bytes:
    """What comes before the pickle of a message, so that loading it first adopts the definitions."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.fast = True  # no memo, on whose numbers the pickle that follows would depend
    pickler.dump(_Adopt(pickle.dumps([(each.tokens, each.pickled, each.on_demand) for each in definitions], 5)))
    return file.getvalue()[:-1] + pickle.POP


class _Adopt:
    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return adopt, (self.pickled,)
