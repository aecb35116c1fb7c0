"""How the rest of a saved pass is found again: in one of six ways, which the loader's sampler decides.

| way | what a state has | the rest |
| --- | --- | --- |
| Replay | numbers of batches and samples, and a digest | what the sampler gives anew, after the same of these |
| Stateful | the state of the sampler, of its iterator, or of both | what these give from there |
| Inside | as Replay, states of the samplers inside from before the pass, and its first batch | as Replay, from these |
| Sourced | the state of the pass over the stream of a ``transform`` | that of this pass |
| Position | the position of all ranks together in their order | what follows there, for any ranks |
| Streams | the states of streams, which are the workers' | each worker's |

A pass was saved at its beginning, in its middle, or at its end. In the middle, its sampler begins at the same order
again; at its end, the sampler is brought to the beginning of the next one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch.utils.data import BatchSampler

from rpcdataloader.fetch.loaded import LoadedState, loaded_state, note_loaded, tell_not_implemented
from rpcdataloader.fetch.samples import is_batch, stopped
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.host.signals import is_interrupt, suppress_errors
from rpcdataloader.host.state import get_states, set_states
from rpcdataloader.loader.order import check_order
from rpcdataloader.loader.plain import StateCopier, from_plain, to_plain
from rpcdataloader.loader.sampler import Source, draw_base_seed, is_stateful
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import (
    UNKNOWN,
    VERSION,
    capture_order,
    capture_start,
    is_early,
    place_of,
    restore_epochs,
    restore_generators,
    restore_start,
    with_earlier,
)
from rpcdataloader.loader.tasks import OTHER_NEXT, OTHER_ORDER, Progress, ResumedSource, skip
from rpcdataloader.wire.digests import digest

logger = logging.getLogger("rpcdataloader.loader")


class Replay:
    """The sampler is started again, and what was delivered is skipped, without loading samples."""

    # Whether a resumed pass draws the batches again that were drawn when its state was saved.
    _gives_same_batches = True

    def __init__(self, settings: PassSettings) -> None:
        self.settings = settings

    @property
    def origin(self) -> tuple[int, int, int]:
        """Position at which all ranks together begin, rank, and number of ranks."""
        partition = self.settings.partition
        return 0, partition.rank, partition.world_size

    def start(self, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """The state at the beginning of the pass, to which a saved one brings generators and samplers."""
        return capture_start(self.settings) if saved is None else restore_start(self.settings, saved)

    def begin(self) -> Iterator[Any]:
        """Iterate over the sampler."""
        return iter(self.settings.sampler)

    def knows_first(self, saved: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether to deliver the first batch from a state, and to go on with the sampler's state after it."""
        return False

    def go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Iterate over the sampler in a saved pass, and draw the base seed, in the order of a new pass."""
        samples = self.begin()
        if saved["epoch"] == 0:
            draw_base_seed(self.settings.generator)  # only for its effect on the generator
        return samples

    def skip(self, samples: Iterator[Any], saved: Mapping[str, Any], progress: Progress) -> None:
        """Skip what was delivered.

        Raises:
            ValueError: The sampler is too short, or gives other samples.
        """
        num_batches = progress.num_batches
        num_samples, found = skip(samples, num_batches, auto_collation=self.settings.auto_collation)
        if num_samples != progress.num_samples:
            raise ValueError(
                f"the saved pass had delivered {progress.num_samples} samples in {num_batches} batches, but the "
                f"sampler gives {num_samples} in as many now: have dataset, batch size or sampler changed?"
            )
        if _is_own(saved, progress) and progress.digest not in (None, found):
            raise ValueError(OTHER_ORDER)
        if progress.digest is not None:
            progress.digest = found

    def draw_again(self, source: ResumedSource, saved: Mapping[str, Any]) -> None:
        """Bring sampler and generators to where they were when the state was saved.

        Batches that were drawn, and not delivered, are drawn again. Only then the generators are set: they have drawn
        these, too, and whatever the script has drawn from them since the pass began.

        Raises:
            ValueError: Other batches follow.
        """
        is_middle = place_of(saved) == "middle"
        if not (is_middle or self._is_same_order(saved)):
            return
        if self._gives_same_batches:
            num_asked, expected = saved["drawn"]
            source.draw_again(num_asked)
            progress = source.progress
            assert progress is not None
            is_compared = is_middle and "digest" in saved and _is_own(saved, progress)
            if is_compared and None not in (expected, found := progress.drawn()[1]) and found != expected:
                raise ValueError(OTHER_NEXT)
        if saved["version"] == VERSION:  # earlier ones do not tell all that was drawn
            restore_generators(self.settings, saved)

    def _is_same_order(self, saved: Mapping[str, Any]) -> bool:
        here = capture_order(self.settings)
        try:
            check_order(saved["start"], here)
        except ValueError:
            return False
        return bool(saved["start"]["ranks"] == here["ranks"])

    def end(self, saved: Mapping[str, Any]) -> None:
        """Bring the sampler to its state after a saved pass of which nothing is left."""

    def capture(self, samples: Iterator[Any]) -> Callable[[], dict[str, Any] | None] | None:  # noqa: ARG002
        """Return a function that gives the sampler's state after the batch that it has just given; None without one.

        It gives None if it turns out that there is none.
        """
        return None

    def watch(self) -> Callable[[list[Any]], tuple[Iterator[Any], Callable[[], Any] | None] | None] | None:
        """Prepare for the first batch of a pass: see :class:`~rpcdataloader.loader.tasks.TaskSource`."""
        return None


class Stateful(Replay):
    """A sampler whose iterator may have a state, or that has one itself; otherwise, what was delivered is skipped.

    At the end of a pass, a state is that from before its last batch, with which the rest of the pass is drawn again, to
    its end: some samplers have counted an epoch by then, but not yet left its place.
    """

    # The last state that was asked for in this pass; within its first batch, that after the first sample.
    _last: dict[str, Any] | None = None

    _to_load: Mapping[str, Any] = MappingProxyType({})  # what the iterator has to load when it has begun

    def __init__(self, settings: PassSettings) -> None:
        super().__init__(settings)
        self._sampler = next(filter(is_stateful, settings.samplers), None)
        self._owners = {} if self._sampler is None else {"sampler": self._sampler}  # of the states to save

    def knows_first(self, saved: Mapping[str, Any]) -> bool:
        # For other ranks or batch sizes, the pass begins anew.
        if saved["first"] is None or ("sampler" in saved["sampler"] and self._sampler is None):
            return False
        return self._is_same_order(saved)

    def go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        # The end of an epoch may be that of another sampler, and so may its beginning.
        is_own = place_of(saved) == "middle" or self.knows_first(saved)
        return self._begin_from(saved, (is_own and saved["sampler"]) or {})

    def _begin_from(self, saved: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[Any]:
        self._load(state)
        samples = super().go_on(saved)
        self._to_load = state
        self._last = {name: from_plain(state[name]) for name in ("sampler", "iterator") if name in state} or None
        if self._sampler is None or not self._is_hidden:
            self._load_iterator(samples)
        return samples

    def _load_iterator(self, samples: Any) -> None:
        """Load what was saved of the iterator: as it begins, and once the base seed is drawn, as it may draw, too."""
        state, self._to_load = self._to_load, {}
        if "iterator" in state:
            if not is_stateful(samples):
                raise ValueError("the state is of a sampler whose iterator has load_state_dict, but here it has none")
            samples.load_state_dict(from_plain(state["iterator"]))

    def _load(self, state: Mapping[str, Any]) -> None:
        if "sampler" in state:
            if (sampler := self._sampler) is None:
                raise ValueError("the state is of a sampler with load_state_dict, but here it has none")
            if (before := loaded_state(sampler)) is not None:
                before.undo(only_if_unchanged=True)
            saved, copied = from_plain(state["sampler"]), from_plain(state["sampler"])
            note_loaded(sampler, LoadedState(sampler, saved, lambda: sampler.load_state_dict(copied)))

    def begin(self) -> Iterator[Any]:
        if (loaded := loaded_state(self._sampler)) is not None:
            loaded.begins(self._sampler)
        if self._sampler is not None and self._is_hidden:
            return self._batches(self.settings.sampler)
        samples = super().begin()
        self._owners |= {"iterator": samples} if is_stateful(samples) else {}
        return samples

    @property
    def _is_hidden(self) -> bool:
        """Whether torch's batch sampler would hide the iterator over a sampler with a state."""
        return self._sampler is not self.settings.sampler and _is_in_step(self.settings)

    def _batches(self, batches: BatchSampler) -> Iterator[list[Any]]:
        """Iterate as torch's batch sampler does."""
        iterator = iter(batches.sampler)
        self._owners |= {"iterator": iterator} if is_stateful(iterator) else {}
        # Begins here, and no more: a sampler that is its own iterator would begin anew.
        samples = (sample for sample in iterator)
        self._load_iterator(iterator)
        for first in samples:
            if is_first := self._last is None:
                with suppress_errors():  # they come after the batch
                    self._last = self._states()
            batch = [first, *itertools.islice(samples, batches.batch_size - 1)]
            if is_first and len(batch) == 1:
                self._last = None  # it may be that of the next epoch
            if batches.drop_last and len(batch) < batches.batch_size:
                return
            yield batch

    def watch(self) -> Callable[[list[Any]], tuple[Iterator[Any], Callable[[], Any] | None] | None] | None:
        if (loaded := loaded_state(self._sampler)) is None:
            return None
        restore = _generators_of(self.settings)

        def begin_again(drawn: list[Any]) -> tuple[Iterator[Any], Callable[[], Any] | None] | None:
            if not loaded.gave_first(self._sampler, ended=not drawn):
                return None
            # The loaded position was that of an earlier pass.
            restore()
            self._last = None
            samples = self.begin()
            return samples, self.capture(samples)

        return begin_again

    def skip(self, samples: Iterator[Any], saved: Mapping[str, Any], progress: Progress) -> None:
        if progress.sampler is None:
            super().skip(samples, saved, progress)

    def end(self, saved: Mapping[str, Any]) -> None:
        if saved["sampler"] is None:
            return
        with _chosen_epochs_kept(self.settings, saved):
            try:
                is_end = self._draw_rest(self._begin_from(saved, saved["sampler"]), saved)
            except Exception as error:  # another sampler, which begins anew
                if is_interrupt(error):
                    raise
                logger.debug("the sampler takes no state of the last epoch", exc_info=True)
            else:
                if not is_end:
                    self._load(saved["sampler"])
                    note_loaded(self._sampler, None)  # each pass may begin so

    def _draw_rest(self, samples: Iterator[Any], saved: Mapping[str, Any]) -> bool:
        """Draw what is left of a pass, to its end, where samplers change to the next epoch.

        Returns:
            False if the state is the beginning of that, as of samplers that count what they have given in all epochs.
        """
        loaded = loaded_state(self._sampler)
        if not is_early(saved["sampler"]):
            is_end = _is_end(samples, saved)
            if loaded is not None:
                loaded.gave_first(self._sampler, ended=is_end)
            return is_end
        # All of the pass, if the state has no place in it, and what drop_last has left out. A sampler that goes on then
        # is another one. Batches may have another size here.
        num_batches = max(saved["num_batches"], 1)
        num_delivered = saved["num_samples"] or self._num_samples(from_plain(saved["first"]))
        num_left = num_delivered + num_delivered // num_batches
        number, found = 0, None
        for number, indices in enumerate(samples, 1):
            num_left -= self._num_samples(indices)
            if num_left < 0:
                return False
            found = _digest_of([indices])
            if number == 1 and loaded is not None:
                loaded.gave_first(self._sampler, ended=False)
                # The next pass may leave the sampler there, too, with its only batch.
                loaded.is_told |= num_batches == 1
        if number == 0 and loaded is not None:
            loaded.gave_first(self._sampler, ended=True)
        # Of an only batch, all but the first sample is drawn again.
        is_known = num_batches > 1 and saved["last"] is not None and self._is_same_order(saved)
        if is_known and found not in (saved["last"], UNKNOWN):
            logger.warning(
                "the sampler does not come to the last batch of the saved epoch again, and the next ones may differ, "
                "too: the state_dict() of %s must tell all that decides, also of samplers inside",
                type(next(iter(self._owners.values()))).__name__,
            )
        return True

    def _num_samples(self, indices: Any) -> int:
        return len(indices) if self.settings.auto_collation and is_batch(indices) else 1

    def capture(self, samples: Iterator[Any]) -> Callable[[], dict[str, Any] | None] | None:  # noqa: ARG002
        return self._capture if self._owners else None

    @functools.cached_property
    def _copier(self) -> StateCopier:
        return StateCopier()

    def _capture(self) -> dict[str, Any] | None:
        before = self._last
        try:
            self._last = self._states()
        except NotImplementedError as error:  # of a base class
            tell_not_implemented(next(iter(self._owners.values())), error)
            return None
        return with_earlier(self._last, before)

    def _states(self) -> dict[str, Any]:
        """The states of the sampler and its iterator. Copies, as these may go on changing the same objects."""
        try:
            return {name: self._copier.copy(owner.state_dict(), (name,)) for name, owner in self._owners.items()}
        except StopIteration as stop:
            raise stopped("state_dict() of the sampler") from stop


