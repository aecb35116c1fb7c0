"""The beginning of a pass over a sampler: anew, or in the middle of a saved one."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcdataloader.fetch.batch_loader import LoaderSpec, StreamState
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.host.signals import is_interrupt
from rpcdataloader.loader.replay import Replay
from rpcdataloader.loader.sampler import draw_base_seed
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import (
    ended_streams,
    has_as_many_ranks,
    is_at_end,
    place_of,
    progress_of,
)
from rpcdataloader.loader.tasks import Progress, ResumedSource, TaskSource, skip
from rpcdataloader.loader.ways import end_pass, way_of

# Samples, or batches, of all ranks in an epoch are fewer than two to this power.
_LEG_BITS = 40


@dataclass(slots=True)
class Pass:
    """A begun pass. Its samples are ``first + rank``, then every ``world_size``-th, in the order of all ranks."""

    source: TaskSource
    progress: Progress
    first: int  # position at which all ranks together begin; above 0 where a sampler resumes in the middle
    ranks: tuple[int, int]  # rank and world size
    resumed: tuple[StreamState, ...]  # saved states from which streams continue


def undone_afterwards(saved: Mapping[str, Any] | None) -> contextlib.AbstractContextManager[None]:
    """Restore global generators after :func:`begin_pass` and the first tasks of a resumed pass.

    Resuming draws from the global generators as they were when the saved pass began. They are the trainer's, which
    needs its present state.
    """
    return contextlib.nullcontext() if saved is None or saved["finished"] else generators_restored()


def begin_pass(
    settings: PassSettings,
    saved: Mapping[str, Any] | None = None,
    num_streams: int = 1,
    *,
    before: tuple[int, int] | None = None,
    streams_before: Sequence[StreamState] = (),
    makes_requests: bool = False,
    num_left_out: int = 0,
) -> Pass:
    """Begin a pass: iterate over the sampler and draw the base seed, in torch's order.

    Args:
        saved: Pass to resume, from :func:`to_state`; a finished pass is the one before, with persistent workers.
        num_streams: Number of streams of an iterable-style dataset, unless those of ``saved`` go on.
        before: Base seed and epoch of the pass before; persistent workers keep their base seed, as torch's do.
        streams_before: Streams at the end of the pass before, unless that is ``saved``.
        makes_requests: True if the tasks go to workers.
        num_left_out: Number of batches that a new pass draws and leaves out.

    Raises:
        ValueError: The state does not fit this loader; or the sampler has fewer batches than are left out.
    """
    if saved is not None and saved["finished"]:  # to which loading it has brought the sampler
        before, streams_before, saved = (saved["base_seed"], saved["epoch"]), ended_streams(saved), None
    way = way_of(settings)
    start = way.start(saved)
    first, *ranks = way.origin
    knows_first = saved is not None and way.knows_first(saved)
    nothing_left = saved is not None and is_at_end(saved, start, knows_first=knows_first)
    samples = way.begin() if saved is None else iter(()) if nothing_left else way.go_on(saved)
    if before is None and saved is None:
        before = draw_base_seed(settings.generator), -1
    get_state, is_ready = way.capture(samples), getattr(samples, "is_ready", None)
    if saved is None:
        assert before is not None
        streams = [StreamState()] * num_streams if settings.iterable else []
        known = list(streams_before) if len(streams_before) == len(streams) else []
        progress = Progress(before[0], before[1] + 1, start=start, streams=streams, before=known)
        if num_left_out and not settings.iterable:
            num_samples, digest = skip(samples, num_left_out, auto_collation=settings.auto_collation)
            progress.num_batches, progress.num_samples, progress.digest = num_left_out, num_samples, digest
        # Other samplers may only know of the pass before until they have given a batch.
        if get_state is not None and is_ready is not None:
            progress.sampler = get_state()
    else:
        progress = progress_of(saved, start)
        if not knows_first:
            progress.first = None
        if place_of(saved) == "middle" and not has_as_many_ranks(saved, start):
            progress.leg += 1
        if nothing_left:
            end_pass(settings, saved)
            progress.end = saved["end"]
            if progress.first is not None:
                get_state = functools.partial(operator.itemgetter(1), progress.first)
        else:
            way.skip(samples, saved, progress)
    source = (TaskSource if saved is None else ResumedSource)(
        samples,
        auto_collation=settings.auto_collation,
        progress=progress,
        number=progress.num_batches,
        position=progress.num_samples,
        leave_out={number: digest for number, (_num_samples, digest, _state) in progress.ahead.items()},
        get_state=get_state,
        makes_requests=makes_requests,
        num_expected=_length_of(settings.sampler) if settings.may_split or not makes_requests else None,
        is_ready=is_ready,
        watch=None if nothing_left else way.watch,
        drawn=[] if progress.first is None else [progress.first[0]],
    )
    # Samplers choose their order at the first batch, before which the script may draw. Workers are requested before it.
    if saved is not None or not makes_requests:
        _draw_first(source, settings.iterable, None if nothing_left else saved, way)
    resumed = () if saved is None else tuple(progress.streams)
    return Pass(source, progress, first, (ranks[0], ranks[1]), resumed)


def _draw_first(source: TaskSource, is_iterable: bool, saved: Mapping[str, Any] | None, way: Replay) -> None:
    """Draw the first batch of a new pass, or what was drawn when the state was saved.

    No more: the next batch may come from the global generators, which the script sets to where they were.
    """
    if saved is not None:
        if isinstance(source, ResumedSource):
            way.draw_again(source, saved)
        return
    assert source.progress is not None
    if not is_iterable and source.progress.end is None and source.is_ready is None:
        source.look_ahead()
        source.note_next()


def _length_of(sampler: Any) -> int | None:
    """The number of batches of torch's own samplers; None for others, whose length may take long."""
    try:
        return len(sampler) if type(sampler).__module__.startswith("torch.utils.data.") else None
    except Exception as error:  # of the user's sampler or dataset, which need no length
        if is_interrupt(error):
            raise
        return None


# What workers have from the loader's arguments, by the same names; its functions come apart from these.
_OF_SETTINGS = "auto_collation", "iterable", "drop_last", "skips", "max_retries", "task_timeout"


def loader_spec(
    settings: PassSettings, begun: Pass, worker_id: int, num_workers: int, stream: StreamState | None
) -> LoaderSpec:
    """Describe a pass for its workers; :func:`functions_of` has the rest."""
    progress = begun.progress
    # Random numbers that the former ranks have not had; of samples, unless they belong to the position of all ranks.
    apart = progress.leg << _LEG_BITS
    is_new = stream is not None and not stream.num_samples and not stream.ended
    return LoaderSpec(
        **{name: getattr(settings, name) for name in _OF_SETTINGS},
        base_seed=progress.base_seed,
        epoch=progress.epoch,
        rank=begun.ranks[0],
        world_size=begun.ranks[1],
        worker_id=worker_id,
        num_workers=num_workers,
        first_position=begun.first + (apart if settings.resumable is None else 0),
        first_batch=apart,
        stream=stream,
        resumes=any(stream is saved for saved in begun.resumed),
        before=progress.before[worker_id] if is_new and progress.before else None,
    )


def functions_of(settings: PassSettings) -> dict[str, Any]:
    """The user's functions and classes in a ``LoaderSpec``."""
    return {"collate_fn": settings.collate_fn, "worker_init_fn": settings.worker_init_fn, "retry_on": settings.retry_on}
