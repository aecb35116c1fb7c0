"""Additions to torch's loader: a state for resuming, and tools for its speed.

The state follows torchdata's protocol. The tools show why the loop waits, the way of each batch, and the speed of the
loop without a loader.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader

from rpcdataloader.client.discovery import Inline, Where
from rpcdataloader.client.sharing import Partition, current_partition
from rpcdataloader.diagnosis.records import Probe, Recorder, Setup
from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.host.locks import Lock, inherited
from rpcdataloader.loader.iterator import RemoteIterator
from rpcdataloader.loader.sampler import Source
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import has_begun, restore_generators, state_of_rank, to_first_state, to_state
from rpcdataloader.loader.tasks import Progress
from rpcdataloader.loader.waits import diagnose, tell
from rpcdataloader.loader.ways import end_pass

if TYPE_CHECKING:
    from rpcdataloader.diagnosis.verdict import Diagnosis

logger = logging.getLogger("rpcdataloader.loader")

_T_co = TypeVar("_T_co", covariant=True)


class LoaderTools(DataLoader[_T_co]):
    """Methods of ``RPCDataloader`` beyond torch's."""

    _last: weakref.ref[RemoteIterator] | None = None  # iterator
    _recorder: Recorder | None = None  # of the last iterator
    _trace: Callable[[Probe, Setup], None] | None = None  # while a block is active
    _where: Where | None
    _kept_source: Source | None = None  # of a loader with a transform
    _saved: Mapping[str, Any] | None = None  # for the next iterator
    _progress: tuple[PassSettings, Progress] | None = None  # of the last iterator

    def diagnosis(self) -> Diagnosis:
        """Return why the training loop waits for its batches, and a remedy.

        It covers the last 60 s, or the last 200 batches if these took longer, of the present pass; or of the last pass,
        until the new one has delivered more than its first window. It takes some milliseconds, in any thread.
        :doc:`waiting` explains each bound. It is ``unclear`` before the first batch.
        """
        if self._last is not None and (iterator := self._last()) is not None:
            return iterator.driver.diagnosis()
        records = None if self._recorder is None else self._recorder.snapshot()
        if records is None or not (self._has_workers or records.totals.batches):
            from rpcdataloader.diagnosis.verdict import Diagnosis
            from rpcdataloader.diagnosis.words import NO_PASS

            return Diagnosis(0.0, "unclear", NO_PASS, short="no batch yet")
        return diagnose(records)

    def _make_recorder(self) -> Recorder:
        """A recorder for a new pass, with the records of the last one."""
        before = self._recorder.snapshot() if self._recorder is not None and self._recorder.batches else None
        return Recorder(inherited(Lock()), time.monotonic(), before, self._trace)

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write the way of every batch into a file, in the Chrome trace format, at the end of a block.

        Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` show it, and :doc:`waiting` explains it. Batches
        drawn before the block are left out. A file that cannot be written is a warning, and the block runs without it.

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
        from rpcdataloader.diagnosis.trace import Trace

        partition, trace, before = current_partition(), Trace(time.monotonic()), self._trace
        file = None
        try:
            file = _of_rank(os.fspath(path), partition).open("w")
        except (OSError, ValueError) as error:
            logger.warning("cannot write the trace %s, and the training goes on without it: %s", path, error)
        if file is None:  # not in the handler: this error would be the context of those of the block
            yield
            return
        around = self._recorder  # of a pass that goes on after the block, also if another one is the last by then
        self._follow_trace(trace.add, around)
        try:
            yield
        finally:
            self._follow_trace(before, around)
            self._follow_trace(before, self._recorder)
            events = map(json.dumps, trace.events(f"{partition.label}trainer (pid {os.getpid()})"))
            try:
                with file:
                    file.write(f"[\n{next(events)}")
                    file.writelines(f",\n{event}" for event in events)
                    file.write("\n]\n")
            except OSError as error:
                logger.warning("the trace %s is not complete: %s", path, error)

    def _follow_trace(self, trace: Callable[[Probe, Setup], None] | None, recorder: Recorder | None) -> None:
        self._trace = trace
        if recorder is not None:
            recorder.trace, recorder.next_probe = trace, 0.0

    @property
    def _has_workers(self) -> bool:
        return self._where is not None and not isinstance(self._where, Inline)

    def replay(self, num_batches: int = 20) -> Iterator[_T_co]:
        """Take a few batches, then repeat them without end, to measure the training loop without a loader.

        The batches are taken here, in a pass of their own that :meth:`state_dict` and :meth:`diagnosis` do not count.
        It has workers of its own, so a pass under way goes on, also with ``persistent_workers``. It draws from copies
        of generators and samplers, so later epochs keep their order; a sampler that :mod:`copy` cannot copy goes on.
        The batches stay in memory, with ``device`` on the device. A loop that changes a batch in place gets the changed
        batch again: clone what it changes.

        Args:
            num_batches: Number of batches to take; all of a loader that has fewer.

        Raises:
            ValueError: ``num_batches`` is less than 1, or the loader has no batches.
            Exception: An exception of the loader in place of one of these batches.
        """
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, not {num_batches}")
        # A copy has no pass, state or trace of its own yet.
        loader = copy.copy(self)
        loader.__dict__.update(_copies_of_samplers(self))  # torch forbids to set samplers
        with generators_restored():
            batches = list(itertools.islice(loader._begin_quietly(), num_batches))
        if not batches:
            raise ValueError("there is nothing to replay: the loader has no batches")
        return itertools.cycle(batches)

    def _begin_quietly(self) -> Iterator[_T_co]:
        """Begin a pass whose waits say nothing about the loop."""
        batches = iter(self)
        if self._recorder is not None:
            self._recorder.is_told = True
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this loader's last iterator for :meth:`load_state_dict`, as torchdata's loaders do.

        It counts delivered batches, without prefetched ones, and takes some 25 KB as JSON: mostly the states of the
        global generators at the beginning of the epoch, from which samplers draw. It includes the states of samplers
        and iterable-style datasets that have a ``state_dict()`` of their own.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``).
        """
        self._check_can_resume()
        return self._captured_state()()

    def _captured_state(self) -> Callable[[], dict[str, Any]]:
        """Return a function that gives the present state."""
        if self._saved is not None or self._progress is None:
            state = dict(self._saved or to_first_state(PassSettings.of(self)))
            return lambda: state
        settings, progress = self._progress
        now = progress.copy()
        return lambda: to_state(settings, now.settle())

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Let the next iterator resume from the saved position: the remaining batches, bit for bit.

        Map-style datasets may have another number of workers; iterable-style ones get the same number as before.
        Delivered samples are not loaded again, and the global generators of this process stay as they are. A state from
        the end of an epoch lets the next one begin. An iterator from before raises a
        :class:`~rpcdataloader.errors.LocalProtocolError` until the next one has begun.

        Args:
            state_dict: Result of :meth:`state_dict` on this rank; or a list of the results on all ranks, as from
                :func:`~rpcdataloader.integrations.gather_states`, of which this rank takes its own.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``).
            TypeError: ``state_dict`` is neither a mapping nor a list of mappings.
            ValueError: It belongs to another kind of loader, is a part of a state, or the list is empty. When
                iterating: or the sampler is too short for it.
        """
        self._check_can_resume()
        settings = PassSettings.of(self)
        state = state_of_rank(settings, state_dict)
        if state.get("finished"):
            end_pass(settings, state)
        elif not has_begun(state):
            restore_generators(settings, state)
            self._kept_source = None  # whose workers would keep their seed
        self._saved = copy.deepcopy(state)
        if self._progress is not None:
            self._progress[1].is_replaced = True

    def _check_can_resume(self) -> None:
        if self._where is None:
            raise LocalProtocolError(
                "this loader has no workers, so it is torch's own, which cannot resume: give num_workers=1 or more, or "
                "workers='inline' to load in this process"
            )


_is_out_of_graphs = False


def keep_out_of_graphs() -> None:
    """Make Dynamo leave this package alone, as it does with torch's loader, if it is there.

    In a compiled function that loops over a loader, it would trace whatever the loop runs through.
    """
    global _is_out_of_graphs
    if not _is_out_of_graphs and (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.add("rpcdataloader")
        _is_out_of_graphs = True


class TimedBatches(Iterator[_T_co]):
    """torch's iterator without workers, with a record of its waits for the diagnosis; otherwise like it."""

    def __init__(
        self,
        batches: Iterator[_T_co],
        send: Callable[[_T_co], _T_co] | None,  # to a device
        name: str,
        partition: Partition,
        recorder: Recorder,
    ) -> None:
        self.batches = batches
        self._send = send
        self._name = name
        self._partition = partition
        self._recorder = recorder

    def __next__(self) -> _T_co:
        recorder, began = self._recorder, time.monotonic()
        try:
            batch = next(self.batches)
        except StopIteration:
            if recorder.batches:
                tell(recorder, lambda: diagnose(recorder.records()), self._name, self._partition)
            raise
        batch = batch if self._send is None else self._send(batch)
        recorder.took(time.monotonic(), began)
        return batch

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # of a copy that is not complete
            raise AttributeError(name)
        return getattr(self.batches, name)


def _copies_of_samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return copies of the samplers of a loader and their generators, without copies of what they draw from."""
    samplers = {name: getattr(loader, name) for name in ("batch_sampler", "sampler", "generator")}
    kept = [loader.dataset]
    for sampler in samplers.values():
        kept += [getattr(sampler, name) for name in ("data_source", "indices", "weights") if hasattr(sampler, name)]
    try:
        return copy.deepcopy(samplers, {id(value): value for value in kept})
    except Exception as error:
        logger.debug("replay() draws from the sampler itself, which cannot be copied: %r", error)
        return samplers


def _of_rank(path: str, partition: Partition) -> Path:
    if partition.world_size > 1 and "{rank}" not in path:
        raise ValueError(
            f"all {partition.world_size} ranks would write the trace {path}: put {{rank}} into its name, as in "
            f"{Path(path).stem}-{{rank}}{Path(path).suffix}"
        )
    return Path(path.replace("{rank}", str(partition.rank)))
