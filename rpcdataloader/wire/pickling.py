"""Objects to a payload and blocks, and back.

The payload is a pickle, then the bytes of the message's tensors if they are very few, then the index of the tensors,
then the lengths of these bytes and of the index as 32-bit numbers. The blocks are numpy arrays and other large buffers
in the order of the pickle, then tensors of 64 KiB or more, then the slabs of small ones.

Apart from exceptions, received bytes are unpickled here only, and after their message was authenticated.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import pickle
import struct
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from rpcdataloader.errors import RPCError, SerializationError
from rpcdataloader.host.signals import USER_ERRORS, is_interrupt, suppress_errors
from rpcdataloader.wire import definitions
from rpcdataloader.wire.adopted import adopted
from rpcdataloader.wire.definitions import Definition, Have, Table
from rpcdataloader.wire.exceptions import copy_to_raise, loads_exception
from rpcdataloader.wire.frames import Message, MessageType
from rpcdataloader.wire.picklers import (
    DefinitionPickler,
    Frozen,
    PersistentId,
    Pickler,
    ReplyPickler,
    RequestPickler,
    Unpickler,
    UnresolvedError,
)
from rpcdataloader.wire.slabs import Allocator, Block, PinnedAllocator
from rpcdataloader.wire.strings import set_apart
from rpcdataloader.wire.tensors import Index, Movable, pack, rebuild, rebuild_only

_LENGTHS = struct.Struct("<II")

#: Turns a pickle without tensors and blocks into a payload.
NO_TENSORS = _LENGTHS.pack(0, 0)

# A slab up to this size travels inside the payload: a block would cost more than its bytes.
_MAX_INLINE_BYTES = 1 << 11

_REQUEST_ADVICE = "open it on first use instead of in the constructor"
_DATASET_ADVICE = f"{_REQUEST_ADVICE}, or let each node build the dataset: RPCDataset(workers, MyDataset, *args)"
_REPLY_ADVICE = "what a worker sends back must consist of tensors, arrays and objects that pickle accepts"


@dataclass(slots=True)
class Encoded:
    """The content of a message."""

    payload: bytes  # the pickle with its index
    # The blocks keep and show the memory of the tensors themselves: changing a large tensor before it is sent changes
    # the message.
    buffers: list[memoryview]
    modules: Set[str] = frozenset()  # names of the modules that unpickling imports
    definitions: Table = field(default_factory=dict)  # of the script, which the receiver needs; not in the payload
    names: Set[str] = frozenset()  # those of them that the object itself names

    def with_definitions(self, lacking: Iterable[Definition] | None = None) -> Encoded:
        """The same with definitions in the payload, by default with all, for a receiver of which nothing is known."""
        first = list(dict.fromkeys(self.definitions.values()) if lacking is None else lacking)
        return replace(self, payload=definitions.prefix(first) + self.payload) if first else self

    @property
    def size_bytes(self) -> int:
        """The size of payload and blocks together."""
        return len(self.payload) + sum(buffer.nbytes for buffer in self.buffers)

    @property
    def blocks(self) -> list[memoryview]:
        """Payload and blocks, as bytes."""
        return [memoryview(self.payload), *self.buffers]


class Build(NamedTuple):
    """Make a dataset, in the session if ``shared``, else in each worker that needs it.

    The first block is a pickle of ``(instance,)`` or ``(callable, args, kwargs)``; the others are those of that pickle.
    A session that was born with these parts gets no blocks.
    """

    key: int  # chosen by the client; the same on all its nodes
    name: str
    shared: bool
    generators: tuple[Any, ...]  # states of the client's random generators, which a constructor may draw from

    def encode(self) -> bytes:
        """The payload."""
        return pickle.dumps(tuple(self), protocol=5) + NO_TENSORS

    @classmethod
    def decode(cls, payload: bytes | bytearray | memoryview) -> Build:
        """Read a payload whose seal was checked, and take over the definitions that it brings."""
        return cls(*loads(payload, (), adopt_main=True))


def dumps(
    obj: Any,
    *,
    persistent_id: PersistentId | None = None,
    name: str = "object",
    in_band: bool = False,
    have: Have | None = None,
    names: Set[str] = frozenset(),
    with_rest: bool = False,
    with_patches: bool = False,
    with_told: bool = False,
    reducers: Mapping[type, Callable[[Any], Any]] | None = None,
) -> Encoded:
    """Encode a client's object.

    Args:
        obj: Any object. Local functions and classes travel by value; what the script defines is named.
        persistent_id: Function called with every object; its result replaces the object, until ``persistent_load``
            restores it. None keeps the object.
        name: The caller's name for the object; errors give attribute paths from here.
        in_band: Put a copy of everything into the payload.
        have: Tells of which globals of the script the receiver has; None if of none.
        names: Further names of the script whose definitions the receiver needs.
        with_rest: Also give all other definitions of the script, for code that finds them in other ways.
        with_patches: Also give what the script has changed in libraries.
        with_told: Number small shared tensors, for values that follow.
        reducers: Further reducers by type, which come before all others.

    Raises:
        SerializationError: A part of the object cannot be pickled.
        RPCError: ``persistent_id`` raised it.
    """

    def make_pickler(file: io.BytesIO, buffers: list[memoryview]) -> RequestPickler:
        return RequestPickler(file, None if in_band else buffers, persistent_id, reducers, numbers_told=with_told)

    encoded, pickler = _dumps(obj, make_pickler, name, _DATASET_ADVICE if name == "dataset" else _REQUEST_ADVICE)
    if pickler.used or pickler.frozen or names or with_rest or with_patches:
        used = {**dict.fromkeys(names, ""), **pickler.used}
        table = definitions.script.collect(
            used, _explain_global, reference_of=persistent_id, have=have, with_rest=with_rest, with_patches=with_patches
        )
        for frozen in pickler.frozen:
            table = definitions.merge(table, frozen.definitions)
        encoded.definitions, encoded.names = table, frozenset(pickler.used)
        encoded.modules = frozenset(encoded.modules).union(*(each.modules for each in table.values()))
    return encoded


def dumps_named(content: Any, parts: Mapping[str, Any], **options: Any) -> Encoded:
    """As :func:`dumps`, with these options; errors give attribute paths that begin with the name of a part.

    Args:
        parts: Parts of ``content``, by the names that the user knows.
    """
    try:
        return dumps(content, **options)
    except SerializationError:
        for name, part in parts.items():
            dumps(part, name=name, **options)
        raise


def dumps_reply(obj: Any, *, name: str = "result") -> Encoded:
    """The same for a worker's object: functions and classes that came from the client go back by name."""
    return _dumps(set_apart(obj), ReplyPickler, name, _REPLY_ADVICE)[0]


