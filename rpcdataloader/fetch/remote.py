"""Functions that a trainer calls in a worker of one loader: :func:`open_loader` first, then :func:`load` per batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.fetch.batch_loader import BatchLoader, BatchMetrics, LoaderSpec
from rpcdataloader.fetch.samples import here
from rpcdataloader.fetch.stream_loader import StreamLoader
from rpcdataloader.wire.slabs import PageablePool


class _Failure(NamedTuple):
    """A loader that could not be opened."""

    dataset: Any
    spec: LoaderSpec
    error: BaseException
    traceback: TracebackType | None


# Of this process, a worker; the second if the first is None.
_loader: BatchLoader | None = None
_failure: _Failure | None = None


def open_loader(dataset: Any, spec: LoaderSpec) -> None:
    """Make this process a worker of a loader.

    Exceptions of ``worker_init_fn`` are raised by :func:`load`, for every batch, so that a loop that goes on comes to
    its end, as with torch.
    """
    global _loader, _failure
    kind = StreamLoader if spec.iterable else BatchLoader
    _loader = _failure = None
    try:
        _loader = kind(dataset, spec, PageablePool(), sends=True)
    except BaseException as error:  # SystemExit, too: an error of this call may lose the race against those of load
        _failure = _Failure(dataset, spec, error, error.__traceback__)


def load(
    indices: Any, position: int, batch_number: int, last_try: bool = False, left_out: Mapping[int, str] | None = None
) -> tuple[BatchMetrics, Any]:
    """Load one batch of the open loader; see :meth:`BatchLoader.load`."""
    if _loader is None:
        failure = _get_failure()
        raise failure.error.with_traceback(failure.traceback)
    return _loader.load(indices, position, batch_number, last_try, left_out)


def start_epoch(epoch: int, first_place: int, pipe_seed: int | None = None) -> None:
    """Begin another pass over the open loader; see :class:`LoaderSpec`."""
    here.batch[0] = 0  # numbers restart
    if _loader is None:
        failure = _get_failure()
        open_loader(failure.dataset, failure.spec.at_epoch(epoch, first_place, pipe_seed))
    else:
        _loader.start_epoch(epoch, first_place, pipe_seed)


def _get_failure() -> _Failure:
    if _failure is None:
        raise LocalProtocolError("no loader is open in this worker")
    return _failure
