"""The part of a client's process that its session takes over: the folders of the script's modules, and the rank.

Only the client's own paths travel: the script's folder, the current folder, and entries that the user added to
``sys.path``. Paths under the interpreter's prefix stay, since the server has its own installation.

A client's folder that is missing here is a warning, and errors that it may have caused say so.

Datasets that split their files read RANK and WORLD_SIZE. LOCAL_RANK stays: it numbers trainers of another machine.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger("rpcdataloader.server")

# The client's folders that this process lacks, in words; empty if it has all. Forks inherit it.
_lack = ""


@dataclass(frozen=True, slots=True)
class Environment:
    """A client's process.

    Attributes:
        import_path: Absolute paths of the client's own modules, in the order of its ``sys.path``.
        directory: Working directory; empty if it was deleted.
        rank: Place among ``world_size`` trainers.
    """

    import_path: tuple[str, ...]
    directory: str
    rank: int = 0
    world_size: int = 1


def collect(rank: int = 0, world_size: int = 1) -> Environment:
    """Describe this process, which is trainer ``rank`` of ``world_size``."""
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = ""
    main = sys.modules.get("__main__")
    # None for `python -m package.train`: names in the package's folder would shadow others, which they do not here.
    script = getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None
    own = [os.path.dirname(os.path.abspath(script))] if script else []
    installed = _installed_prefixes()
    for entry in [*sys.path, directory]:
        path = os.path.abspath(entry) if entry or directory else ""
        if path and path not in own and not _under(path, installed):
            own.append(path)
    return Environment(tuple(own), directory, rank, world_size)


def install(environment: Environment) -> None:
    """Prepend the client's paths that exist here to ``sys.path``, enter its directory if it exists, set its rank."""
    set_rank(environment.rank, environment.world_size)
    found = [path for path in environment.import_path if os.path.exists(path)]
    sys.path[:] = [*found, *(entry for entry in sys.path if entry not in found)]
    try:
        if environment.directory and os.path.isdir(environment.directory):
            os.chdir(environment.directory)
    except OSError as exc:
        logger.warning("cannot take %s as working directory: %s", environment.directory, exc.strerror)
    _say_what_is_missing(environment)


def hint_at(error: BaseException) -> str | None:
    """The remedy for an error that a missing folder of the client may have caused; None for other errors."""
    if not _lack or not any(
        isinstance(exc, (FileNotFoundError, ModuleNotFoundError)) for exc in (error, error.__cause__)
    ):
        return None
    return _lack


def _say_what_is_missing(environment: Environment) -> None:
    global _lack
    wanted = dict.fromkeys([*environment.import_path[:1], environment.directory])
    missing = [path for path in wanted if path and not os.path.exists(path)]
    _lack = ""
    if missing:
        _lack = (
            f"on {socket.gethostname()}, where the working directory is {os.getcwd()}, there is no "
            f"{' and no '.join(missing)}: put the training script and its modules on a file system that the nodes see, "
            "or send modules with py_modules= or install them there, and open files by absolute paths"
        )
        logger.warning("%s", _lack)


def set_rank(rank: int, world_size: int) -> None:
    """Set RANK and WORLD_SIZE, for this process and its forks."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables, for this process and its forks."""
    os.environ.update(variables)


def _installed_prefixes() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    # The standard library and site-packages, and the zip beside them. The prefix itself may be /usr, or a folder that
    # also holds the user's project (a .venv in it is covered by its own site-packages).
    library = paths["stdlib"]
    zipped = os.path.join(os.path.dirname(library), f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    return tuple({library, paths["platstdlib"], paths["purelib"], paths["platlib"], zipped})


def _under(path: str, prefixes: tuple[str, ...]) -> bool:
    if {"site-packages", "dist-packages"} & set(path.split(os.sep)):
        return True
    return any(path == prefix or path.startswith(prefix + os.sep) for prefix in prefixes)
