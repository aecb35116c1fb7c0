"""What a sampler gives anew: all of the saved pass, or what follows the state that it has itself.

The other ways to find the rest of a pass, and their choice, are in ``ways``.
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
from rpcdataloader.host.signals import is_interrupt, suppress_errors
from rpcdataloader.host.state import get_states, set_states
from rpcdataloader.loader.order import check_order
from rpcdataloader.loader.plain import StateCopier, from_plain
from rpcdataloader.loader.sampler import draw_base_seed, is_stateful
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
            if is_compared and None not in (expected, found := progress.drawn(num_asked)[1]) and found != expected:
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
        return self._sampler is not self.settings.sampler and is_in_step(self.settings)

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
        restore = generators_of(self.settings)

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
        with chosen_epochs_kept(self.settings, saved):
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
            found = digest_of([indices])
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


def generators_of(settings: PassSettings) -> Callable[[], None]:
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
def chosen_epochs_kept(settings: PassSettings, saved: Mapping[str, Any]) -> Iterator[None]:
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


def digest_of(drawn: list[Any]) -> int | None:
    """The digest of a batch, if there is one: None without it."""
    if not drawn:
        return None
    return digest(drawn[0]) if is_batch(drawn[0]) or not isinstance(drawn[0], Iterable) else UNKNOWN


def is_in_step(settings: PassSettings) -> bool:
    """Whether the batches are those that torch makes of a sampler's samples, which are read no further ahead."""
    return settings.auto_collation and type(settings.sampler).__iter__ is BatchSampler.__iter__
