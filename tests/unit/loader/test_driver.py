"""What threads do to a pass that overtake each other, without workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rpcdataloader.diagnosis.records import Recorder
from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.host.locks import Condition
from rpcdataloader.loader.driver import Driver
from rpcdataloader.loader.executor import Opening
from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.engine import Engine


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


class Outside:
    """An executor whose workers note their requests."""

    name, is_over, now = "dataset", False, staticmethod(lambda: 0.0)
    settle = settled = close = say = lambda *_args: None

    def __init__(self):
        self.condition = Condition()
        self.requests = []

    def session(self, _node):
        return "session"

    def opening(self, begun, *_args):
        return Opening(begun, ("open", begun.name))

    def restarting(self, begun, _worker):
        return "restart", begun.name

    def open(self, *_args):
        connection = SimpleNamespace(cancel_all=lambda: None)
        return SimpleNamespace(connection=connection, submit=lambda request, _done: self.requests.append(request))


def epoch(name):
    return SimpleNamespace(name=name, progress=SimpleNamespace(streams=[], turn=0), source=None)


def test_worker_that_is_opened_as_an_epoch_begins_is_told_of_it_once(monkeypatch):
    outside = Outside()
    engine = Engine(PlanOptions(num_workers=1), ["node"])
    recorder = Recorder(Condition(), 0.0)
    driver = Driver(
        SimpleNamespace(), engine, outside, epoch("first"), SimpleNamespace(carrier=None, decode=None), recorder
    )
    driver.start(["node"], [], expects_more=False)
    overtaken = []
    with monkeypatch.context() as patches:
        patches.setattr(driver, "carry_out", overtaken.append)
        driver.lost(1, Loss(ConnectionLostError("it was killed"), node_is_up=True))
        driver.begin_epoch(epoch("second"))
    for todo in overtaken:
        driver.carry_out(todo)
    assert outside.requests == [("open", "first"), ("open", "second")]
    driver.begin_epoch(epoch("third"))
    assert outside.requests[2:] == [("restart", "third")]
