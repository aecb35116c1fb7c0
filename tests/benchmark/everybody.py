"""Waiting until every worker of a pass has delivered a batch: until then, some are still being started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

_TIMEOUT = 300.0


def wait_for_workers(batches: Iterator[Any], num_workers: int, get_ids: Callable[[Any], Any]) -> None:
    """Take batches until each worker has delivered one.

    Args:
        batches: Of a loader.
        num_workers: So many.
        get_ids: From a batch to the tensor of the numbers of the workers that have loaded its samples.

    Raises:
        TimeoutError: Some have delivered nothing within five minutes.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + _TIMEOUT
    while len(seen) < num_workers:
        seen.update(get_ids(next(batches)).tolist())
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {len(seen)} of {num_workers} workers have delivered a batch")
