"""Functions that a trainer calls in a worker of one loader: :func:`open_loader` first, then :func:`load` per batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import default_collate_fn_map

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.fetch.batch_loader import BatchLoader, Loaded, LoaderSpec
from rpcdataloader.fetch.samples import whereabouts
from rpcdataloader.fetch.stream_loader import StreamLoader
from rpcdataloader.host.environment import Environment, have
from rpcdataloader.host.state import Change, built, catch_up
from rpcdataloader.wire.adopted import adopted
from rpcdataloader.wire.exceptions import add_state
from rpcdataloader.wire.shared import Lender
from rpcdataloader.wire.slabs import PageablePool
from rpcdataloader.wire.told import set_values


class _Failed:
    """Stands in for a loader that could not be opened, until the next pass: one exception per batch, or per stream."""

    def __init__(self, dataset: Any, spec: LoaderSpec, error: BaseException) -> None:
        self._dataset = dataset
        self._spec = spec
        self._error = error
        self._traceback = error.__traceback__
        self._ended = spec.stream is not None and spec.stream.ended

    def load(self, *_args: Any) -> Loaded:
        if self._ended:
            return (0.0, 0.0), None, None, None
        self._ended = self._spec.iterable
        if self._ended:
            add_state(self._error, self._spec.ended_stream)
        raise self._error.with_traceback(self._traceback)

    def leave(self) -> None:
        pass

    def start_epoch(self, *args: Any) -> None:
        _open(self._dataset, self._spec.at_epoch(*args))


# Of this process, a worker.
_loader: BatchLoader | _Failed | None = None
_lender: Lender | None = None


def share_batches(lender: Lender) -> None:
    """Collate batches into memory that the trainer sees."""
    global _lender
    _lender = lender


class PassState:
    """What the script had set when a pass began. A process that reads a message with it has it from there on.

    It comes first: a dataset that each worker builds is built while the message is read.
    """

    def __init__(self, environment: Environment, patches: Set[str]) -> None:
        self._parts = environment, patches

    def __reduce__(self) -> tuple[Any, ...]:
        return have_state, self._parts


def have_state(environment: Environment, patches: Set[str]) -> None:
    """Let this worker have the state of its pass, if its session has had that of another one by then.

    Args:
        patches: Names of what the script had changed in modules; with their values, which come before.
    """
    have(environment)
    adopted.hold(patches)


def open_loader(
    _state: PassState | None,
    dataset: Any,
    key: int,
    changes: Sequence[Change],
    told: Mapping[int, torch.Tensor],
    spec: LoaderSpec,
    functions: Mapping[str, Any],
) -> tuple[float, Any]:
    """Make this process a worker of a loader, after changes to the dataset ``key`` that are new to it.

    ``told`` are values of small shared tensors that the script has set.

    Returns the seconds that it took, nearly all of them in ``worker_init_fn``, without those in which a stream goes on;
    and what this process has built, if it has built the dataset. ``functions`` are those of the loader's ``spec``, and
    what the script has registered with torch's default collate.

    Its exceptions are raised by :func:`load`, so that a loop that goes on comes to its end.
    """
    catch_up(dataset, key, changes)
    if told:
        set_values(told)
    of_spec = dict(functions)
    default_collate_fn_map.update(of_spec.pop("registered", {}))
    return _open(dataset, replace(spec, **of_spec)), built.get(key)


def _open(dataset: Any, spec: LoaderSpec) -> float:
    global _loader
    kind = StreamLoader if spec.iterable else BatchLoader
    _loader, began, seconds = None, time.perf_counter(), 0.0
    try:
        if spec.thread is not None:
            spec.thread.apply(spec.thread.current().values)
        loader = kind(dataset, spec, _lender or PageablePool())
        seconds = time.perf_counter() - began
        loader.go_on()
        _loader = loader
    except BaseException as error:  # SystemExit, too: an error of this call may lose the race against those of load
        _loader = _Failed(dataset, spec, error)
    return seconds


def close_loader() -> None:
    """Close the open loader with its stream, and refer to its dataset no more: the process ends."""
    global _loader
    loader, _loader = _loader, None
    torch_worker._worker_info = None
    if isinstance(loader, StreamLoader):
        loader.close()


def load(*args: Any) -> Loaded:
    """Load one batch of the open loader; see :meth:`BatchLoader.load`."""
    if _loader is None:
        raise LocalProtocolError("no loader is open in this worker")
    return _loader.load(*args)


def start_epoch(
    dataset: Any, key: int, changes: Sequence[Change], told: Mapping[int, torch.Tensor], *args: Any
) -> None:
    """Begin another pass over the open loader, after changes to its dataset; see :meth:`BatchLoader.start_epoch`."""
    whereabouts.batch[0] = 0  # numbers restart
    if _loader is None:
        raise LocalProtocolError("no loader is open in this worker")
    _loader.leave()
    catch_up(dataset, key, changes)
    if told:
        set_values(told)
    _loader.start_epoch(*args)
