"""How the rest of a saved pass is found again: in one of six ways, which the loader's sampler decides.

| way | what a state has | the rest |
| --- | --- | --- |
| Replay | numbers of batches and samples, and a digest | what the sampler gives anew, after the same of these |
| Stateful | the state of the sampler, of its iterator, or of both | what these give from there |
| Inside | as Replay, and states of the samplers inside, of the beginning of the pass | as Replay, from these |
| Sourced | the state of the pass over the stream of a ``transform`` | that of this pass |
| Position | the position of all ranks together in their order | what follows there, for any ranks |
| Streams | the states of streams, which are the workers' | each worker's |

A pass was saved at its beginning, in its middle, or at its end. In the middle, its sampler begins at the same order
again; at its end, the sampler is brought to the beginning of the next one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler

from rpcdataloader.fetch.loaded import LoadedState, loaded_state, note_loaded, tell_not_implemented
from rpcdataloader.fetch.samples import is_batch, stopped
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.host.state import get_states, set_states
from rpcdataloader.loader.order import check_order
from rpcdataloader.loader.plain import StateCopier, from_plain, to_plain
from rpcdataloader.loader.sampler import Source, is_stateful
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import capture_order, place_of, restore_generators
from rpcdataloader.loader.tasks import OTHER_ORDER, Progress, skip

logger = logging.getLogger("rpcdataloader.loader")


class Replay:
    """The sampler is started again, and what was delivered is skipped, without loading samples."""

    def __init__(self, settings: PassSettings) -> None:
        self.settings = settings

    @property
    def origin(self) -> tuple[int, int, int]:
        """Position at which all ranks together begin, rank, and number of ranks."""
        partition = self.settings.partition
        return 0, partition.rank, partition.world_size

    def capture_start(self) -> dict[str, Any]:
        """What else a state must have of the beginning of the pass."""
        return {}

    def begin(self) -> Iterator[Any]:
        """Iterate over the sampler."""
        return iter(self.settings.sampler)

    def knows_first(self, saved: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether to deliver the first batch from a state, and to go on with the sampler's state after it."""
        return False

    def go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:  # noqa: ARG002
        """Iterate over the sampler in a saved pass."""
        return self.begin()

    def skip(self, samples: Iterator[Any], saved: Mapping[str, Any], progress: Progress) -> None:
        """Skip what was delivered.

        Raises:
            ValueError: The sampler is too short, or gives other samples.
        """
        num_batches = progress.num_batches
        num_samples, digest = skip(samples, num_batches, auto_collation=self.settings.auto_collation)
        if num_samples != progress.num_samples:
            raise ValueError(
                f"the saved pass had delivered {progress.num_samples} samples in {num_batches} batches, but the "
                f"sampler gives {num_samples} in as many now: have dataset, batch size or sampler changed?"
            )
        if _is_own(saved, progress) and progress.digest not in (None, digest):
            raise ValueError(OTHER_ORDER)
        if progress.digest is not None:
            progress.digest = digest

    def following(self, saved: Mapping[str, Any], progress: Progress) -> int | None:
        """The digest of the batch that followed when the state was saved; None if it is unknown, or another is due."""
        is_due = place_of(saved) == "middle" and _is_own(saved, progress)
        return progress.upcoming.get(progress.num_batches) if is_due else None

    def end(self, saved: Mapping[str, Any]) -> None:
        """Bring the sampler to its state after a saved pass of which nothing is left."""

    def capture(self, samples: Iterator[Any]) -> Callable[[], dict[str, Any] | None] | None:  # noqa: ARG002
        """Return a function that gives the sampler's state after the batch that it has just given; None without one.

        It gives None if it turns out that there is none.
        """
        return None

    def watch(self) -> Callable[[bool], tuple[Iterator[Any], Callable[[], Any] | None] | None] | None:
        """Prepare for the first batch of a pass: see :class:`~rpcdataloader.loader.tasks.TaskSource`."""
        return None


