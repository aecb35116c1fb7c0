"""The source of the script's own modules, as the script has imported it.

A file may be edited while a training runs, a module may be reloaded in a notebook, and a node server may have imported
it long ago; or it has another file of that name. Workers must run what the script runs: a session gets the sources, and
where its own file or module is another one, it takes the script's. Installed packages are those of the node.

Imported with the package, before torch, and light for that.
"""

from __future__ import annotations

import functools
import importlib.machinery
import logging
import os
import re
import socket
import sys
import sysconfig
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rpcdataloader.host.forks import Part, at_fork
from rpcdataloader.host.locks import Lock
from rpcdataloader.host.orders import Order, orders_in

logger = logging.getLogger("rpcdataloader.server")

# More is not sent: modules beyond that are those of the node.
_MAX_BYTES = 32 << 20


class Source(NamedTuple):
    """A module's file as it was when the module was imported."""

    path: str
    content: bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"


@functools.lru_cache(maxsize=1)
def installed_prefixes() -> tuple[str, ...]:
    """Folders of the interpreter's own modules."""
    paths = sysconfig.get_paths()
    # The standard library and site-packages, and the zip beside them. The prefix itself may be /usr, or a folder that
    # also holds the user's project (a .venv in it is covered by its own site-packages).
    library = paths["stdlib"]
    zipped = os.path.join(os.path.dirname(library), f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    return tuple({library, paths["platstdlib"], paths["purelib"], paths["platlib"], zipped})


# Packages of another environment. A user's own folder may be called site-packages, too.
_PACKAGES = r"/lib(64)?/(python|pypy)[\w.]*/(site|dist)-packages(/|$)"


def is_under(path: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a path is below one of ``prefixes``, or among installed packages."""
    if re.search(_PACKAGES, path):
        return True
    return any(path == prefix or path.startswith(prefix + os.sep) for prefix in prefixes)


class Recorder:
    """Sources of the modules that this process has imported; thread-safe.

    Attributes:
        num_reloaded: Number of modules that were found to be reloaded.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # Guarded by the lock, by name: of the script's own modules, the spec, which is another one after a reload, and
        # the source, None if it cannot be read; all other modules.
        self._own: dict[str, tuple[Any, Source | None]] = {}
        self._others: dict[str, Any] = {}
        # Of modules that have just run, before they were looked at: the spec, and the source.
        self._read: dict[str, tuple[Any, Source | None]] = {}
        self.num_reloaded = 0

    def read(self, name: str, spec: Any, path: str) -> None:
        """Read the source of a module of the script that is about to run: it may be edited by the first look."""
        self._read[name] = spec, read_source(os.path.abspath(path))

    def look(self) -> dict[str, Source]:
        """The sources of the modules that are neither installed nor of this package, by name."""
        with self._lock:
            prefixes, left = None, _MAX_BYTES
            found: dict[str, Source] = {}
            others = self._others
            for name, module in list(sys.modules.items()):
                if others.get(name) is module:
                    continue
                spec = spec_of(module)
                if spec is None:
                    continue
                before, source = self._own.get(name, (None, None))
                if before is not spec:
                    prefixes = prefixes or installed_prefixes()
                    path = path_of_own(name, spec, prefixes)
                    if path is None:
                        others[name] = module
                        self._read.pop(name, None)
                        continue
                    noted, source = self._read.pop(name, (None, None))
                    source = source if noted is spec else read_source(path)
                    self.num_reloaded += before is not None
                    self._own[name] = spec, source
                if source is not None and (left := left - len(source.content)) >= 0:
                    found[name] = source
            return found

    def forget_lock(self) -> None:
        """In a forked child: another thread of the parent may have held it."""
        self._lock = Lock()


def spec_of(module: Any) -> Any:
    """The spec of what ``sys.modules`` has; None without one."""
    if issubclass(type(module), types.ModuleType):  # not as an attribute, at which a lazy module would be loaded
        return object.__getattribute__(module, "__dict__").get("__spec__")
    return getattr(module, "__spec__", None)


def path_of_own(name: str, spec: Any, prefixes: tuple[str, ...]) -> str | None:
    """Where the source of a module of the script is; None of another module."""
    if name in ("__main__", "__mp_main__") or name.partition(".")[0] == __name__.partition(".")[0]:
        return None
    if not isinstance(getattr(spec, "loader", None), importlib.machinery.SourceFileLoader) or not spec.origin:
        return None
    path = os.path.abspath(spec.origin)
    return None if is_under(path, prefixes) else path


def read_source(path: str) -> Source | None:
    """The file of a module; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return Source(path, file.read())
    except OSError:  # it was deleted
        return None


#: Of this process.
recorder = Recorder()

at_fork(Part.SOURCES, in_child=recorder.forget_lock)


# Imports that are noticed


class Listener(Protocol):
    """What hears of the script's own modules, perhaps also of others."""

    def begin(self, name: str, code: types.CodeType) -> None:
        """A module is about to run, perhaps again."""

    def end(self, name: str) -> None:
        """A module that was about to run has run, or failed."""

    def take(self, names: Sequence[str], *, are_early: bool = False) -> None:
        """Modules have run; early ones some time ago."""


_listener = ""  # the name of its module, which is imported once there is something to tell
_exec_module: Any = importlib.machinery.SourceFileLoader.exec_module


def watch(listener: str) -> None:
    """Tell of modules from now on, once per process; of those that are imported already, too.

    Args:
        listener: The name of a module that has a :class:`Listener`, of the name ``listener``.
    """
    global _listener
    _listener = listener
    # Not a finder in ``sys.meta_path``: modules that are loaded by their path meet none, nor do those that another
    # finder finds first. Reloads come here, too.
    importlib.machinery.SourceFileLoader.exec_module = _watched_exec_module  # type: ignore[assignment,method-assign]
    early: list[str] = []
    for name, module in list(sys.modules.items()):
        spec = spec_of(module)
        if type(spec) is importlib.machinery.ModuleSpec and _may_be_own(spec.loader):
            if getattr(spec, "_initializing", False):
                spec.__class__ = _RunningSpec
            else:
                early.append(name)
    if early:
        _get_listener().take(early, are_early=True)


def _watched_exec_module(loader: importlib.machinery.SourceFileLoader, module: types.ModuleType) -> None:
    code = loader.get_code(loader.name) if _may_be_own(loader) else None
    if code is None:
        _exec_module(loader, module)
        return
    listener = _get_listener()
    recorder.read(loader.name, module.__spec__, loader.path)
    listener.begin(loader.name, code)
    loader.get_code = lambda _name: code  # type: ignore[assignment,method-assign]  # reading it takes time
    try:
        _exec_module(loader, module)
        listener.take([loader.name])
        _finder.compare(loader.name, module)
    finally:
        vars(loader).pop("get_code", None)  # another thread may have run the same loader
        listener.end(loader.name)


# Where a module fails, Python leaves functions of importlib out of the traceback, and so this one.
_watched_exec_module.__code__ = _watched_exec_module.__code__.replace(co_filename=_exec_module.__code__.co_filename)


class _RunningSpec(importlib.machinery.ModuleSpec):
    """Of a module that imports this package, until the import system notes in it that the module has run."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            _get_listener().take([self.name])


def _may_be_own(loader: Any) -> bool:
    """Whether a loader's module may be the script's own; cheap, for the thousands of modules of libraries."""
    if not isinstance(loader, importlib.machinery.SourceFileLoader) or "site-packages" in loader.path:
        return False
    return not loader.path.startswith(_LIBRARY) and loader.name.partition(".")[0] != _PACKAGE


_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGE = __name__.partition(".")[0]


def _get_listener() -> Listener:
    found: Listener = importlib.import_module(_listener).listener
    return found


# The session's side


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the script's source in place of the file's."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_code(self, _name: str) -> types.CodeType:
        return self.source_to_code(self._content, self.path)


class _Finder:
    """Finds modules as usual, and sees to it that they are the script's."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}
        self.orders: dict[str, Mapping[str, Order]] = {}
        self.key = b""  # of the orders

    def compare(self, name: str, module: types.ModuleType) -> None:
        """Warn if some lists of a module are in another order than in the script.

        The order may not matter, as of a tuple of file extensions: so that is no error.
        """
        if not (expected := self.orders.get(name)):
            return
        found = orders_in(name, vars(module), self.key)
        if moved := [each for each, order in expected.items() if each in found and order.differs(found[each])]:
            logger.warning(
                "%s of module %s has the same values on %s as in the script, but in another order: an index stands for "
                "something else there. Write sorted(...) around the set or folder that it is made of, or seed what "
                "shuffles it",
                *(", ".join(moved), name, socket.gethostname()),
            )

    def find_spec(self, name: str, path: Sequence[str] | None, _target: Any = None) -> Any:
        source = self.sources.get(name)
        spec = None if source is None else importlib.machinery.PathFinder.find_spec(name, path)
        if source is None or spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        own = read_source(os.path.abspath(spec.loader.path))
        if own is None or own.content == source.content:
            return spec
        if is_under(own.path, installed_prefixes()):
            logger.warning("module %s of %s is installed here, and not as the script has imported it", name, own.path)
            return spec
        logger.warning(
            "module %s of %s is not as the script has imported it: workers use what the script has", name, own.path
        )
        # Its data lies beside the script's file. A package keeps the folder of its parts, which this node has chosen.
        spec.origin = source.path if os.path.exists(source.path) else own.path
        spec.loader = _Loader(name, spec.origin, source.content)
        return spec


_finder = _Finder()


def has_imported(name: str) -> bool:
    """Whether the script that this process serves has imported a module of its own."""
    return name in _finder.sources


def take_over(sources: Mapping[str, Source], orders: Mapping[str, Mapping[str, Order]], key: bytes) -> None:
    """Import the script's modules as it has imported them; those that are imported already, too.

    Args:
        sources: Those that are new to this process, or reloaded.
        orders: How the script has what they have computed.
        key: Key of these.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if orders:
        _finder.key = key
        _finder.orders.update(orders)
    own = recorder.look()
    before = {**own, **_finder.sources}
    changed = [name for name, each in sources.items() if name in own and before[name].content != each.content]
    if changed and not _finder.sources:  # the node server has imported them, and others that have parts of them
        for name in own:
            sys.modules.pop(name, None)
    else:
        for name in changed:
            path, module = sources[name].path, sys.modules[name]
            exec(compile(sources[name].content, path, "exec", dont_inherit=True), vars(module))
    for name in orders:  # the others, as they are imported
        if (own_module := sys.modules.get(name)) is not None:
            _finder.compare(name, own_module)
    if changed:
        logger.info("imported again, as the script has other sources: %s", ", ".join(changed))
    _finder.sources.update(sources)
