"""The part of a client's process that its sessions take over: paths, settings, rank, variables, and modules.

What changes later, such as an entry of ``sys.path``, reaches sessions before the next pass.

Only the client's own paths travel: the script's folder, the current folder, and entries that the user added to
``sys.path``. Paths under the interpreter's prefix stay, since the server has its own installation. A client's folder
that is missing here, or that other users of this node may have made, is a warning, and errors that it may have caused
say so.

Datasets that split their files read RANK and WORLD_SIZE, or ask ``torch.distributed``. LOCAL_RANK stays: it numbers
trainers of another machine.

Datasets and loaders may add environment variables, modules, and a wish for the workers' output. A client has one
session per node for all of its loaders, which share variables and modules. The files of a module lie as they do beside
the script, so a package finds its data by the same relative paths.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch.distributed

from rpcdataloader.host.orders import Order
from rpcdataloader.host.process import ProcessSettings
from rpcdataloader.host.sources import Source, installed_prefixes, is_under, take_over
from rpcdataloader.host.trust import find_flaw, identify

logger = logging.getLogger("rpcdataloader.server")

_NONE: Mapping[str, Mapping[str, Order]] = {}

# What this process, or the session of which it is a fork, has taken over last of its client, without sources.
_taken: Environment | None = None

# The client's folders that this process lacks or distrusts, in words; empty if it uses all. Forks inherit it.
_lack = ""

# In a session: its folder for modules, which its node server removes; hashes of the contents of its modules, by name;
# functions to call when the client wants the workers' output, and before that folder is there; and a secret that it has
# in common with the client.
_folder = ""
_installed: dict[str, int] = {}
_forward_output: Callable[[], object]
_note_folder: Callable[[], object]
_key = b""


@dataclass(frozen=True, slots=True)
class Environment:
    """A client's process."""

    import_path: tuple[str, ...]  # absolute paths of the client's own modules, in the order of its ``sys.path``
    directory: str  # working directory; empty if it was deleted
    identities: Mapping[str, str] = field(default_factory=dict)  # of what leads to these paths; see ``trust``
    sources: Mapping[str, Source] = field(default_factory=dict)  # of its own modules, by name
    orders: Mapping[str, Mapping[str, Order]] = field(default_factory=dict)  # of the lists in these, by variable
    settings: ProcessSettings = field(default_factory=ProcessSettings.current)


def place() -> tuple[object, ...]:
    """What :func:`collect` depends on, but for the sources; cheap."""
    return ProcessSettings.current(), _current_directory(), *sys.path


def collect(sources: Mapping[str, Source], orders: Mapping[str, Mapping[str, Order]] = _NONE) -> Environment:
    """Describe this process, with those of its sources that its session lacks, and the orders of these modules."""
    directory = _current_directory()
    main = sys.modules.get("__main__")
    # None for `python -m package.train`: names in the package's folder would shadow others, which they do not here.
    script = getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None
    own = [os.path.dirname(os.path.abspath(script))] if script else []
    for entry in [*sys.path, directory]:
        path = os.path.abspath(entry) if directory or os.path.isabs(entry) else ""
        if path and path not in own and not is_under(path, installed_prefixes()):
            own.append(path)
    return Environment(tuple(own), directory, identify([*own, directory] if directory else own), sources, orders)


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return ""


def set_up(environment: Environment | None, additions: Additions, rank: int, world_size: int, has_group: bool) -> None:
    """Make this process a session of the client, or tell it what is new; see :func:`install` and :func:`update`."""
    if environment is not None:
        install(environment)
    update(additions, rank, world_size, has_group)
    if environment is not None:
        importlib.invalidate_caches()
        if environment.sources:
            take_over(environment.sources, environment.orders, _key)


def have(environment: Environment) -> None:
    """Let a worker have what its pass has begun with, if its session has had another environment by then."""
    if environment != _taken:
        install(environment)


def install(environment: Environment) -> None:
    """Take over the client's settings and paths. What is as it was taken over before stays as user code has set it.

    Its paths that exist here and that are safe come first in ``sys.path``. Its directory, too, must be safe to become
    the working directory: programs read code and configuration from there.
    """
    global _lack, _taken
    taken, _taken = _taken, replace(environment, sources={}, orders={})
    environment.settings.apply(*(() if taken is None else (taken.settings.values,)))
    flaws: dict[str, str | None] = {}
    for path in filter(None, [*environment.import_path, environment.directory]):
        with contextlib.suppress(OSError):  # it is missing
            flaws[path] = find_flaw(path, environment.identities)
    found = [path for path in environment.import_path if path in flaws and flaws[path] is None]
    sys.path[:] = [*found, *(entry for entry in sys.path if entry not in found)]
    try:
        is_new = taken is None or taken.directory != environment.directory
        if is_new and flaws.get(environment.directory, "missing") is None:
            os.chdir(environment.directory)
    except OSError as exc:
        logger.warning("cannot take %s as working directory: %s", environment.directory, exc.strerror)
    wanted = dict.fromkeys([*environment.import_path[:1], environment.directory])
    missing = [path for path in wanted if path and path not in flaws]
    unsafe = [f"{path} is not used, as {flaw}" for path, flaw in flaws.items() if flaw is not None]
    lacks = []
    if missing:
        lacks.append(
            f"there is no {' and no '.join(missing)}: put the training script and its modules on a file system that "
            "the nodes see, or send modules with py_modules= or install them there, and open files by absolute paths"
        )
    if unsafe:
        lacks.append(
            f"{' and '.join(unsafe)}: send modules with py_modules=, or let these folders, and those above them, be "
            "writable by you and root alone"
        )
    before, _lack = _lack, ""
    if lacks:
        where = f"on {socket.gethostname()}, where the working directory is {_current_directory() or 'deleted'}, "
        _lack = where + "; ".join(lacks)
        if _lack != before:
            logger.warning("%s", _lack)


