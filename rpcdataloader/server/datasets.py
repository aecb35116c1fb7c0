"""The datasets of one client on one node: built once and shared where that is safe.

A session builds a dataset; its workers inherit it by the fork. A dataset that holds threads, connections, pipes, or
files open whose offset all workers would share, stays a recipe from which each worker builds its own. Connections that
it does not hold itself, as those of a library, only cause a warning: they may be unused, and a copy of the dataset in
each worker may not fit into memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import os
import pickle
import socket
import stat
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.host.parts import find_held
from rpcdataloader.host.resources import read
from rpcdataloader.host.state import Change, built, catch_up, forget_changes, set_states
from rpcdataloader.server.processes import give_back_freed_memory, has_more_threads, num_threads
from rpcdataloader.wire.built import Built
from rpcdataloader.wire.maps import count_maps
from rpcdataloader.wire.picklers import name_among_own
from rpcdataloader.wire.pickling import Build, loads
from rpcdataloader.wire.slabs import Block

logger = logging.getLogger("rpcdataloader.server")

# Seconds of a construction after which the user is told where it is. It may hang, for example at a file server.
SLOW_BUILD_SECONDS = 60.0

# A collection that visits frozen objects copies everything inherited from the node server: 90 ms, and 100 MB.
WORTH_COLLECTING_BYTES = 16 << 20


#: The path of each descriptor of a file, by (device, inode).
OpenFiles = Mapping[tuple[int, int], Sequence[str]]

#: Returns the parts of a dataset, from which it is built.
Parts = Callable[[], "tuple[Any, ...]"]


class DatasetTable:
    """Datasets by key; keys are chosen by the client and are the same on all of its nodes."""

    def __init__(self) -> None:
        self._recipes: dict[int, tuple[Build, Parts]] = {}
        self._built: dict[int, Any] = {}
        self._builders: dict[int, int] = {}  # process that built each from a recipe, or from a copy
        self._unshared: Mapping[int, Any] = {}  # what each worker copies before it uses any of it
        # The least memory of this process since its last full collection.
        self._kept_bytes = memory_of_its_own()

    def inherit(self, objects: Mapping[int, Any], *, shared: bool = True) -> None:
        """Add what this process is born with: datasets, and other objects that a client refers to by a key.

        Args:
            shared: Workers have them as they are after a fork; else each makes copies, as if it had got the pickles.
        """
        if shared:
            self._built.update(objects)
        else:
            self._unshared = objects

    def add(self, recipe: Build, parts: Parts) -> dict[str, Any]:
        """Add a dataset; builds it here if it is to be shared with workers, which are forked later.

        Args:
            parts: Function that returns ``(instance,)`` or ``(callable, args, kwargs)``.

        Returns:
            The reply to the client: what the dataset is; or for one that cannot be shared, and was not added, why.
        """
        if not recipe.shared:
            self._built.pop(recipe.key, None)
            forget_changes(recipe.key)
            self._recipes[recipe.key] = recipe, parts
            return {"shared": False}
        files, connections, threads = open_files(), open_connections(), num_threads()
        with _told_if_slow(recipe.name):
            dataset = build(recipe, parts)
            length = length_of(dataset)  # which may open files, too
        if (reason := why_not_shared(dataset, files)) is not None:
            del dataset
            gc.collect()  # closes files of cycles
            # Of libraries, and its own: in a fork, these are not there.
            return {
                "shared": False,
                "reason": reason,
                "leaves_threads": has_more_threads(threads),
            }
        self._built[recipe.key] = dataset
        # No fork's collector visits what lives now, so its pages stay shared.
        gc.collect()
        gc.freeze()
        if peers := name_shared_connections(connections):
            logger.warning(
                "the workers of this node share the connections of dataset %s to %s, so that one may get the answer to "
                "another; connect on first use, or set build='worker'",
                recipe.name,
                peers,
            )
        return {"shared": True, "length": length, "kind": style_of(dataset)}

    def get(self, key: int) -> Any:
        """Return the dataset, built now if this process has not yet done so."""
        if key not in self._built:
            if key in self._unshared:  # of a worker: no request to a session refers to it
                self._built.update(copy_apart(self._unshared))
                self._builders.update(dict.fromkeys(self._unshared, os.getpid()))
                return self._built[key]
            if key not in self._recipes:
                raise LocalProtocolError(f"dataset {key} is unknown to this process")
            dataset = self._built[key] = build(*self._recipes[key])
            self._builders[key] = os.getpid()
            built[key] = Built.of(dataset)
        return self._built[key]

    def release(self, keys: Sequence[int]) -> None:
        """Forget datasets; their memory is freed with the last worker that inherited them."""
        for key in keys:
            self._recipes.pop(key, None)
            self._built.pop(key, None)
        # Only cycles are left by now.
        left_bytes = memory_of_its_own()
        if left_bytes < self._kept_bytes + WORTH_COLLECTING_BYTES:
            self._kept_bytes = min(self._kept_bytes, left_bytes)
            return
        gc.unfreeze()
        gc.collect()
        give_back_freed_memory()
        # Survivors stay shared with workers that are forked later.
        gc.freeze()
        self._kept_bytes = memory_of_its_own()

    def drop_own(self) -> None:
        """Forget what this process has built, a worker that ends; what it has inherited cleans up in its session."""
        for key, pid in self._builders.items():
            if pid == os.getpid():
                self._built.pop(key, None)

    def clear(self) -> None:
        """Forget all datasets, at the end of the process; those in cycles stay, as a collection would take longer."""
        self._recipes.clear()
        self._built.clear()
        self._unshared = {}


@contextlib.contextmanager
def _told_if_slow(name: str) -> Iterator[None]:
    """Log the stack of this thread if it takes long to build a dataset.

    By a thread that ends with the block: a session forks, and so has no alarm, which tells of the client's waits.
    """
    is_built, builder = threading.Event(), threading.get_ident()

    def watch() -> None:
        if not is_built.wait(SLOW_BUILD_SECONDS):
            frames = traceback.extract_stack(sys._current_frames()[builder])
            first = max(place for place, frame in enumerate(frames) if frame.filename == __file__)
            stack = "".join(traceback.format_list(frames[first + 1 :]))
            logger.warning("dataset %s is being built for %g s, and is here:\n%s", name, SLOW_BUILD_SECONDS, stack)

    watcher = threading.Thread(target=watch, name="rpcdl-slow", daemon=True)
    with contextlib.suppress(RuntimeError):  # the system has no room for a thread
        watcher.start()
    try:
        yield
    finally:
        is_built.set()
        if watcher.ident is not None:
            watcher.join()


def parts_of(blocks: Sequence[Block]) -> tuple[Any, ...]:
    """The parts of a dataset in the blocks of a message."""
    parts: tuple[Any, ...] = loads(blocks[0].view, blocks[1:], adopt_main=True)
    return parts


def build(recipe: Build, parts: Parts) -> Any:
    """Build a dataset.

    Raises:
        SerializationError: A module is missing here.
        TypeError: What was built is no dataset.
        Exception: The constructor failed.
    """
    # Changes that the constructor makes stay, as if the client had called it.
    set_states(recipe.generators)
    return make(parts(), recipe.name)


def make(parts: tuple[Any, ...], name: str) -> Any:
    """Make a dataset of ``(instance,)`` or ``(callable, args, kwargs)``; raises as :func:`build`."""
    dataset = parts[0] if len(parts) == 1 else parts[0](*parts[1], **parts[2])
    if not style_of(dataset):
        raise TypeError(f"{name} made no dataset: it has no __getitem__, and is no IterableDataset")
    return dataset


# Longer lists of these stay the same memory, too, until a worker changes its own.
_ATOMS, _MIN_LONG = frozenset({bool, int, float, str, bytes, type(None)}), 1000

# Multiprocessing pickles them in a way of its own, too.
_MADE_OF_PARTS = (types.MethodType, functools.partial)


class _Copier(pickle.Pickler):
    """Pickles objects for the same process: leaves out code, and memory, and what is made to be shared.

    Attributes:
        kept: What is left out.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.kept: list[Any] = []

    def persistent_id(self, part: Any) -> int | None:
        kind = type(part)
        is_kept = isinstance(part, (type, types.ModuleType, types.FunctionType)) or (
            kind.__module__.startswith("multiprocessing.")
            or (kind in ForkingPickler._extra_reducers and kind not in _MADE_OF_PARTS)  # type: ignore[attr-defined]
            or (isinstance(part, np.ndarray) and not part.dtype.hasobject)
            or (kind in (list, tuple) and len(part) >= _MIN_LONG and set(map(type, part)) <= _ATOMS)
            or name_among_own(part) is not None
        )
        if not is_kept:
            return None
        self.kept.append(part)
        return len(self.kept) - 1


