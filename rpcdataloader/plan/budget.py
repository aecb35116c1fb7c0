"""How many bytes of batches are on their way or wait to be consumed, and whether there is room for one more."""

from __future__ import annotations

# The estimated size of a batch jumps up to the largest seen and sinks this fraction of the way towards smaller ones. A
# limit on memory must hold when sizes vary, where an average is too low half of the time; without the sinking, one
# giant batch at the start would throttle the whole epoch.
_SIZE_DECAY = 1 / 16


class ByteBudget:
    """Keeps what is answered, plus the estimated size of what is in flight, below a limit.

    Nothing is known before the first answer, so only the window limits the first tasks, as in torch's loader.

    Args:
        max_bytes: The limit.
        batch_size_bytes: Estimate to start with, for example that of the epoch before.

    Attributes:
        batch_size_bytes: Estimated size of a batch, 0 before the first answer.
        num_in_flight: Tasks that were sent and not answered, counted by the owner.
    """

    def __init__(self, max_bytes: int, batch_size_bytes: float) -> None:
        self.batch_size_bytes = float(batch_size_bytes)
        self.num_in_flight = 0
        self._max_bytes = max_bytes
        self._answered_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether one more task may be sent."""
        return self._answered_bytes + (self.num_in_flight + 1) * self.batch_size_bytes <= self._max_bytes

    def answered(self, size_bytes: int) -> None:
        """A task that was in flight was answered with so many bytes, which stay until they are :meth:`delivered`."""
        self._answered_bytes += size_bytes
        if size_bytes > self.batch_size_bytes:
            self.batch_size_bytes = float(size_bytes)
        else:
            self.batch_size_bytes += _SIZE_DECAY * (size_bytes - self.batch_size_bytes)

    def delivered(self, size_bytes: int) -> None:
        """An answer was handed to the consumer."""
        self._answered_bytes -= size_bytes
