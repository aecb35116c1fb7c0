"""The loop of a process with one thread: descriptors that are watched, and what is called when something happens."""

from __future__ import annotations

import select
from collections.abc import Callable


class Loop:
    """Waits for descriptors; of a node server and of a session."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}

    def watch(self, descriptor: int, handler: Callable[[], object], events: int = select.POLLIN) -> None:
        """Call ``handler`` whenever one of ``events`` is there. It must not believe that there is something to read."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Call its handler no more; idempotent. To be called before the descriptor is closed."""
        if self._handlers.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def wait(self, timeout: float | None) -> None:
        """Wait for something to happen, and call the handlers.

        Args:
            timeout: Seconds; None for no limit.
        """
        for descriptor, _events in self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000 + 1):
            # An earlier handler of this round may have dropped it, or even used its number again.
            if handler := self._handlers.get(descriptor):
                handler()
