"""How far a pass has come."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.errors import BadSamplesError
from rpcdataloader.fetch.bad_samples import Reduced
from rpcdataloader.fetch.stream_state import StreamState

logger = logging.getLogger("rpcdataloader.loader")


@dataclass(slots=True)
class Progress:
    """How far a pass has come.

    Attributes:
        base_seed: Of the pass, or of all passes of persistent workers.
        epoch: From 0, grows with persistent workers.
        num_batches: So many were delivered without a gap.
        num_samples: In them.
        ahead: Later ones that were delivered too, by number: how many samples they have, and the state of the sampler
            after them (``in_order=False``).
        streams: Of an iterable-style dataset, each after the last batch of it that was delivered.
        turn: The stream whose batch comes next.
        num_yielded: Batches delivered in this process, without empty ones.
        num_skipped: Samples that were missing in what was delivered.
        in_step: No batch was left out as a whole, so that other ranks have delivered batches of the same numbers.
        finished: Everything was delivered.
        start: What the pass began with: states of the generators, and rank and samplers.
        sampler: The last state of a sampler that has one, and how many batches and samples it had given then.
    """

    base_seed: int
    epoch: int
    num_batches: int = 0
    num_samples: int = 0
    ahead: dict[int, tuple[int, Any]] = field(default_factory=dict)
    streams: list[StreamState] = field(default_factory=list)
    turn: int = 0
    num_yielded: int = 0
    num_skipped: int = 0
    in_step: bool = True
    finished: bool = False
    start: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] | None = None

    def delivered(self, number: int, num_samples: int, sampler_state: Any = None) -> None:
        """Batch ``number`` of the sampler was handed to the consumer, or an exception in its place."""
        self.num_yielded += 1
        self.ahead[number] = num_samples, sampler_state
        while self.num_batches in self.ahead:
            num_samples, sampler_state = self.ahead.pop(self.num_batches)
            self.num_samples += num_samples
            self.num_batches += 1
            if sampler_state is not None:
                self.sampler = {
                    "state": sampler_state, "num_batches": self.num_batches, "num_samples": self.num_samples
                }  # fmt: skip

    def stream_delivered(self, stream: int, state: StreamState | None) -> None:
        """A batch of a stream was handed to the consumer, or an exception, which has no state."""
        self.num_yielded += 1
        self.num_batches += 1
        if state is not None:
            self.streams[stream] = state
        self.turn = stream + 1

    def account_reduced(self, reduced: Reduced, max_skipped: int) -> None:
        """Count, and report, what is missing in the batch that was delivered last.

        Raises:
            BadSamplesError: More than ``max_skipped`` samples are missing in this pass.
        """
        self.num_skipped += reduced.num_skipped
        self.num_yielded -= reduced.is_empty
        self.in_step &= not reduced.is_empty
        if reduced.num_skipped and self.num_skipped > max_skipped:
            raise BadSamplesError(
                f"{self.num_skipped} samples were skipped in this pass, more than max_skipped={max_skipped}; at last "
                f"{reduced.where} skipped {reduced}"
            ) from reduced.errors[-1]
        logger.warning("%s skipped %s" if reduced.num_skipped else "%s: %s", reduced.where, reduced)
