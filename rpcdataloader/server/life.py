"""The life of a session and of a worker, as they themselves and whoever has forked them see it."""

from __future__ import annotations

import enum


class Life(enum.Enum):
    """How far a process is; it never goes back."""

    STARTING = "has not authenticated its client"
    SERVING = "takes requests"
    DRAINING = "answers what it has, and takes no more, since the node server ends"
    RETIRING = "answers what it has, and takes no more, since it has done its share"
    ENDED = "has ended, or is being ended"
