"""The place of an iterator over an iterable-style dataset, and how to continue from it.

The conventions are those of torchdata's StatefulDataLoader: the state is the iterator's if it has one, else the
dataset's. Without any state, delivered samples are taken again and thrown away.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

logger = logging.getLogger("rpcdataloader.loader")


class StreamState(NamedTuple):
    """The place of a stream, which is one worker's iterator over an iterable-style dataset.

    Attributes:
        num_samples: Number of samples taken from it.
        num_batches: Number of batches made of them.
        owner: Owner of the ``state_dict()``: ``"iterator"`` or ``"dataset"``; empty without one.
        state: Result of that ``state_dict()``.
        ended: True if the last batch met the end: it was incomplete.
    """

    num_samples: int = 0
    num_batches: int = 0
    owner: str = ""
    state: Any = None
    ended: bool = False


def state_of(iterator: Any, dataset: Any) -> tuple[str, Any]:
    """Return the owner of a state, the iterator before the dataset, and the state."""
    for name, owner in (("iterator", iterator), ("dataset", dataset)):
        if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
            return name, owner.state_dict()
    return "", None


def load_state(name: str, owner: Any, saved: StreamState) -> None:
    """Load the saved state of the ``"dataset"``, before the iterator is created, or of the ``"iterator"``.

    Raises:
        ValueError: The state is of another kind of dataset.
    """
    if saved.owner == name:
        if not hasattr(owner, "load_state_dict"):
            raise ValueError(
                f"the {name} was saved by its state_dict(), but {type(owner).__name__} has no load_state_dict()"
            )
        owner.load_state_dict(copy.deepcopy(saved.state))


def skip_sample(iterator: Iterator[Any]) -> bool:
    """Throw away a delivered sample.

    Returns:
        False if it failed, as it must have failed before.

    Raises:
        ValueError: The stream has ended.
    """
    try:
        next(iterator)
    except StopIteration:
        raise ValueError("the saved pass had delivered more samples than this iterable-style dataset has now") from None
    except Exception:
        # It failed before, when it was delivered.
        logger.debug("a skipped sample has failed again", exc_info=True)
        return False
    return True
