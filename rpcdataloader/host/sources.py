"""The source of the script's own modules, as the script has imported it.

A file may be edited while a training runs, a module may be reloaded in a notebook, and a node server may have imported
it long ago; or it has another file of that name. Workers must run what the script runs: a session gets the sources, and
where its own file or module is another one, it takes the script's. Installed packages are those of the node.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import re
import sys
import sysconfig
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.host.locks import Lock

logger = logging.getLogger("rpcdataloader.server")

# More is not sent: modules beyond that are those of the node.
_MAX_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A module's file as it was when the module was imported."""

    path: str
    content: bytes = field(repr=False)


def installed_prefixes() -> tuple[str, ...]:
    """Folders of the interpreter's own modules."""
    paths = sysconfig.get_paths()
    # The standard library and site-packages, and the zip beside them. The prefix itself may be /usr, or a folder that
    # also holds the user's project (a .venv in it is covered by its own site-packages).
    library = paths["stdlib"]
    zipped = os.path.join(os.path.dirname(library), f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    return tuple({library, paths["platstdlib"], paths["purelib"], paths["platlib"], zipped})


# Packages of another environment. A user's own folder may be called site-packages, too.
_PACKAGES = re.compile(r"/lib(64)?/(python|pypy)[\w.]*/(site|dist)-packages(/|$)")


def is_under(path: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a path is below one of ``prefixes``, or among installed packages."""
    if _PACKAGES.search(path):
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
        self.num_reloaded = 0

    def look(self) -> dict[str, Source]:
        """The sources of the modules that are neither installed nor of this package, by name."""
        with self._lock:
            prefixes, left = None, _MAX_BYTES
            found: dict[str, Source] = {}
            others = self._others
            for name, module in list(sys.modules.items()):
                if others.get(name) is module:
                    continue
                spec = getattr(module, "__spec__", None)
                if spec is None:
                    continue
                before, source = self._own.get(name, (None, None))
                if before is not spec:
                    prefixes = prefixes or installed_prefixes()
                    path = _path_of(name, spec, prefixes)
                    if path is None:
                        others[name] = module
                        continue
                    source = _read(path)
                    self.num_reloaded += before is not None
                    self._own[name] = spec, source
                if source is not None and (left := left - len(source.content)) >= 0:
                    found[name] = source
            return found


def _path_of(name: str, spec: Any, prefixes: tuple[str, ...]) -> str | None:
    """Where the source of a module of the script is; None of another module."""
    if name in ("__main__", "__mp_main__") or name.partition(".")[0] == __name__.partition(".")[0]:
        return None
    if not isinstance(getattr(spec, "loader", None), importlib.machinery.SourceFileLoader) or not spec.origin:
        return None
    path = os.path.abspath(spec.origin)
    return None if is_under(path, prefixes) else path


def _read(path: str) -> Source | None:
    try:
        with open(path, "rb") as file:
            return Source(path, file.read())
    except OSError:  # it was deleted
        return None


#: Of this process.
recorder = Recorder()


# The session's side


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the script's source in place of the file's."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_code(self, _name: str) -> types.CodeType:
        return self.source_to_code(self._content, self.path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as usual, and sees to it that they are the script's."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, _target: Any = None) -> Any:
        source = self.sources.get(name)
        spec = None if source is None else importlib.machinery.PathFinder.find_spec(name, path)
        if source is None or spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        own = _read(os.path.abspath(spec.loader.path))
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


def take_over(sources: Mapping[str, Source]) -> None:
    """Import the script's modules as it has imported them; those that are imported already, too.

    Args:
        sources: Those that are new to this process, or reloaded.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    own = recorder.look()
    changed = [
        name
        for name, source in sources.items()
        if name in own and _finder.sources.get(name, own[name]).content != source.content
    ]
    if changed and not _finder.sources:  # the node server has imported them, and others that have parts of them
        for name in own:
            sys.modules.pop(name, None)
    else:
        for name in changed:
            path, module = sources[name].path, sys.modules[name]
            exec(compile(sources[name].content, path, "exec", dont_inherit=True), vars(module))
    if changed:
        logger.info("imported again, as the script has other sources: %s", ", ".join(changed))
    _finder.sources.update(sources)
