"""How many samples of a batch a worker gets: all, or a part, so that several workers make it together. Pure.

A batch that one worker makes takes the time of a batch. Where hardly anything is ready or under way, that is late: at
the beginning of a pass, after the loss of all workers, and at the end, where workers would be idle. In the steady state
each batch is made by one worker, as that costs less.
"""

from __future__ import annotations

import math

# Least time of a part. Its message, its answer and the joining take 0.2 to 1 ms. The training process handles those of
# all workers, one after the other, so the least time grows with their number.
LEAST_SECONDS, LEAST_PER_WORKER = 5e-3, 5e-4

# Batches per worker from when nothing is under way, after which all are whole: a loop that is faster than the workers
# would always find too few. With 8 workers at 80 % of their capacity, enough are ready after 2 to 3.
RAMP = 3


def choose_workers(num_workers: int, ahead: int) -> int:
    """The number of workers that make the next batch of a ramp together.

    Args:
        ahead: Batches that are ready or under way.
    """
    return num_workers if 2 * ahead < num_workers else num_workers // 2 if ahead < num_workers else 1


def choose_size(num_samples: int, num_workers: int, seconds: float | None) -> int:
    """The number of samples of a part.

    Args:
        num_samples: Samples of the batch.
        num_workers: Workers that make it together.
        seconds: Time that one worker takes for the batch; None if unknown.
    """
    least_seconds = max(LEAST_SECONDS, LEAST_PER_WORKER * num_workers)
    least = 1 if seconds is None else math.ceil(num_samples * least_seconds / seconds)
    return min(num_samples, max(least, -(-num_samples // num_workers)))