def freeze_reply(obj: Any, *, name: str) -> Frozen:
    """A worker's object as it is now, for a part of a message that is sent later, and stays on the CPU there."""
    encoded, _pickler = _dumps(obj, lambda file, _buffers: ReplyPickler(file, None), name, _REPLY_ADVICE)
    return Frozen(encoded.payload, encoded.modules, {})


# No deeper than users nest objects on purpose.
_MAX_DEPTH = 30

# Longest search for the part of an object that cannot be pickled. Users take a longer one for a hang.
_MAX_SEARCH_SECONDS = 2.0

_MakePickler = Callable[[io.BytesIO, "list[memoryview]"], Pickler]
_PicklerT = TypeVar("_PicklerT", bound=Pickler)


def _dumps(
    obj: Any, make_pickler: Callable[[io.BytesIO, list[memoryview]], _PicklerT], name: str, advice: str
) -> tuple[Encoded, _PicklerT]:
    file = io.BytesIO()
    buffers: list[memoryview] = []
    try:
        pickler = make_pickler(file, buffers)
        pickler.dump(obj)
        if not pickler.tensors:
            file.write(NO_TENSORS)
            return Encoded(file.getvalue(), buffers, pickler.modules), pickler
        index, blocks = pack(pickler.tensors)
    except RPCError:  # already clear, such as for a reference to an object of another worker
        raise
    except USER_ERRORS as error:
        if is_interrupt(error):
            raise
        raise _explain(obj, make_pickler, name, advice, error) from error
    inline: bytes | memoryview = b""
    if len(blocks) == 1 and blocks[0].nbytes <= _MAX_INLINE_BYTES:
        inline = blocks.pop()
    encoded_index = pickle.dumps(tuple(index), protocol=5)
    file.write(inline)
    file.write(encoded_index)
    file.write(_LENGTHS.pack(len(inline), len(encoded_index)))
    return Encoded(file.getvalue(), buffers + blocks, pickler.modules), pickler


def _explain_global(name: str, user: str, value: Any, error: BaseException) -> Exception:
    """The error for a global of the script that cannot be sent."""
    used_by = f", which {user} uses," if user else ""
    if isinstance(value, (type, types.FunctionType)):
        path, part = _search(value, lambda file, _buffers: DefinitionPickler(file, [name], {}), name)
        what = f"the script's {name}{used_by} has a part that cannot be pickled: {path} is a {kind_of(part)}"
    else:
        what = f"the script's global {name}{used_by} is a {kind_of(value)}, which cannot be pickled"
    return SerializationError(
        f"{what} ({_describe(error)}): let each worker make its own where it is used first, in a function or method "
        "whose result it keeps, or in worker_init_fn"
    )


