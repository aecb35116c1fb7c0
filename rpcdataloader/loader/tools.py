"""What a loader has beside torch's methods: its state, to be saved and gone on from, and what it tells of its speed.

The state is that of torchdata's protocol. Of its speed, it tells why the loop waits for it, the way of each batch, and
how fast the loop is without it.
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
from rpcdataloader.diagnosis.recorder import Recorder
from rpcdataloader.diagnosis.verdict import Diagnosis, diagnose
from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.loader.iterator import RemoteIterator
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import VERSION, end_pass, state_of_rank, to_state
from rpcdataloader.loader.tasks import Progress
from rpcdataloader.loader.tracing import Trace, trace_of_process

_T_co = TypeVar("_T_co", covariant=True)


def no_iterator() -> None:
    """In place of a reference to an iterator that there is not."""


class _NoStateError(LocalProtocolError, AttributeError):
    """Also what ``hasattr`` expects."""


class LoaderTools(DataLoader[_T_co]):
    """What ``RPCDataloader`` has beside torch's methods."""

    _current: Callable[[], RemoteIterator | None] = staticmethod(no_iterator)  # the last iterator, while it is in use
    _recorder: Recorder | None = None  # of the last iterator
    _trace: Trace | None = None  # of all passes, while it is written
    _where: Where | None
    _saved: Mapping[str, Any] | None
    _progress: tuple[PassSettings, Progress] | None

    def diagnosis(self) -> Diagnosis:
        """Why the training loop waits for its batches, and what to do about it.

        It is about the last 60 s, or the last 200 batches if these took longer, of the pass under way; or of the last
        pass, until the new one has delivered more than its first window. Takes some milliseconds, in any thread.
        :doc:`waiting` tells what each bound means.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``, ``workers="inline"``), or no pass has
                begun.
        """
        self._check_has_workers("a diagnosis")
        if (iterator := self._current()) is not None:
            return iterator.diagnosis()
        if self._recorder is None:
            raise LocalProtocolError("there is nothing to diagnose before the first pass: iterate over the loader")
        return diagnose(self._recorder.snapshot())

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write the way of every batch into a file, in the Chrome trace format, while the block runs.

        Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` show it, and :doc:`waiting` tells what is in it.
        Batches that were drawn before are left out. The file has at most 50 MB, and so has the one before it,
        ``trace.before.json``; what is older goes. The environment variable ``RPCDATALOADER_TRACE`` does the same for
        all loaders of a process.

        Args:
            path: Of the file, in which ``{rank}`` stands for the rank of this process.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``, ``workers="inline"``).
            OSError: The file cannot be written.
            ValueError: There are several ranks, and ``path`` is the same for all.
        """
        self._check_has_workers("a trace")
        trace = self._trace = Trace(path)
        if self._recorder is not None:
            self._recorder.follow(trace)
        try:
            yield
        finally:
            self._trace = None
            if self._recorder is not None:
                self._recorder.follow(trace_of_process())
            trace.close()

    def _check_has_workers(self, purpose: str) -> None:
        if self._where is None or isinstance(self._where, Inline):
            raise LocalProtocolError(
                "this loader loads in the training process, so the loop waits for all of the loading: give "
                f"num_workers=1 or more for {purpose}"
            )

    def replay(self, num_batches: int = 20) -> Iterator[_T_co]:
        """Take a few batches, then repeat them without end: how fast is the training loop without a loader?

        The batches are taken here, in a pass of their own that :meth:`state_dict` does not count. They stay in memory,
        with ``device`` on the device. A loop that changes a batch in place meets its own changes when the batch comes
        again; to give it a copy, clone what is changed.

        Args:
            num_batches: Batches to take; all of them if the loader has fewer.

        Raises:
            ValueError: ``num_batches`` is less than 1, or the loader has no batch at all.
            Exception: What the loader raised in place of one of these batches.
        """
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, not {num_batches}")
        before = self._saved, self._progress
        try:
            batches = list(itertools.islice(self, num_batches))
        finally:
            self._saved, self._progress = before
        if not batches:
            raise ValueError("there is nothing to replay: the loader has no batches")
        return itertools.cycle(batches)

    def _new_recorder(self) -> Recorder:
        """What takes notes of the next pass."""
        before = None if self._recorder is None else self._recorder.snapshot()
        return Recorder(threading.Lock(), time.monotonic(), before, self._trace or trace_of_process())

    def state_dict(self) -> dict[str, Any]:
        """Where the last iterator of this loader is, for :meth:`load_state_dict`; that of torchdata's loaders.

        It counts what was delivered, not what is being prefetched, and takes some 25 KB as JSON, mostly the states of
        the global generators when the epoch began, from which samplers draw. The states of samplers and of
        iterable-style datasets that have a ``state_dict()`` of their own are part of it.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``).
        """
        self._check_can_resume()
        if self._progress is None:
            return dict(self._saved or {"version": VERSION})
        return to_state(*self._progress)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Let the next iterator go on where the saved one was: the remaining batches, bit for bit.

        The number of workers may be another one for map-style datasets; iterable-style ones get as many as before. With
        the states of all ranks, they go on with another number of ranks, each with its share of the streams. What was
        delivered is not loaded again, and the global generators of this process stay as they are. A state of the end of
        an epoch lets the next one begin.

        Args:
            state_dict: What :meth:`state_dict` has returned here; or a list of what it has returned on all ranks, as
                :func:`~rpcdataloader.integrations.gather_states` makes it.

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