def _generators_of(settings: PassSettings) -> Callable[[], None]:
    """Return a function that sets the global generators, and those of samplers, to where they are now.

    Only in this process: ``states`` has them as plain values, for files.
    """
    everywhere, own = get_states(), [(generator, generator.get_state()) for generator in settings.own_generators]

    def restore() -> None:
        set_states(everywhere)
        for generator, state in own:
            generator.set_state(state)

    return restore


@contextlib.contextmanager
def _chosen_epochs_kept(settings: PassSettings, saved: Mapping[str, Any]) -> Iterator[None]:
    """Give samplers the epochs again that the script has chosen, after they were in that of a saved pass."""
    chain = settings.chain
    chosen = [getattr(sampler, "epoch", None) for sampler in chain]  # for the next pass
    restore_epochs(settings, saved)
    yield
    for sampler, epoch, before in zip(chain, chosen, saved["start"]["samplers"], strict=False):
        # Unless the sampler counts its epochs itself.
        if hasattr(sampler, "set_epoch") and getattr(sampler, "epoch", epoch) == before.get("set_epoch") != epoch:
            sampler.set_epoch(epoch)


def _is_own(saved: Mapping[str, Any], progress: Progress) -> bool:
    """Whether the state is that of this rank: another one has taken its own part of the same order."""
    return bool(saved["start"]["ranks"] == progress.start["ranks"])