def hint_at(error: BaseException) -> str | None:
    """The remedy for an error that a lacking folder of the client may have caused; None for other errors."""
    if not _lack or not any(
        isinstance(exc, (FileNotFoundError, ModuleNotFoundError)) for exc in (error, error.__cause__)
    ):
        return None
    return _lack


def import_modules(names: Iterable[str]) -> None:
    """Import the modules that a session's workers need, before these are forked.

    Errors are left to the workers, which know what needs a module.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as exc:
            logger.debug("cannot import %s before workers are forked: %s", name, exc)
    # No fork's collector visits what lives now, so its pages stay shared.
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, slots=True)
class Module:
    """A module or package, with its data files."""

    name: str  # top-level name, without a dot
    files: Mapping[str, bytes] = field(repr=False)  # contents by path, such as ``name/__init__.py``

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(map(len, self.files.values()))


@dataclass(frozen=True, slots=True)
class Additions:
    """What the datasets and loaders of a client have its sessions add, each part once."""

    variables: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, Module] = field(default_factory=dict)
    forward_output: bool = False

    @classmethod
    def of(cls, variables: Mapping[str, str], modules: Iterable[Module], forward_output: bool) -> Additions:
        """The additions of one dataset or loader."""
        return cls(variables, {module.name: module for module in modules}, forward_output)


def prepare_session(
    folder: str, forward_output: Callable[[], object], note_folder: Callable[[], object], key: bytes = b""
) -> None:
    """Prepare this process as a session.

    Args:
        folder: Folder for modules; created on first use.
        forward_output: Function to call when the client wants the workers' output.
        note_folder: Function to call before the folder is created, which others have to remove.
        key: Secret that it has in common with its client; empty without one.
    """
    global _folder, _forward_output, _note_folder, _key
    _folder, _forward_output, _note_folder, _key = folder, forward_output, note_folder, key


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables, those included that Python reads only once."""
    os.environ.update(variables)
    if "TZ" in variables:
        time.tzset()
    if "TMPDIR" in variables:
        tempfile.tempdir = None


def set_group(rank: int, world_size: int, has_group: bool) -> None:
    """Let ``torch.distributed`` tell the rank, as in a fork of a trainer with a process group; it connects nothing."""
    if not torch.distributed.is_available():
        return
    # torch's stubs have another constructor alone.
    group = torch.distributed.ProcessGroup(rank, world_size) if has_group else None  # type: ignore[call-arg]
    torch.distributed.GroupMember.WORLD = group


def update(additions: Additions, rank: int, world_size: int, has_group: bool) -> None:
    """Take over the client's additions and rank, for this session and its later workers.

    Modules come before all others of the same name. Variables come after those of the rank.

    Raises:
        ImportError: A module was imported from elsewhere before; all others are applied.
        OSError: The files cannot be written.
    """
    set_variables({"RANK": str(rank), "WORLD_SIZE": str(world_size), **additions.variables})
    set_group(rank, world_size, has_group)
    if additions.forward_output:
        _forward_output()
    install_modules(additions.modules)


def install_modules(modules: Mapping[str, Module]) -> None:
    """Write modules where they come before all others of the same name; raises as :func:`update`."""
    hashes = {name: hash(frozenset(module.files.items())) for name, module in modules.items()}
    wanted = [module for name, module in modules.items() if _installed.get(name) != hashes[name]]
    new = [module for module in wanted if module.name not in sys.modules and module.name not in _installed]
    if new and not _folder:
        raise FileNotFoundError(f"py_modules: {socket.gethostname()} has no folder for temporary files: set its TMPDIR")
    if new and _folder not in sys.path:
        _note_folder()
        os.mkdir(_folder, 0o700)
        if (flaw := find_flaw(_folder, {})) is not None:  # whoever may rename it could put another one there
            os.rmdir(_folder)
            raise PermissionError(
                f"py_modules: {_folder} on {socket.gethostname()} is not safe, as {flaw}: set its TMPDIR"
            )
        # Held until the last fork has ended. Cleaners of temporary folders (systemd, tmpfiles.d) spare a locked one;
        # otherwise another user could create it anew, and Python would import modules from there.
        fcntl.flock(os.open(_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH)
        sys.path.insert(0, _folder)
    for module in new:
        for place, content in module.files.items():
            path = os.path.join(_folder, place)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            try:
                with open(path, "wb") as file:
                    file.write(content)
            except OSError as error:  # of a full disk, which names no file
                error.filename = error.filename or path
                raise
        _installed[module.name] = hashes[module.name]
    importlib.invalidate_caches()
    for late in [module.name for module in wanted if module not in new]:
        where = getattr(sys.modules.get(late), "__file__", None) or "somewhere else"
        raise ImportError(
            f"py_modules: {late} comes too late on {socket.gethostname()}, which has imported it from {where}: give "
            "py_modules to the first dataset or loader of the script that needs it, start the node server without "
            f"--preload {late}, or leave it out of py_modules",
            name=late,
        )