class Stateful(Replay):
    """A sampler whose iterator may have a state, or that has one itself; otherwise, what was delivered is skipped."""

    def __init__(self, settings: PassSettings) -> None:
        super().__init__(settings)
        self._sampler = next(filter(is_stateful, settings.samplers), None)

    def knows_first(self, saved: Mapping[str, Any]) -> bool:
        # For other ranks or batch sizes, the pass begins anew.
        if saved["first"] is None or ("sampler" in saved["sampler"] and self._sampler is None):
            return False
        here = capture_order(self.settings)
        try:
            check_order(saved["start"], here)
        except ValueError:
            return False
        return bool(saved["start"]["ranks"] == here["ranks"])

    def go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        # The end of an epoch may be that of another sampler, and so may its beginning.
        is_own = place_of(saved) == "middle" or self.knows_first(saved)
        return self._begin_from(saved["sampler"] or {}) if is_own else self.begin()

    def _begin_from(self, state: Mapping[str, Any]) -> Iterator[Any]:
        self._load(state)
        samples: Any = self.begin()
        if "iterator" in state:
            if not is_stateful(samples):
                raise ValueError("the state is of a sampler whose iterator has load_state_dict, but here it has none")
            samples.load_state_dict(from_plain(state["iterator"]))
        return samples  # type: ignore[no-any-return]

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
        return super().begin()

    def watch(self) -> Callable[[bool], tuple[Iterator[Any], Callable[[], Any] | None] | None] | None:
        if (loaded := loaded_state(self._sampler)) is None:
            return None
        restore = _generators_of(self.settings)

        def begin_again(ended: bool) -> tuple[Iterator[Any], Callable[[], Any] | None] | None:
            if not loaded.gave_first(self._sampler, ended=ended):
                return None
            # The loaded position was that of an earlier pass.
            restore()
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
                samples = self._begin_from(saved["sampler"])
            except Exception:  # another sampler, which begins anew
                logger.debug("the sampler takes no state of the last epoch", exc_info=True)
            else:
                # To its end, where samplers change to the next epoch; unless its end is the beginning of that, as for
                # those that count what they have given in all epochs.
                is_end = _is_end(samples, saved)
                if (loaded := loaded_state(self._sampler)) is not None:
                    loaded.gave_first(self._sampler, ended=is_end)
                if not is_end:
                    self._load(saved["sampler"])
                    note_loaded(self._sampler, None)  # each pass may begin so

    def capture(self, samples: Iterator[Any]) -> Callable[[], dict[str, Any] | None] | None:
        owners: dict[str, Any] = {"sampler": self._sampler, "iterator": samples if is_stateful(samples) else None}
        stateful = {name: owner for name, owner in owners.items() if owner is not None}
        if not stateful:
            return None
        copier = StateCopier()

        def get_state() -> dict[str, Any] | None:
            # The sampler may go on changing the same object.
            try:
                return {name: copier.copy(owner.state_dict(), (name,)) for name, owner in stateful.items()}
            except NotImplementedError as error:  # of a base class
                tell_not_implemented(self._sampler, error)
                return None
            except StopIteration as stop:
                raise stopped("state_dict() of the sampler") from stop

        return get_state


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

    Unless its iterator has a state, which then knows of that.
    """

    def __init__(self, settings: PassSettings) -> None:
        super().__init__(settings)
        self._inside = [sampler for sampler in settings.chain if is_stateful(sampler)]

    def capture_start(self) -> dict[str, Any]:
        return {"inside": [to_plain(sampler.state_dict()) for sampler in self._inside]}

    def go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        if saved["sampler"] is not None:
            return super().go_on(saved)
        return self._begin_inside(saved)

    def _begin_inside(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Begin the saved pass again. Its first state may still be the end of the pass before, which has nothing."""
        restore = _generators_of(self.settings)
        if not (loaded := self._load_inside(saved)):
            return self.begin()
        has_nothing = next(self.begin(), self) is self
        restore()
        if has_nothing:
            for each in loaded:
                each.undo(only_if_unchanged=True)
        else:
            self._load_inside(saved)
        return self.begin()

    def _load_inside(self, saved: Mapping[str, Any]) -> list[LoadedState]:
        states = saved["start"].get("inside", [])
        # The beginning or end of an epoch may be that of other samplers.
        if place_of(saved) != "middle" and [each["kind"] for each in saved["start"]["samplers"]] != [
            type(sampler).__qualname__ for sampler in self.settings.chain
        ]:
            return []
        return [
            LoadedState(sampler, state, functools.partial(sampler.load_state_dict, from_plain(state)))
            for sampler, state in zip(self._inside, states, strict=False)
        ]

    def end(self, saved: Mapping[str, Any]) -> None:
        if saved["sampler"] is not None:
            super().end(saved)
            return
        with _chosen_epochs_kept(self.settings, saved):
            for _batch in self._begin_inside(saved):
                pass

    def capture(self, samples: Iterator[Any]) -> Callable[[], dict[str, Any] | None] | None:
        return super().capture(samples) if is_stateful(samples) else None


class Sourced(Replay):
    """The sampler is a pass over a stream, which has a state at any moment, also before its first batch."""

    def go_on(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        self.settings.sampler.load_state_dict(from_plain(saved["sampler"]["sampler"]))
        return self.begin()

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

    @property
    def origin(self) -> tuple[int, int, int]:
        sampler = self.settings.resumable
        assert sampler is not None
        return sampler.start, sampler.rank, sampler.num_replicas

    def skip(self, samples: Iterator[Any], saved: Mapping[str, Any], progress: Progress) -> None:  # noqa: ARG002
        progress.num_samples = 0  # after the position

    def following(self, saved: Mapping[str, Any], progress: Progress) -> None:  # noqa: ARG002
        return None  # batches may be of another size

    def end(self, saved: Mapping[str, Any]) -> None:
        if not saved["finished"]:  # it was brought to the beginning of the saved pass
            assert self.settings.resumable is not None
            self.settings.resumable.start = 0


class Streams(Replay):
    """The workers go on with their streams; the sampler of an iterable-style dataset only gives batch sizes."""

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
    is_in_step = number == 1 and settings.auto_collation and type(chain[0]).__iter__ is BatchSampler.__iter__
    return number > 0 and not is_in_step


def end_pass(settings: PassSettings, saved: Mapping[str, Any]) -> None:
    """Bring the loader's own generators and its sampler to their state after a saved pass of which nothing is left."""
    with generators_restored():
        restore_generators(settings, saved, of_start=True)
        way_of(settings).end(saved)
    restore_generators(settings, saved)
