"""The definitions of a client in a process that serves it: what comes takes the place of what was there."""

from __future__ import annotations

import builtins
import io
import logging
import pickle
import sys
import types
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from rpcdataloader.host.patches import is_compared, is_patch
from rpcdataloader.host.patching import keep, patch, patched
from rpcdataloader.host.signals import USER_ERRORS, is_interrupt
from rpcdataloader.host.snapshots import Deleted
from rpcdataloader.wire.by_value import main_globals, named, root_of
from rpcdataloader.wire.picklers import Unpickler, UnresolvedError

logger = logging.getLogger("rpcdataloader.worker")


class Adopted:
    """The definitions of a client in this process, which serves it; for one thread at a time.

    Attributes:
        tokens: Tokens of the present values by name.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, bytes] = {}
        self._pending: dict[str, _Sent] = {}
        self._on_demand: dict[str, _Sent] = {}
        self._main: types.ModuleType | None = None
        self._resolve: Callable[[Any], Any] | None = None  # of the present message
        self._patches: dict[str, Any] = {}  # of the present message

    def adopt(self, pickled: bytes, resolve: Callable[[Any], Any] | None = None) -> None:
        """Put definitions into ``__main__``, which is a new module from the first ones on.

        Args:
            resolve: Function that returns the object for a result of ``reference_of``.
        """
        if self._main is None or sys.modules.get("__main__") is not self._main:
            self._main = types.ModuleType("__main__")
            vars(self._main).update(__builtins__=builtins, __getattr__=self._demand, globals=self._demand_all)
            sys.modules["__main__"] = sys.modules["__mp_main__"] = self._main
        for tokens, content, used in pickle.loads(pickled):
            names, sent = [name for name, _token in tokens], _Sent(tokens, content, used)
            if used is not None:
                self._on_demand[names[0]] = sent
            elif any(self.tokens.get(name) != token for name, token in tokens):
                self._pending |= dict.fromkeys(names, sent)
        self._resolve = resolve
        try:
            while self._pending:
                name = next(iter(self._pending))
                try:
                    self._load(self._pending, name)
                except USER_ERRORS as error:
                    if not is_compared(name) or is_interrupt(error):
                        raise
                    # The script did not say that workers need it. Each of them would warn, in each pass.
                    logger.info("%s stays as it is here, as what the script has of it fails: %s", name, error)
        finally:
            self._pending.clear()
            self._resolve = None

    def change_modules(self) -> None:
        """Make the changes that a message has brought, once it has imported what it needs."""
        while self._patches:
            patch(*self._patches.popitem())

    def hold(self, patches: Set[str]) -> None:
        """Undo the changes in modules that this process has inherited, but for those of these names."""
        for name in keep(patches):
            self.tokens.pop(name, None)

    def own_main(self) -> None:
        """Put definitions into the present ``__main__``, as this process has run the script, or is a fork of it."""
        self._main = sys.modules["__main__"]

    def find(self, name: str) -> Any:
        """The object of a dotted name."""
        if (root := root_of(name)) in self._pending:
            self._load(self._pending, root)
        return patched(name, self._patches) if is_patch(name) else named(name)

    def _refer(self, reference: Any) -> Any:
        """What stands in a definition for another one, or for an object held elsewhere."""
        if isinstance(reference, str):
            return self.find(reference)
        if self._resolve is None:
            raise pickle.UnpicklingError(f"a definition refers to {reference}, which cannot be found here")
        return self._resolve(reference)

    def _demand(self, name: str) -> Any:
        """An attribute of ``__main__`` that is not there yet."""
        if name in self._on_demand:
            used = self._load(self._on_demand, name)
            for each in used or ():
                if each in self._on_demand and each not in main_globals():
                    self._demand(each)
        if name not in main_globals():
            raise AttributeError(f"module '__main__' has no attribute {name!r} here, and the script sent none")
        return main_globals()[name]

    def _demand_all(self) -> dict[str, Any]:
        """The globals, with all that can be rebuilt here."""
        for name in list(self._on_demand):
            if name not in main_globals():
                try:
                    self._demand(name)
                except USER_ERRORS as error:
                    if is_interrupt(error):
                        raise
        self._on_demand.clear()
        return main_globals()

    def _load(self, where: dict[str, _Sent], name: str) -> tuple[str, ...] | None:
        tokens, content, used = sent = where[name]
        tokens = tuple((each, token) for each, token in tokens if where.get(each) is sent)  # others have come later
        for each, _token in tokens:
            where.pop(each)
        unpickler = Unpickler(io.BytesIO(content))
        unpickler.find, unpickler.resolve = self.find, self._refer
        try:
            values = unpickler.load()
        except UnresolvedError as unresolved:
            raise unresolved.error from unresolved.error.__cause__
        for each, token in tokens:  # those that have not changed, too: they have objects in common
            if is_patch(each):
                self._patches[each] = values[each]
            elif values[each] is Deleted:
                main_globals().pop(each, None)
                self._on_demand.pop(each, None)
            else:
                main_globals()[each] = values[each]
            self.tokens[each] = token
        return used


class _Sent(NamedTuple):
    """A definition as it was received."""

    tokens: tuple[tuple[str, bytes], ...]
    content: bytes
    used: tuple[str, ...] | None


adopted = Adopted()
