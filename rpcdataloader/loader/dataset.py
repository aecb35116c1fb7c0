"""``RPCDataset``: a dataset that is built on the nodes of its workers, and used like a local one."""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from rpcdataloader.client.client import get_client
from rpcdataloader.client.discovery import Inline, Local, Remote, Where, find_workers
from rpcdataloader.client.modules import choose_modules, choose_variables
from rpcdataloader.client.mutable import MutableDataset
from rpcdataloader.diagnosis.records import Recorder
from rpcdataloader.errors import ConnectionLostError, LocalProtocolError
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.host.environment import Additions, set_variables
from rpcdataloader.host.locks import Lock
from rpcdataloader.host.resources import available_cpus
from rpcdataloader.host.state import assign
from rpcdataloader.loader.executor import Here
from rpcdataloader.loader.inline import InlineIterator
from rpcdataloader.loader.iterator import RemoteIterator
from rpcdataloader.loader.placement import check_min_workers, choose_nodes, has_local, prepare
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.server.datasets import length_of, make, open_files, style_of, why_not_shared
from rpcdataloader.server.local import Inherited
from rpcdataloader.server.processes import has_more_threads, num_threads
from rpcdataloader.wire.pickling import dumps_named

IS_HERE = (
    "an RPCDataset belongs to this process and cannot be sent: to use a part of it, give RPCDataloader a sampler, or "
    "wrap what is built, RPCDataset(workers, lambda: Subset(MyDataset(), indices)); to load it, use RPCDataloader"
)