def _explain(obj: Any, make_pickler: _MakePickler, name: str, advice: str, error: BaseException) -> SerializationError:
    """The error for an object that cannot be pickled, with the path of the innermost part that cannot."""
    path, part = _search(obj, make_pickler, name)
    return SerializationError(f"{path} is a {kind_of(part)}, which cannot be pickled ({_describe(error)}): {advice}")


def _search(obj: Any, make_pickler: _MakePickler, name: str) -> tuple[str, Any]:
    """As :func:`_find_culprit`, within a limit of time."""
    found, deadline = (name, obj), time.monotonic() + _MAX_SEARCH_SECONDS
    with contextlib.suppress(_SearchTimeout):
        found = _find_culprit(obj, make_pickler, name, deadline)
        if isinstance(found[1], type):  # of which each attribute has a pickle of its own
            for path, attribute in _parts(found[1], found[0]):
                if _visit_until_failure(attribute, make_pickler, deadline):
                    return _find_culprit(attribute, make_pickler, path, deadline)
    return found


class _SearchTimeout(Exception):
    """The search has taken too long."""


def _find_culprit(obj: Any, make_pickler: _MakePickler, name: str, deadline: float) -> tuple[str, Any]:
    """Path of the innermost part that cannot be pickled, and the part; the object itself if there is no such part.

    A pickler that fails is at that part, or at something that was made to pickle it. To try each part instead would
    take a time that is quadratic in their number, where they refer back to the whole.
    """
    visited = _visit_until_failure(obj, make_pickler, deadline)
    paths = _find_paths(obj, name, visited, deadline)
    for part in reversed(visited):
        if id(part) in paths and _visit_until_failure(part, make_pickler, deadline):
            return paths[id(part)], part
    return name, obj


def _visit_until_failure(obj: Any, make_pickler: _MakePickler, deadline: float) -> list[Any]:
    """The objects to which a pickler comes before it fails, in order; none if it does not fail."""
    visited: list[Any] = []
    pickler = make_pickler(io.BytesIO(), [])
    replace = getattr(pickler, "persistent_id", None)

    def visit(part: Any) -> Any:
        if time.monotonic() > deadline:
            raise _SearchTimeout
        visited.append(part)
        return None if replace is None else replace(part)

    pickler.persistent_id = visit
    try:
        pickler.dump(obj)
    except _SearchTimeout:
        raise
    except USER_ERRORS as error:
        if is_interrupt(error):
            raise
        return visited
    return []


def _find_paths(obj: Any, name: str, visited: Sequence[Any], deadline: float) -> dict[int, str]:
    """Paths of the visited parts of an object by their identity, the shortest of each, until the last one is found."""
    wanted = {id(part) for part in visited}
    paths, level = {id(obj): name}, [obj]
    for _depth in range(_MAX_DEPTH):
        below = []
        for whole in level:
            for path, part in _parts(whole, paths[id(whole)]):
                if time.monotonic() > deadline:
                    raise _SearchTimeout
                if id(part) in wanted and id(part) not in paths:
                    paths[id(part)] = path
                    below.append(part)
                    if part is visited[-1]:
                        return paths
        level = below
    return paths


def loads(
    payload: bytes | bytearray | memoryview,
    blocks: Sequence[Block],
    *,
    allocator: Allocator | None = None,
    persistent_load: Callable[[Any], Any] | None = None,
    adopt_main: bool = False,
    movable: Movable | None = None,
) -> Any:
    """Decode the output of :func:`dumps` or :func:`dumps_reply`. Runs code that the sender chose.

    Args:
        payload: Payload of an authenticated message.
        blocks: Its blocks. Tensors and arrays are made over their memory and keep it.
        allocator: Allocator of the blocks, and of copies of small tensors. None for plain memory.
        persistent_load: Function that returns the object for a result of ``persistent_id``.
        adopt_main: Take over what the sender's script defines. For workers, which have no ``__main__`` of their own to
            protect.
        movable: An empty one, to move the tensors afterwards; None if they stay.

    Raises:
        SerializationError: A module or name is missing here, or an object fails to rebuild.
        Exception: ``persistent_load`` failed.
    """
    try:
        tensors: Sequence[torch.Tensor] = ()
        num_tensor_blocks = 0
        if payload[-len(NO_TENSORS) :] != NO_TENSORS:
            tensors, num_tensor_blocks = _load_tensors(memoryview(payload), blocks, allocator, movable)
        buffers = [block.view for block in blocks[: len(blocks) - num_tensor_blocks]] if blocks else None
        unpickler = Unpickler(io.BytesIO(payload), buffers=buffers)
        unpickler.tensors, unpickler.blocks, unpickler.resolve = tensors, blocks, persistent_load
        if adopt_main:
            unpickler.adopt = functools.partial(adopted.adopt, resolve=persistent_load)
        try:
            return unpickler.load()
        finally:
            if adopt_main:
                adopted.change_modules()
    except RPCError:
        raise
    except UnresolvedError as unresolved:
        raise unresolved.error from unresolved.error.__cause__
    except ImportError as error:
        if (error.name or "").startswith("numpy."):
            raise SerializationError(
                f"{error} on {os.uname().nodename}, which has numpy {np.__version__}: install the same version of "
                "numpy on both sides"
            ) from error
        raise SerializationError(
            f"{error} on {os.uname().nodename}; it must be importable there too: send it with py_modules=, put it "
            "on a file system that both sides see and into PYTHONPATH, or preload it with launch --preload"
        ) from error
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise SerializationError(f"a message cannot be rebuilt: {_describe_rebuilding(error)}") from error


