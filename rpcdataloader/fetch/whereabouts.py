"""What a worker is at, in numbers that outlive it: its session reads them when the worker has ended.

Two stores for a batch, and one for each sample: a store takes 30 ns, and a message would take a system call.
"""

from __future__ import annotations

# In place of a position: all samples of the batch, which the dataset was asked for at once; and none of them any more.
ALL = -1
DONE = -2


class Whereabouts:
    """What this process is at.

    Attributes:
        batch: Number of the batch that was begun last, plus 1; 0 before the first one.
        sample: Position of the sample in the epoch or, of a stream, in the stream.
    """

    __slots__ = ("batch", "sample")

    def __init__(self) -> None:
        self.batch: list[int] | memoryview = [0]
        self.sample: list[int] | memoryview = [0]


here = Whereabouts()


def keep_whereabouts(batch: memoryview, sample: memoryview) -> None:
    """Note from now on in this memory what this process is at."""
    here.batch, here.sample = batch, sample
