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

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.loader.inside import Inside
from rpcdataloader.loader.plain import from_plain
from rpcdataloader.loader.replay import Replay, Stateful, is_in_step
from rpcdataloader.loader.sampler import Source, is_stateful
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import restore_generators
from rpcdataloader.loader.tasks import Progress

logger = logging.getLogger("rpcdataloader.loader")


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
    return number > 0 and not (number == 1 and is_in_step(settings))


def end_pass(settings: PassSettings, saved: Mapping[str, Any]) -> None:
    """Bring the loader's own generators and its sampler to their state after a saved pass of which nothing is left."""
    with generators_restored():
        restore_generators(settings, saved, of_start=True)
        way_of(settings).end(saved)
    restore_generators(settings, saved)
