"""The workers of an iterator, as its driver knows them."""

from __future__ import annotations

from typing import Any

from rpcdataloader.client.worker import RemoteWorker
from tests.conftest import wait_until


def workers_of(iterator: Any) -> list[RemoteWorker]:
    """Those that were asked for, and are not lost."""
    return list(iterator.driver.workers)


def wait_for_crew(iterator: Any, num_workers: int) -> None:
    """Wait until there are as many workers as this, and all of them take tasks."""
    driver = iterator.driver
    wait_until(lambda: len(driver.workers) == driver.engine.num_workers == num_workers, what=f"{num_workers} workers")
