"""What threads do to a pass that overtake each other, without workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rpcdataloader.loader.driver import Driver


class Overtaken:
    """A driver as a thread sees it that opens a worker: after some looks, another epoch begins."""

    executor = SimpleNamespace(opening=lambda begun, _place, stream, _node: (begun, stream))

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks

    def _look(self, value: str) -> str:
        self._num_looks -= 1
        return f"{value} of the {'first' if self._num_looks >= 0 else 'second'}"

    begun = property(lambda self: self._look("pass"))
    streams = property(lambda self: [self._look("stream")] * 2)


@pytest.mark.parametrize("num_looks", range(4))
def test_worker_of_an_epoch_that_begins_meanwhile_never_goes_on_in_the_stream_of_the_last(num_looks):
    begun, stream = Driver._opening(Overtaken(num_looks), SimpleNamespace(place=1, node="node"))
    # A request for a pass that is over is not sent.
    assert begun == "pass of the first" or stream == "stream of the second"
