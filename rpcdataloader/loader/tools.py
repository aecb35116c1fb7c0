"""Additions to torch's loader: a state for resuming, and tools for its speed.

The state follows torchdata's protocol. The tools show why the loop waits, the way of each batch, and the speed of the
loop without a loader.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from rpcdataloader.client.discovery import Inline, Where
from rpcdataloader.diagnosis.records import Recorder
from rpcdataloader.diagnosis.verdict import Diagnosis, diagnose
from rpcdataloader.diagnosis.words import NO_PASS, NO_WORKERS
from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.loader.iterator import RemoteIterator
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import VERSION, end_pass, state_of_rank, to_state
from rpcdataloader.loader.tasks import Progress
from rpcdataloader.loader.tracing import Trace, begin_trace, trace_of_process

_T_co = TypeVar("_T_co", covariant=True)


def no_iterator() -> None:
    """Stand in for a reference to an iterator that does not exist."""


class _NoStateError(LocalProtocolError, AttributeError):
    """The error of a missing state; an AttributeError for ``hasattr``."""


class LoaderTools(DataLoader[_T_co]):
    """Methods of ``RPCDataloader`` beyond torch's."""

    _current: Callable[[], RemoteIterator | None] = staticmethod(no_iterator)  # the last iterator while in use
    _recorder: Recorder | None = None  # of the last iterator
    _trace: Trace | None = None  # of all passes, while active
    _where: Where | None
    _saved: Mapping[str, Any] | None
    _progress: tuple[PassSettings, Progress] | None

    def diagnosis(self) -> Diagnosis:
        """Return why the training loop waits for its batches, and a remedy.

        It covers the last 60 s, or the last 200 batches if these took longer, of the present pass; or of the last pass,
        until the new one has delivered more than its first window. It takes some milliseconds, in any thread.
        :doc:`waiting` explains each bound. It is ``unclear`` before the first pass, and for a loader without workers
        (``num_workers=0``, ``workers="inline"``).
        """
        if (iterator := self._current()) is not None:
            return iterator.driver.diagnosis()
        if self._recorder is None:
            return Diagnosis(0.0, "unclear", NO_PASS if self._has_workers else NO_WORKERS)
        return diagnose(self._recorder.snapshot())

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write the way of every batch into a file, in the Chrome trace format, for the duration of a block.

        Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` show it, and :doc:`waiting` explains it. Batches
        drawn before the block are left out. The file has at most 50 MB, and so has its predecessor,
        ``trace.before.json``; older data is dropped. The environment variable ``RPCDATALOADER_TRACE`` does the same for
        all loaders of a process. A file that cannot be written is a warning, and the block runs without it.

        Args:
            path: Path of the file, in which ``{rank}`` stands for the rank of this process.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``, ``workers="inline"``).
        """
        if not self._has_workers:
            raise LocalProtocolError(
                "this loader loads in the training process, so the loop waits for each batch: give num_workers=1 or "
                "more for a trace"
            )
        before, trace = self._trace, begin_trace(path)
        self._follow_trace(trace or before)
        try:
            yield
        finally:
            self._follow_trace(before)
            if trace is not None:
                trace.close()

    def _follow_trace(self, trace: Trace | None) -> None:
        self._trace = trace
        if self._recorder is not None:
            self._recorder.follow(trace or trace_of_process())

    @property
    def _has_workers(self) -> bool:
        return self._where is not None and not isinstance(self._where, Inline)

    def replay(self, num_batches: int = 20) -> Iterator[_T_co]:
        """Take a few batches, then repeat them without end, to measure the training loop without a loader.

        The batches are taken here, in a pass of their own that :meth:`state_dict` and :meth:`diagnosis` do not count.
        It has workers of its own, so a pass under way goes on, also with ``persistent_workers``. The batches stay in
        memory, with ``device`` on the device. A loop that changes a batch in place gets the changed batch again: clone
        what it changes.

        Args:
            num_batches: Number of batches to take; all of a loader that has fewer.

        Raises:
            ValueError: ``num_batches`` is less than 1, or the loader has no batches.
            Exception: An exception of the loader in place of one of these batches.
        """
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, not {num_batches}")
        # A copy has no pass, state or trace of its own yet.
        collecting = iter(copy.copy(self))
        if isinstance(collecting, RemoteIterator):
            collecting.driver.is_told = True  # its waits say nothing about the loop
        batches = list(itertools.islice(collecting, num_batches))
        if not batches:
            raise ValueError("there is nothing to replay: the loader has no batches")
        return itertools.cycle(batches)

    def _new_recorder(self) -> Recorder:
        """Return the recorder of the next pass."""
        before = None if self._recorder is None else self._recorder.snapshot()
        return Recorder(threading.Lock(), time.monotonic(), before, self._trace or trace_of_process())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this loader's last iterator for :meth:`load_state_dict`, as torchdata's loaders do.

        It counts delivered batches, without prefetched ones, and takes some 25 KB as JSON: mostly the states of the
        global generators at the beginning of the epoch, from which samplers draw. It includes the states of samplers
        and iterable-style datasets that have a ``state_dict()`` of their own.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``).
        """
        self._check_can_resume()
        if self._progress is None:
            return dict(self._saved or {"version": VERSION})
        return to_state(*self._progress)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Let the next iterator resume from the saved place: the remaining batches, bit for bit.

        Map-style datasets may have another number of workers; iterable-style ones get the same number as before. With
        the states of all ranks, another number of ranks can resume, each with its share of the streams. Delivered
        samples are not loaded again, and the global generators of this process stay as they are. A state from the end
        of an epoch lets the next one begin.

        Args:
            state_dict: Result of :meth:`state_dict` on this rank; or a list of the results on all ranks, as from
                :func:`~rpcdataloader.integrations.gather_states`.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``).
            TypeError: ``state_dict`` is neither a mapping nor a list of mappings.
            ValueError: It belongs to another kind of loader, or the states of all ranks do not fit together. When
                iterating: or the sampler is too short for it.
        """
        self._check_can_resume()
        settings = PassSettings.of(self)
        state = state_of_rank(settings, state_dict)
        if state.get("finished"):
            end_pass(settings, state)
        self._saved = copy.deepcopy(state)
        self._progress = None

    def _check_can_resume(self) -> None:
        if self._where is None:
            raise _NoStateError(
                "this loader has no workers, so it is torch's own, which cannot resume: give num_workers=1 or more, or "
                "workers='inline' to load in this process"
            )
