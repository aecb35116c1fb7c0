"""Input and output of the engine: the user's choices that decide anything, and the actions to carry out. Pure.

The driver carries actions out without its lock, in the order of their creation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Load(NamedTuple):
    """Send a task to a worker, by the number under which it was added; that of a part lies between two of these."""

    worker: int
    number: float
    payload: Any


class Cancel(NamedTuple):
    """Tell a worker that a task is no longer needed. It answers all the same."""

    worker: int
    number: float


class Open(NamedTuple):
    """Ask a node for a worker."""

    worker: int
    place: int
    node: Any


class Close(NamedTuple):
    """End a worker that is no longer needed."""

    worker: int


class End(NamedTuple):
    """End a worker that exceeds the task's time limit, and keep its stack for the error."""

    worker: int
    number: float


class Restart(NamedTuple):
    """Tell a worker that another epoch begins, before any other message."""

    worker: int


class Seek(NamedTuple):
    """Try to reach a node after ``delay`` seconds, and report the result."""

    node: Any
    delay: float


class ReportWait(NamedTuple):
    """Tell the user that the consumer has waited ``seconds`` for this task; ``worker`` is None if none has it."""

    worker: int | None
    payload: Any
    seconds: float
    summary: str  # state of the pass
    has_stack: bool = True  # whether to tell the worker's stack, too


class Say(NamedTuple):
    """Tell the user; of a ``cause`` that lasts, once per minute."""

    text: str
    is_warning: bool = True
    cause: str = ""  # empty for what happens once


Action = Load | Cancel | Open | Close | End | Restart | Seek | ReportWait | Say


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The user's choices for a pass."""

    num_workers: int  # workers of this process at the beginning of the pass; streams of an iterable-style dataset
    is_iterable: bool = False
    prefetch_factor: int = 2  # tasks requested per worker in advance
    in_order: bool = True
    max_in_flight_bytes: int = 2**30  # limit on the bytes of answers and of tasks in flight
    max_retries: int = 3  # limit on workers that die at a task
    task_timeout: float | None = None  # seconds that a task may take; None for no limit
    reconnect_timeout: float = 300.0  # seconds to wait for nodes when no worker is left
    connect_timeout: float = 60.0  # seconds to wait for a node's answer before others are asked as well
    label: str = ""  # beginning of every message: the rank in a distributed job
    rank: int = 0  # rank of this process among those that share the nodes
    world_size: int = 1  # number of processes that share the nodes
    num_offered: int = 0  # workers of all nodes together
    max_workers: int = 0  # limit on this process's workers, also when nodes join; 0 for no limit
