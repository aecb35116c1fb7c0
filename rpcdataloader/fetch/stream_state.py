"""How far an iterator over an iterable-style dataset has come, and how to go on from there.

The conventions are those of torchdata's StatefulDataLoader: the state is the iterator's if it has one, else the
dataset's; without one, what was delivered is taken again and thrown away.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

logger = logging.getLogger("rpcdataloader.loader")


class StreamState(NamedTuple):
    """How far a stream, which is one worker's iterator over an iterable-style dataset, has come.

    Attributes:
        num_samples: Taken from it.
        num_batches: Made of them.
        owner: Which of the two has a ``state_dict()``: ``"iterator"``, or else ``"dataset"``; empty for neither.
        state: What it returned.
        ended: The last batch has met the end: it was not full.
    """

    num_samples: int = 0
    num_batches: int = 0
    owner: str = ""
    state: Any = None
    ended: bool = False


def state_of(iterator: Any, dataset: Any) -> tuple[str, Any]:
    """Which of the two has a state of its own, the iterator before the dataset, and what it is."""
    for name, owner in (("iterator", iterator), ("dataset", dataset)):
        if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
            return name, owner.state_dict()
    return "", None


def load_state(name: str, owner: Any, saved: StreamState) -> None:
    """Load what was saved of the ``"dataset"``, before the iterator is made, or of the ``"iterator"``.

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
    """Throw away a sample that was delivered.

    Returns:
        False if it failed, as it must have then.

    Raises:
        ValueError: There is none.
    """
    try:
        next(iterator)
    except StopIteration:
        raise ValueError("the saved pass had delivered more samples than this iterable-style dataset has now") from None
    except Exception:
        # So it was when it was delivered.
        logger.debug("a skipped sample has failed again", exc_info=True)
        return False
    return True
