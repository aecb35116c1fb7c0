"""What all sessions of this client get, and that the datasets and loaders that share them agree."""

from __future__ import annotations

import threading

from rpcdataloader.host.additions import Additions


class SharedAdditions:
    """What all sessions of a client get; thread-safe.

    Attributes:
        current: All that was added; another object after each change.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.current = Additions()

    def add(self, more: Additions) -> None:
        """Have these, too.

        Raises:
            ValueError: They contradict what was added before.
        """
        with self._lock:
            self.current = self.current.plus(more)
