"""Batches that tell where they come from, for tests of other libraries' datasets.

Samples are mappings with a ``number``, by which they are counted, and the ``pid`` of the process that fetched them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.datasets import Process as Process
from tests.support.datasets import node_server
from tests.support.zygote import Zygote


class Traced(NamedTuple):
    """A collated batch.

    Attributes:
        fetched: Processes that fetched its samples.
        collated: The process that made it of them.
        server: The node server of that process.
    """

    numbers: list[int]
    fetched: set[int]
    collated: int
    server: int


def trace(samples: list[Any]) -> Traced:
    """Collate samples; fails where no worker of ours is at work."""
    numbers = [int(sample["number"]) for sample in samples]
    return Traced(numbers, {int(sample["pid"]) for sample in samples}, os.getpid(), node_server())


def own_processes() -> set[str]:
    """The children of this process."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def numbers_of(batches: Iterable[Traced], servers: Collection[int], num_workers: int = 0) -> list[int]:
    """The samples of a pass over a loader with ``collate_fn=trace``.

    Checks that workers of these node servers, each with a batch at least if ``num_workers`` are expected, have fetched
    and collated all of them, and that this process has started none meanwhile.
    """
    before = own_processes()
    numbers, workers = [], set()
    for batch in batches:
        assert batch.fetched == {batch.collated}
        assert batch.server in servers
        assert own_processes() == before
        workers.add(batch.collated)
        numbers += batch.numbers
    assert os.getpid() not in workers
    assert not num_workers or len(workers) == num_workers
    return numbers


_RANK = """
import json, os, sys
os.environ["RANK"], os.environ["WORLD_SIZE"], *args = sys.argv[1:]
{imports}
print(json.dumps({call}(*args)))
"""


def run_ranks(zygote: Zygote, function: Any, world_size: int, *args: object) -> list[Any]:
    """Call a function of a test module in so many processes at the same time, as their launcher would.

    Args:
        args: Become strings.

    Returns:
        What it returned in each, by way of JSON.
    """
    source = _RANK.format(imports=f"from {function.__module__} import {function.__name__}", call=function.__name__)
    scripts = [zygote.start(source, rank, world_size, *args, ends_quickly=True) for rank in range(world_size)]
    ended = [script.wait(60) for script in scripts]
    for one in ended:
        assert one.status == 0, one.errors
    return [json.loads(one.output) for one in ended]
