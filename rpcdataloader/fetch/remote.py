"""Functions that a trainer calls in a worker of one loader: :func:`open_loader` first, then :func:`load` per batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.fetch.batch_loader import BatchLoader, BatchMetrics, LoaderSpec
from rpcdataloader.fetch.stream_loader import StreamLoader
from rpcdataloader.fetch.whereabouts import here
from rpcdataloader.wire.slabs import PageablePool


class _FailedLoader:
    """Fails for every batch after a failed beginning, as with torch, so that a loop that goes on comes to its end."""

    def __init__(self, dataset: Any, spec: LoaderSpec, error: BaseException) -> None:
        self._dataset = dataset
        self._spec = spec
        self._error, self._traceback = error, error.__traceback__

    def load(self, *_args: Any) -> tuple[BatchMetrics, Any]:
        raise self._error.with_traceback(self._traceback)

    def start_epoch(self, epoch: int, first_place: int, pipe_seed: int | None = None) -> None:
        """Try again."""
        spec = replace(self._spec, epoch=epoch, first_place=first_place, pipe_seed=pipe_seed, stream=None)
        open_loader(self._dataset, spec)


_loader: BatchLoader | _FailedLoader | None = None  # of this process, a worker


def open_loader(dataset: Any, spec: LoaderSpec) -> None:
    """Make this process a worker of a loader. Exceptions of ``worker_init_fn`` are raised by :func:`load`."""
    global _loader
    kind = StreamLoader if spec.iterable else BatchLoader
    try:
        _loader = kind(dataset, spec, PageablePool(), sends=True)
    except BaseException as error:  # SystemExit, too: an error of this call may lose the race against those of load
        _loader = _FailedLoader(dataset, spec, error)


def load(
    indices: Any, position: int, batch_number: int, last_try: bool = False, left_out: Mapping[int, str] | None = None
) -> tuple[BatchMetrics, Any]:
    """Load one batch of the open loader; see :meth:`BatchLoader.load`."""
    return _get_loader().load(indices, position, batch_number, last_try, left_out)


def start_epoch(epoch: int, first_place: int, pipe_seed: int | None = None) -> None:
    """Begin another pass over the open loader; see :class:`LoaderSpec`."""
    here.batch[0] = 0  # numbers restart
    _get_loader().start_epoch(epoch, first_place, pipe_seed)


def _get_loader() -> BatchLoader | _FailedLoader:
    if _loader is None:
        raise LocalProtocolError("no loader is open in this worker")
    return _loader
