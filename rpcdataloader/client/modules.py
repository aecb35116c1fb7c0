"""``py_modules=`` and ``env=``: the user's modules and environment variables for the sessions of this client."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

from rpcdataloader.host.environment import Additions, Module
from rpcdataloader.host.locks import Lock
from rpcdataloader.wire.credentials import TOKEN_VARIABLE

# For all modules of a client: they travel to each session of each rank. Larger data belongs on a file system.
MAX_BYTES = 64 << 20

# Built for one kind of machine and one version of Python.
_BINARY = (".so", ".pyd", ".dylib")


def choose_modules(py_modules: Iterable[str | os.PathLike[str] | ModuleType | Module] | None) -> tuple[Module, ...]:
    """The modules that ``py_modules`` names, as they are on disk now.

    Args:
        py_modules: Modules, their names, or paths of files and folders. A :class:`Module` stays as it is.

    Raises:
        TypeError: ``py_modules`` is of another type.
        ValueError: A module cannot be sent; the message says why, and what to do.
    """
    if py_modules is None:
        return ()
    if isinstance(py_modules, (str, bytes, os.PathLike)) or not isinstance(py_modules, Iterable):
        raise TypeError(
            f"py_modules must be a list of modules, names of modules, or paths, but is {py_modules!r}; "
            "for an argument of the dataset that is called py_modules, use functools.partial"
        )
    chosen: dict[str, Module] = {}
    for each in py_modules:
        module = each if isinstance(each, Module) else _pack(*_locate(each))
        if chosen.setdefault(module.name, module) != module:
            raise ValueError(f"py_modules: there are two modules of the name {module.name}")
    _check_size(f"{', '.join(chosen)} have", {name: module.size_bytes for name, module in chosen.items()})
    return tuple(chosen.values())


def _locate(each: object) -> tuple[str, str]:
    """Name and path of a module; the path of a file, or of a package's folder."""
    origin: str | None
    if isinstance(each, os.PathLike) or (isinstance(each, str) and (os.sep in each or each.endswith(".py"))):
        path = os.path.abspath(os.path.expanduser(os.fspath(each)))
        origin = os.path.join(path, "__init__.py") if os.path.isdir(path) else path
        if not os.path.exists(origin):
            raise ValueError(f"py_modules: there is no {origin}: name modules, or folders of packages, one by one")
        is_package = os.path.basename(origin) == "__init__.py"
        name = os.path.splitext(os.path.basename(os.path.dirname(origin) if is_package else origin))[0]
        if not name.isidentifier():
            raise ValueError(f"py_modules: {each} cannot be imported, as {name!r} is not a valid module name")
    elif isinstance(each, ModuleType):
        name, origin = each.__name__, getattr(each, "__file__", None)
    elif isinstance(each, str):
        name, origin = each, _find(each)
    else:
        raise TypeError(f"py_modules must be modules, names of modules, or paths, but one is {each!r}")
    if name == "__main__":
        raise ValueError("py_modules: leave __main__ out: definitions of the script are sent anyway")
    if (top := name.partition(".")[0]) != name:
        raise ValueError(f"py_modules: {name} is a part of {top}: name {top}, which is sent as a whole")
    if name in sys.stdlib_module_names:
        raise ValueError(f"py_modules: {name} is a module of Python itself, which all nodes have")
    if origin is None:
        raise ValueError(
            f"py_modules: {name} is a namespace package, whose parts may be in many places: add an __init__.py, or "
            "name the paths of packages in it"
        )
    if not origin.endswith(".py") or not os.path.isfile(origin):
        raise ValueError(f"py_modules: {name} is not a Python file, but {origin}: install it on the nodes instead")
    return name, os.path.dirname(origin) if os.path.basename(origin) == "__init__.py" else origin


def _find(name: str) -> str | None:
    """Path of a module's source; None for a module without."""
    if name == "__main__":
        return None
    try:
        # find_spec of a submodule would import the package.
        spec = importlib.util.find_spec(name.partition(".")[0])
    except ValueError:  # an invalid name, or a module without a spec
        spec = None
    if spec is None:
        hint = f": write './{name}' for the path of that name" if os.path.exists(name) else ""
        raise ValueError(f"py_modules: there is no module {name!r} that could be imported here{hint}")
    return spec.origin