def copy_apart(objects: Mapping[int, Any]) -> Mapping[int, Any]:
    """Copies of objects as they are in another process that gets their pickles: with files and connections of its own.

    Tensors and arrays stay the same memory, and what multiprocessing shares stays shared. Objects that cannot be
    pickled again stay as they are.
    """
    file = io.BytesIO()
    copier = _Copier(file)
    try:
        copier.dump(objects)
        unpickler = pickle.Unpickler(io.BytesIO(file.getbuffer()))
        unpickler.persistent_load = copier.kept.__getitem__  # type: ignore[method-assign]
        copies: Mapping[int, Any] = unpickler.load()
    except Exception:
        logger.debug("a worker shares what its session was born with", exc_info=True)
        return objects
    return copies


def change_shared(dataset: Any, key: int, changes: Sequence[Change]) -> str | None:
    """Make changes to a session's dataset; returns why workers cannot inherit it any more, or None."""
    files = open_files()
    catch_up(dataset, key, changes)
    return why_not_shared(dataset, files)


def length_of(dataset: object) -> int | None:
    """Return ``len(dataset)``; None if that fails, so that the caller of ``len`` gets the error."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except Exception:
        return None


def style_of(dataset: object) -> str:
    """How batches are loaded: ``"map"`` by index, ``"iterable"``, or ``""`` for neither."""
    # Every Dataset of torch has __getitem__; that of an iterable one only raises.
    if isinstance(dataset, IterableDataset):
        return "iterable"
    return "map" if hasattr(dataset, "__getitem__") else ""


def why_not_shared(dataset: object, files: OpenFiles) -> str | None:
    """Why workers cannot inherit a dataset made since :func:`open_files` was called; or None.

    Threads of libraries, which the dataset does not hold, are idle now: a fork that lacks them is what torch's workers
    get, too.
    """
    held, main = find_held(dataset), threading.main_thread()
    if any(isinstance(part, threading.Thread) and part.is_alive() and part is not main for part in held):
        return "it holds threads, which a fork does not copy"
    if any(map(_is_stream, held)):
        return "it holds a connection or a pipe, on which forked workers would get each other's answers"
    opened = {file: paths for file, paths in open_files().items() if len(paths) > len(files.get(file, ()))}
    if any(isinstance(part, io.FileIO) and _file_of(part) in opened for part in held):
        return "it holds files open, whose position forked workers would share"
    # A memory map has no position, but may keep a descriptor of its file. Files of libraries are no objects.
    maps = count_maps(held) if opened else {}
    for file, paths in opened.items():
        if len(paths) - len(files.get(file, ())) > maps.get(paths[-1], 0):
            what = f"it holds {paths[-1]} open, whose position forked workers would share"
            return f"{what}, or another thread has opened that meanwhile"
    return None


def _file_of(file: io.FileIO) -> tuple[int, int] | None:
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):  # it is closed
        return None
    return status.st_dev, status.st_ino


def _is_stream(part: object) -> bool:
    """Whether this is a connected socket, or a pipe that is read from; those of multiprocessing are made to be shared.

    All processes have the standard ones, and may write to the same pipe, as to a log.
    """
    try:
        if isinstance(part, socket.socket):
            part.getpeername()
            return True
        if not isinstance(part, io.FileIO) or not part.readable():
            return False
        status = os.fstat(part.fileno())
        return stat.S_ISFIFO(status.st_mode) and not _is_standard(status)
    except (OSError, ValueError):  # it is closed, or not connected
        return False


def _is_standard(status: os.stat_result) -> bool:
    """Whether a file is standard input, output, or error output."""
    for descriptor in range(3):
        with contextlib.suppress(OSError):  # it is closed
            if os.path.samestat(status, os.fstat(descriptor)):
                return True
    return False


def name_shared_connections(connections: Mapping[int, str]) -> str:
    """Peers of the connections that a dataset has opened since ``open_connections`` was called."""
    return ", ".join(sorted({peer for inode, peer in open_connections().items() if inode not in connections}))


def memory_of_its_own() -> int:
    """Bytes of anonymous memory, including pages shared with the parent process; 0 without a descriptor to look."""
    _size, resident, of_files, *_rest = map(int, (read("/proc/self/statm") or "0 0 0").split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> OpenFiles:
    """The regular files that this process holds open: forked workers would share the offsets."""
    found: dict[tuple[int, int], list[str]] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        # Shared memory is mapped, and has no position.
        if status.st_mode & 0o170000 == 0o100000 and not target.startswith(("/dev/shm/", "/memfd:")):
            found.setdefault((status.st_dev, status.st_ino), []).append(target)
    return found


def open_connections() -> dict[int, str]:
    """Peers of this process's connected sockets, by inode: forked workers would share them."""
    found, names = {}, os.listdir("/proc/self/fd")
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # a socket made with one is non-blocking, and so is the one that it is a copy of
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if status.st_mode & 0o170000 != 0o140000:
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                peer = sock.getpeername()
            text = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else os.fsdecode(peer)
            # Socket pairs have no name. Proxies of a multiprocessing.Manager connect anew in each worker.
            if text and "/pymp-" not in text:
                found[status.st_ino] = text
    socket.setdefaulttimeout(timeout)
    return found