def _describe_rebuilding(error: BaseException) -> str:
    """An error in words, with the class of an object whose ``__getattr__`` needs attributes that are not there yet."""
    for frame, _line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == "__getattr__" and code.co_argcount == 2:
            itself, name = (frame.f_locals.get(variable) for variable in code.co_varnames[:2])
            if isinstance(name, str) and name.startswith("__"):
                return (
                    f"{_describe(error)}: {kind_of(itself)}.__getattr__ was asked for {name!r} before the object had "
                    'any attributes: begin it with\n    if name.startswith("__"):\n        raise AttributeError(name)'
                )
    return _describe(error)


def _load_tensors(
    payload: memoryview, blocks: Sequence[Block], allocator: Allocator | None, movable: Movable | None
) -> tuple[Sequence[torch.Tensor], int]:
    """The tensors of a message, and the number of its blocks that they take: the last ones."""
    index_end = len(payload) - _LENGTHS.size
    inline_bytes, index_bytes = _LENGTHS.unpack_from(payload, index_end)
    index_start = index_end - index_bytes
    index = Index(*pickle.loads(payload[index_start:index_end]))
    inline = payload[index_start - inline_bytes : index_start]
    pinned = allocator if isinstance(allocator, PinnedAllocator) else None
    if inline and pinned is None and movable is None and index.num_tensors == 1:
        return [rebuild_only(index, inline)], 0
    if inline:
        memory = [torch.frombuffer(bytearray(inline), dtype=torch.uint8)]
        if pinned is not None:
            memory = [pinned.allocate(inline_bytes).tensor.copy_(memory[0])]
        num_blocks = 0
    else:
        num_blocks = len(index.large) + len(index.slabs)
        memory = [block.tensor for block in blocks[len(blocks) - num_blocks :]]
    if movable is not None:
        return movable.rebuild(index, memory), num_blocks
    return rebuild(index, memory, in_place=pinned is not None), num_blocks


def result_of(reply: Message | RPCError, allocator: Allocator | None = None, movable: Movable | None = None) -> Any:
    """The result in a reply; other arguments as for :func:`loads`.

    Raises:
        Exception: The request failed, or has no reply.
    """
    if not isinstance(reply, Message):
        raise copy_to_raise(reply)
    if reply.type == MessageType.ERROR:
        raise loads_exception(reply.payload, reply.peer)
    return loads(reply.payload, reply.blocks, allocator=allocator, movable=movable)


def kind_of(value: Any) -> str:
    """``PIL.Image.Image``; built-in types without their module."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The items of an object, the variables of a function, and the attributes; each with its path."""
    if isinstance(obj, dict):
        yield from ((f"{path}[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, deque, set, frozenset)):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(obj))
    elif isinstance(obj, types.FunctionType):
        with contextlib.suppress(ValueError):  # a variable of the closure has no value yet
            used = inspect.getclosurevars(obj)
            yield from ((f"{path}.<closure>.{name}", value) for name, value in used.nonlocals.items())
            yield from ((f"{path}.<globals>.{name}", value) for name, value in used.globals.items())
    names = [*getattr(obj, "__dict__", ()), *getattr(type(obj), "__slots__", ())]
    if isinstance(obj, functools.partial):
        names += ["func", "args", "keywords"]
    for name in [name for name in names if not name.startswith("__")] + ["__self__", "__class__"]:
        with suppress_errors():  # unset, or a property that fails
            yield f"{path}.{name}", getattr(obj, name)