def _pack(name: str, path: str) -> Module:
    if os.path.isdir(path):
        found = {f"{name}/{os.path.relpath(file, path)}": file for file in _files(path)}
    else:
        found = {f"{name}.py": path}
    if binary := next(filter(lambda file: file.endswith(_BINARY), found.values()), None):
        raise ValueError(
            f"py_modules: {name} has {binary}, which is built for one kind of machine: install it on the nodes instead"
        )
    try:
        _check_size(f"{name} has", {file: os.path.getsize(file) for file in found.values()})
        contents = {}
        for place, file in found.items():
            with open(file, "rb") as opened:
                contents[place] = opened.read()
    except OSError as exc:
        raise ValueError(f"py_modules: {exc.filename} of {name} cannot be read: {exc.strerror}") from exc
    return Module(name, contents)


def _check_size(what: str, sizes: Mapping[str, int]) -> None:
    if (size_bytes := sum(sizes.values())) > MAX_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"py_modules: {what} {size_bytes / 2**20:.1f} MiB, of which {largest} has {sizes[largest] / 2**20:.1f}, "
            f"and the limit is {MAX_BYTES >> 20} MiB: put data on a file system that the nodes see"
        )


def _files(folder: str) -> Iterator[str]:
    """The files below a folder, following links, without compiled and hidden ones."""
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [each for each in folders if each != "__pycache__" and not each.startswith(".")]
        for path in (os.path.join(parent, each) for each in folders if os.path.islink(os.path.join(parent, each))):
            if f"{os.path.realpath(parent)}{os.sep}".startswith(f"{os.path.realpath(path)}{os.sep}"):
                raise ValueError(f"py_modules: {path} is a link to a folder around it: remove it")
        for path in (os.path.join(parent, each) for each in files if not each.startswith(".")):
            if not os.path.isfile(path):
                raise ValueError(f"py_modules: {path} is neither a file nor a folder: remove it")
            if not path.endswith(".pyc"):
                yield path


# Variables of this machine or process. Patterns leave them out; full names include them.
OWN = ("LD_*", "CUDA_VISIBLE_DEVICES", "SLURM_*", "RANK", "WORLD_SIZE", "LOCAL_*", "MASTER_*", "RPCDATALOADER_*")


def choose_variables(
    env: Mapping[str, str] | Iterable[str] | None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables that ``env`` names, with their values.

    Args:
        env: Values by name; or names and patterns of variables of this process. Unset names are left out.

    Raises:
        TypeError: ``env`` is of another type.
        ValueError: A name or value is invalid, or names the secret.
    """
    if env is None:
        return {}
    if isinstance(env, (str, bytes)) or not isinstance(env, Iterable):
        raise TypeError(
            f"env must be a list of names and patterns, or a mapping of names to values, but is {env!r}; "
            "for an argument of the dataset that is called env, use functools.partial"
        )
    chosen: dict[str, str] = {}
    for name in env:
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"env: {name!r} is not a valid name of an environment variable")
        if name == TOKEN_VARIABLE:
            raise ValueError(f"env: {name} is the secret, which is never sent")
        if isinstance(env, Mapping):
            value = env[name]
            if not isinstance(value, str) or "\0" in value:
                raise ValueError(f"env: the value of {name} must be a string, but is {value!r}")
            chosen[name] = value
        elif set(name) & set("*?["):
            found = fnmatch.filter(environ, name)
            chosen |= {each: environ[each] for each in found if not any(fnmatch.fnmatchcase(each, own) for own in OWN)}
        elif name in environ:
            chosen[name] = environ[name]
    return chosen


# As of most loaders.
_NONE = Additions()


def _join(one: Additions, more: Additions) -> Additions:
    """Both together; ``one`` itself if ``more`` adds nothing."""
    _check_same("env", one.variables, more.variables)
    _check_same("py_modules", one.modules, more.modules)
    both = Additions(
        one.variables or more.variables, one.modules or more.modules, one.forward_output or more.forward_output
    )
    return one if both == one else both


def _check_same(argument: str, sent: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    if sent and wanted and (differing := [name for name in {**sent, **wanted} if sent.get(name) != wanted.get(name)]):
        raise ValueError(
            f"{argument}: another dataset or loader of this process has sent another value, which differs in "
            f"{', '.join(differing)}, and its sessions take one: give both the same, or leave it to the first"
        )


class SharedAdditions:
    """The additions for all sessions of a client; thread-safe.

    Attributes:
        current: Everything added so far; a new object after each change.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.current = Additions()

    @contextlib.contextmanager
    def adding(self, more: Additions) -> Iterator[None]:
        """Add these; they are taken back if the ``with`` block fails, perhaps because of them.

        Raises:
            ValueError: They contradict what was added before.
        """
        with self._lock:
            before = self.current
            self.current = after = before if more == _NONE else _join(before, more)
        try:
            yield
        except BaseException:
            with self._lock:
                if self.current is after:
                    self.current = before
            raise
