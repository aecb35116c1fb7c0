"""What a sampler gives anew that has no state, and reads from samplers with one: the way with the most to try."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rpcdataloader.fetch.loaded import LoadedState
from rpcdataloader.loader.plain import from_plain, to_plain
from rpcdataloader.loader.replay import Replay, Stateful, chosen_epochs_kept, digest_of, generators_of
from rpcdataloader.loader.sampler import is_stateful
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import UNKNOWN, place_of

logger = logging.getLogger("rpcdataloader.loader")


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
            self._begun["first"] = digest_of(drawn)
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
        restore, wanted = generators_of(self.settings), saved["start"]["inside"]["first"]
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
            found = digest_of(drawn)
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
        with chosen_epochs_kept(self.settings, saved):
            for _batch in self._begin_inside(saved):
                pass

    def capture(self, samples: Iterator[Any]) -> Callable[[], dict[str, Any] | None] | None:
        return super().capture(samples) if "iterator" in self._owners else None


def _put_back(drawn: list[Any], samples: Iterator[Any]) -> Iterator[Any]:
    yield from drawn
    yield from samples