def _is_end(samples: Iterator[Any], saved: Mapping[str, Any]) -> bool:
    """Whether nothing is left but the incomplete batch that ``drop_last`` left out; draws what there is of that."""
    size = saved["start"]["samplers"][0].get("batch_size", 1)
    num_batches, num_samples = saved["num_batches"], saved["num_samples"]
    if saved["first"] is not None:  # the sampler's state is that after it
        first = from_plain(saved["first"])
        num_batches, num_samples = 1, len(first) if is_batch(first) else 1
    left = size - 1 if num_batches and num_samples == num_batches * size else 0
    for indices in samples:
        left -= len(indices) if is_batch(indices) else 1
        if left < 0:
            return False
    return True


class Inside(Stateful):
    """A sampler without a state, over one that has one: it may have read ahead, so both begin the pass again.

    Unless its iterator has a state, which then knows of that. The states of the samplers inside are those from before
    the pass, when some are still in the one before. So the first batch is saved, too, by which the right beginning is
    found.
    """

    def __init__(self, settings: PassSettings) -> None:
        super().__init__(settings)
        self._inside = [sampler for sampler in settings.chain if is_stateful(sampler)]

    def start(self, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        start = super().start(saved)
        self._is_new = saved is None or not self._has_same_kinds(saved)
        if self._is_new:
            states = [to_plain(sampler.state_dict()) for sampler in self._inside]
            start["inside"] = {"states": states, "first": UNKNOWN}
        self._begun = start["inside"]
        return start

    def watch(self) -> Callable[[list[Any]], tuple[Iterator[Any], Callable[[], Any] | None] | None] | None:
        begin_again = super().watch()
        if not self._is_new:
            return begin_again

        def note_first(drawn: list[Any]) -> tuple[Iterator[Any], Callable[[], Any] | None] | None:
            self._begun["first"] = _digest_of(drawn)
            return None if begin_again is None else begin_again(drawn)

        return note_first

    def go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        if saved["sampler"] is not None:
            return super().go_on(saved)
        return self._begin_inside(saved)

    def _has_same_kinds(self, saved: Mapping[str, Any]) -> bool:
        """Whether the samplers are those of the saved pass: its beginning or end may be that of others."""
        kinds = [type(sampler).__qualname__ for sampler in self.settings.chain]
        return place_of(saved) == "middle" or [each["kind"] for each in saved["start"]["samplers"]] == kinds

    def _begin_inside(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Begin the saved pass again: in the first of these ways in which it begins with the same batch."""
        if not self._has_same_kinds(saved):
            return Replay.go_on(self, saved)
        restore, wanted = _generators_of(self.settings), saved["start"]["inside"]["first"]
        wanted = wanted if self._is_same_order(saved) else UNKNOWN
        first_loaded: list[LoadedState] = []
        for way in ("", "without a place", "left once", "not loaded", ""):
            restore()
            loaded = self._load_inside(saved) if way != "not loaded" else []
            first_loaded = first_loaded or loaded
            for sampler, each in zip(self._inside, first_loaded, strict=True):
                if way == "without a place":  # which is that of the pass before; what it counts stays
                    each.cancel(sampler)
                elif way == "not loaded":
                    each.undo(only_if_unchanged=True)
            if way == "left once":  # as the pass before was left: some count as they begin
                next(self.begin(), None)
                restore()
            samples = Replay.go_on(self, saved)
            drawn = list(itertools.islice(samples, 1))
            found = _digest_of(drawn)
            if found == wanted or (wanted == UNKNOWN and drawn):
                break
        else:
            if place_of(saved) != "middle":  # where this is an error
                logger.warning(
                    "%s does not begin again as in the saved epoch: the state_dict() of %s must tell all that decides",
                    *(type(self.settings.sampler).__name__, " and ".join(type(each).__name__ for each in self._inside)),
                )
        return _put_back(drawn, samples)

    def _load_inside(self, saved: Mapping[str, Any]) -> list[LoadedState]:
        return [
            LoadedState(sampler, state, functools.partial(sampler.load_state_dict, from_plain(state)))
            for sampler, state in zip(self._inside, saved["start"]["inside"]["states"], strict=True)
        ]

    def end(self, saved: Mapping[str, Any]) -> None:
        if saved["sampler"] is not None:
            super().end(saved)
            return
        with _chosen_epochs_kept(self.settings, saved):
            for _batch in self._begin_inside(saved):
                pass

    def capture(self, samples: Iterator[Any]) -> Callable[[], dict[str, Any] | None] | None:
        return super().capture(samples) if "iterator" in self._owners else None


def _digest_of(drawn: list[Any]) -> int | None:
    """The digest of a batch, if there is one: None without it."""
    if not drawn:
        return None
    return digest(drawn[0]) if is_batch(drawn[0]) or not isinstance(drawn[0], Iterable) else UNKNOWN


def _put_back(drawn: list[Any], samples: Iterator[Any]) -> Iterator[Any]:
    yield from drawn
    yield from samples


class Sourced(Replay):
    """The sampler is a pass over a stream, which has a state at any moment, also before its first batch."""

    _gives_same_batches = False  # when the stream has them

    def go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        self.settings.sampler.load_state_dict(from_plain(saved["sampler"]["sampler"]))
        return super().go_on(saved)

    def skip(self, samples: Iterator[Any], saved: Mapping[str, Any], progress: Progress) -> None:
        pass

    def end(self, saved: Mapping[str, Any]) -> None:
        # Which has not been told of the end, and keeps its seed, too.
        self.settings.sampler.load_state_dict({**from_plain(saved["sampler"]["sampler"]), "finished": True})

    def capture(self, samples: Iterator[Any]) -> Callable[[], dict[str, Any]]:  # noqa: ARG002
        source: Source = self.settings.sampler
        return lambda: {"sampler": source.capture()}


class Position(Replay):
    """A ``ResumableDistributedSampler`` begins at the position of all ranks, which its own state has set."""

    _gives_same_batches = False  # they may be of another size

    @property
    def origin(self) -> tuple[int, int, int]:
        sampler = self.settings.resumable
        assert sampler is not None
        return sampler.start, sampler.rank, sampler.num_replicas

    def skip(self, samples: Iterator[Any], saved: Mapping[str, Any], progress: Progress) -> None:  # noqa: ARG002
        progress.num_samples = 0  # after the position

    def end(self, saved: Mapping[str, Any]) -> None:
        if not saved["finished"]:  # it was brought to the beginning of the saved pass
            assert self.settings.resumable is not None
            self.settings.resumable.start = 0


class Streams(Replay):
    """The workers go on with their streams; the sampler of an iterable-style dataset only gives batch sizes."""

    _gives_same_batches = False

    def skip(self, samples: Iterator[Any], saved: Mapping[str, Any], progress: Progress) -> None:
        pass


def way_of(settings: PassSettings) -> Replay:
    """Choose the way, once for each pass."""
    if settings.iterable:
        return Streams(settings)
    if isinstance(settings.sampler, Source):
        return Sourced(settings)
    if settings.resumable is not None:
        return Position(settings)
    return Inside(settings) if _has_state_inside(settings) else Stateful(settings)


def _has_state_inside(settings: PassSettings) -> bool:
    """Whether a sampler has a state, and what is over it has none, and need not be where that state is."""
    chain = settings.chain
    number = next((number for number, sampler in enumerate(chain) if is_stateful(sampler)), 0)
    return number > 0 and not (number == 1 and _is_in_step(settings))


def _is_in_step(settings: PassSettings) -> bool:
    """Whether the batches are those that torch makes of a sampler's samples, which are read no further ahead."""
    return settings.auto_collation and type(settings.sampler).__iter__ is BatchSampler.__iter__


def end_pass(settings: PassSettings, saved: Mapping[str, Any]) -> None:
    """Bring the loader's own generators and its sampler to their state after a saved pass of which nothing is left."""
    with generators_restored():
        restore_generators(settings, saved, of_start=True)
        way_of(settings).end(saved)
    restore_generators(settings, saved)
