"""The one batch that is on its way to a device, while the consumer has the one before."""

from __future__ import annotations

from rpcdataloader.client.node import Node
from rpcdataloader.loader.copying import Carrier
from rpcdataloader.loader.seat import Failure
from rpcdataloader.plan.engine import Delivery, Engine


class Ahead:
    """What is delivered next, if it has come; every method is called with the pass's condition, so they go in order."""

    def __init__(self, engine: Engine[Node], carrier: Carrier) -> None:
        self._engine = engine
        self._carrier = carrier
        self.delivery: Delivery | None = None

    def take(self) -> Delivery | None:
        """What is delivered next; None if it is not there. What comes after it follows to the device."""
        self.send()
        delivery, self.delivery = self.delivery, None
        if delivery is not None:
            self.send()
        return delivery

    def send(self) -> None:
        """Send the batch that is delivered next to the device, if it has come and none is on its way."""
        if self.delivery is not None or (delivery := self._engine.deliver()) is None:
            return
        self.delivery = delivery
        answer = delivery.answer
        if answer is not None and answer.movable is not None:
            try:
                answer.copies = self._carrier.carry(answer.movable, answer.probe is not None)
            except BaseException as exc:
                # What the frames refer to is a batch.
                answer.result = Failure(exc.with_traceback(None))
            answer.movable = None