class RPCDataset(Dataset[Any]):
    """Build ``dataset(*args, **kwargs)`` on the nodes of the workers.

    The nodes answer ``len``, indexing and attributes, one request at a time: for training, give this object to an
    :class:`~rpcdataloader.RPCDataloader`. An attribute that is set, and a method that is called, change the answers at
    once, and all workers from the next pass on. For an ``IterableDataset``, this is one too.

    Args:
        workers: Places of the workers: a list of ``host:port``, ``[v6]:port`` or ``unix:/path``, ``@/path`` for servers
            that register in that directory, ``dns://host:port`` for those behind a name, the value of a pool's ``with``
            block, and ``local:N`` for N processes on this machine; one of these, or a string of them separated by
            commas; ``inline`` for this process; or None, for the environment variable ``RPCDATALOADER_WORKERS`` or else
            processes on this machine.
        dataset: Class or other callable that makes the dataset. It is importable on the nodes, or sent by value.
        *args: Positional arguments of ``dataset``.
        build: ``"node"`` builds it once per node, and workers inherit it by a fork; for workers of this machine, this
            process may be the one that builds it. ``"worker"`` builds it in each worker: for datasets that open HDF5 or
            LMDB files or start threads in their constructor.
        env: Environment variables for the sessions before the dataset is built: names and patterns of variables of this
            process, such as ``["HF_*", "AWS_PROFILE"]``; or their values, ``{"TZ": "UTC"}``.
        py_modules: Modules and packages for the sessions before the dataset is built, for nodes that do not see the
            folder of the script: module objects, names, or paths. Pure Python, with the data files of packages, at most
            64 MiB altogether.
        forward_output: Print the output of node servers' workers on this process's standard error, each line with its
            origin.
        min_workers: Number of workers to wait for: until the node servers have this many for this process. 0 to begin
            with the present ones.
        **kwargs: Keyword arguments of ``dataset``.

    Raises:
        ValueError: ``workers``, ``build``, ``env`` or ``min_workers`` is malformed, a module cannot be sent, or another
            dataset or loader of this process has sent another ``env`` or other ``py_modules``.
        TypeError: ``dataset`` cannot be called, or its result is not a dataset.
        ConnectError: All node servers are unreachable, or have too few workers.
        SerializationError: An argument cannot be pickled.
        AssertionError: This process is a daemon of multiprocessing, and may start no workers of this machine.
        Exception: An exception of the callable, with the remote traceback as its cause.
    """

    _access: _Inline | MutableDataset
    _where: Where

    def __init__(
        self,
        workers: str | Iterable[str] | None,
        dataset: Callable[..., Any],
        *args: Any,
        build: str = "node",
        env: Mapping[str, str] | Iterable[str] | None = None,
        py_modules: Iterable[str | os.PathLike[str] | ModuleType] | None = None,
        forward_output: bool = False,
        min_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        if callable(workers):
            raise TypeError(f"workers come first, then the dataset's class: RPCDataset(None, {workers!r}, ...)")
        if not callable(dataset):
            raise TypeError(
                f"dataset must be a callable that makes the dataset, but is a {type(dataset).__name__}; "
                "an instance is given to RPCDataloader directly, with workers="
            )
        if build not in ("node", "worker"):
            raise ValueError(f"build must be 'node' or 'worker', but is {build!r}")
        additions = Additions.of(choose_variables(env), choose_modules(py_modules), forward_output)
        where = find_workers(workers) or Local()
        check_min_workers(min_workers, 0, where)
        access: _Inline | MutableDataset
        if isinstance(where, Inline):
            set_variables(additions.variables)
            access = _Inline(dataset(*args, **kwargs))
        else:
            name = getattr(dataset, "__qualname__", None) or repr(dataset)
            parts = {"dataset": dataset, "args": args, "kwargs": kwargs}
            # Workers of this machine get the parts as multiprocessing passes them on.
            pickled = None
            if isinstance(where, Remote):
                pickled = dumps_named(tuple(parts.values()), parts, with_rest=True, with_patches=True)
            is_iterable = issubclass(dataset, IterableDataset) if isinstance(dataset, type) else None
            access = MutableDataset(name, pickled, shared=build == "node", is_iterable=is_iterable, where=where)
            if has_local(where):
                access.begin_here(_born_with(access, parts, additions))
            with get_client().additions.adding(additions):
                nodes = choose_nodes(where, access.local, min_workers=min_workers).homes
                try:
                    prepare(access, nodes)
                except ConnectionLostError:
                    if not access.leaves_threads:
                        raise
                    prepare(access, nodes)
        # Past __setattr__, which sets attributes of the remote dataset.
        self.__dict__["_where"] = where
        self.__dict__["_access"] = access
        if access.is_iterable():
            # torch's loader reads the class. Past __setattr__, too.
            object.__setattr__(self, "__class__", RPCIterableDataset)

    def __len__(self) -> int:
        return self._access.length()

    def __bool__(self) -> bool:
        try:
            return len(self) > 0
        except TypeError:  # without a length, as of any object
            return True

    def __getitem__(self, index: Any) -> Any:
        return self._access.query(operator.getitem, index)

    def __getattr__(self, name: str) -> Any:
        # Protocols (copying, pickling, numpy's) look for special methods; the dataset does not answer these.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name in ("_access", "_where"):
            raise AttributeError(f"this RPCDataset was not initialised: {name}")
        value = self._access.query(_get_attribute, name)
        return _Method(self, name) if value is _Method else value

    def __setattr__(self, name: str, value: Any) -> None:
        self._access.change(assign, name, value)

    def call_all(self, function: Callable[[Any], Any]) -> list[Any]:
        """Run ``function(dataset)`` in the process that answers questions, and from the next pass on in all others.

        Returns:
            A list of one: the result of the first.

        Raises:
            Exception: An exception of ``function``, which then runs nowhere else.
        """
        return [self._access.change(function)]

    def __repr__(self) -> str:
        return f"RPCDataset({self._access.name}, workers='{self._where}')"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise LocalProtocolError(IS_HERE)


class RPCIterableDataset(RPCDataset, IterableDataset[Any]):
    """The class of an :class:`RPCDataset` whose dataset is iterable-style.

    Iterating over it takes a worker, and yields single samples.
    """

    def __bool__(self) -> bool:
        return True  # a length may not exist

    def __iter__(self) -> Iterator[Any]:
        access, where = self._access, self._where
        endless = itertools.repeat(None)
        settings = PassSettings(
            dataset=self, sampler=endless, auto_collation=False, iterable=True, collate_fn=_unchanged
        )
        recorder = Recorder(Lock(), time.monotonic())
        if isinstance(access, _Inline) or isinstance(where, Inline):
            inline = InlineIterator(settings, access_of(self))
            inline.recorder = recorder
            return inline
        here = None if (node := access.place_of_pass()) is None else Here(node, None)
        placement = choose_nodes(where, node or access.local, num_workers=1)
        return RemoteIterator(settings, access, placement, recorder, here=here)


def _born_with(access: MutableDataset, parts: Mapping[str, Any], additions: Additions) -> Inherited:
    """What sessions of this machine have of a dataset.

    A fork inherits what this process builds, where the threads are that a constructor may need, as torch's workers do.
    A new process builds its own, and so does one that first needs variables or modules.
    """
    recipe = parts["dataset"], parts["args"], parts["kwargs"]
    objects = {}
    is_fork = multiprocessing.get_context().get_start_method() == "fork"
    if access.is_shared and is_fork and not (additions.variables or additions.modules):
        files, threads = open_files(), num_threads()
        with generators_restored():
            dataset = make(recipe, access.name)
            length = length_of(dataset)  # which may open files, too
        if (reason := why_not_shared(dataset, files)) is None:
            access.was_built_here(style_of(dataset), length)
            objects[access.key] = dataset
        else:
            access.build_in_workers(reason, leaves_threads=has_more_threads(threads))
    return Inherited(available_cpus(), objects, {access.key: recipe}, additions, parts)


def access_of(dataset: RPCDataset) -> Any:
    """The object behind an RPCDataset: a :class:`MutableDataset`, or an :class:`_Inline`."""
    access = dataset._access
    return access.dataset if isinstance(access, _Inline) else access


class _Inline:
    """A dataset of this process, with the same interface as a remote one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.name = type(dataset).__name__
        if not hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
            raise TypeError(f"{self.name} is not a dataset: define __getitem__ or derive from IterableDataset")

    def length(self) -> int:
        return len(self.dataset)

    def is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def query(self, func: Callable[..., Any], *args: Any) -> Any:
        return func(self.dataset, *args)

    change = query


def _unchanged(sample: Any) -> Any:
    return sample


class _Method:
    """A method of the dataset, called where the dataset is; in a message to a worker, that of the dataset there."""

    def __init__(self, dataset: RPCDataset, name: str) -> None:
        self._dataset = dataset
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # On the nodes, as it may change the dataset: a change of a copy here would be lost unnoticed.
        return self._dataset._access.change(operator.methodcaller(self._name, *args, **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._dataset, self._name)


def _get_attribute(dataset: Any, name: str) -> Any:
    value = getattr(dataset, name)
    return _Method if inspect.ismethod(value) and value.__self__ is dataset else value
