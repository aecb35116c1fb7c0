"""What has been answered and is not delivered, and the one batch that is on its way to the device."""

from __future__ import annotations

from typing import Any

from rpcdataloader.client.node import Node
from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.fetch.stream_state import StreamState
from rpcdataloader.loader.answers import Failure
from rpcdataloader.loader.copying import Carrier, Copies
from rpcdataloader.loader.tasks import Task
from rpcdataloader.plan.engine import Engine
from rpcdataloader.wire.movable import Movable

# Which stream a batch is of, and how far that has come with it; None instead of an exception's.
StreamAfter = tuple[int, StreamState | None]

# With what is copied to the device, if there is one; or, of the batch that comes next, with the copies.
_Answered = tuple[Any, Task, StreamAfter | None, Movable | None]
Taken = tuple[Any, Task, StreamAfter | None, Copies | None]


class Results:
    """The answers of one pass; every method is called with the pass's condition.

    Args:
        engine: Says which one is delivered next.
        carrier: Brings batches to a device; None to leave them in the memory of this process.
    """

    def __init__(self, engine: Engine[Node], carrier: Carrier | None) -> None:
        self._engine = engine
        self._carrier = carrier
        self._answered: dict[int, _Answered] = {}
        self._ahead: Taken | None = None

    def put(self, number: int, answered: _Answered) -> None:
        """Keep an answer that will be delivered."""
        self._answered[number] = answered

    def clear(self) -> None:
        """Forget everything."""
        self._answered.clear()
        self._ahead = None

    @property
    def has_next(self) -> bool:
        """Whether :meth:`take` gives something now."""
        return self._ahead is not None or self._engine.has_deliverable

    def take(self) -> Any:
        """What is delivered next, if it is there; None otherwise. What comes after it follows to the device."""
        if self._carrier is None:
            return self._pop()
        self.copy_ahead()
        taken, self._ahead = self._ahead, None
        if taken is not None:
            self.copy_ahead()
        return taken

    def copy_ahead(self) -> None:
        """Send the batch that is delivered next to the device, if it has come and none is on its way.

        With the condition, so that they go in order.
        """
        if self._carrier is None or self._ahead is not None or (answered := self._pop()) is None:
            return
        result, task, stream, movable = answered
        copies = None
        if movable is not None:
            try:
                copies = self._carrier.carry(movable)
            except BaseException as exc:
                # What the frames refer to is a batch.
                result = Failure(exc.with_traceback(None))
        self._ahead = result, task, stream, copies

    def _pop(self) -> Any:
        delivery = self._engine.deliver()
        if delivery is None:
            return None
        condemned = delivery.condemned
        if condemned is None:
            return self._answered.pop(delivery.number)
        stream = None if condemned.stream is None else (condemned.stream, None)
        return Failure(ConnectionLostError(condemned.text)), condemned.payload, stream, None
