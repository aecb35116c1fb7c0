"""The two ends of the engine: what the user has chosen, as far as it decides anything, and what is to be done. Pure.

The driver carries actions out without its lock, in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

N = TypeVar("N", bound=Hashable)


class Load(NamedTuple):
    """Send a task to a worker: what was added under its number; ``is_last`` asks for the request of the last try.

    The samples at the places ``left_out`` are not to be loaded, each for a reason.
    """

    worker: int
    number: int
    payload: Any
    is_last: bool
    left_out: Mapping[int, str] | None = None


class Cancel(NamedTuple):
    """A worker need not load a task any more. It answers all the same."""

    worker: int
    number: int


@dataclass(frozen=True, slots=True)
class Open(Generic[N]):
    """Ask a node for a worker. ``is_promised``: there will be room for it, so a busy node is waited for."""

    worker: int
    place: int
    node: N
    is_promised: bool


class Close(NamedTuple):
    """End a worker that has nothing to do here any more."""

    worker: int


class End(NamedTuple):
    """End a worker that is over its time with a task, and keep its stack for the error."""

    worker: int
    number: int


class Restart(NamedTuple):
    """Tell a worker that another epoch begins, before anything else is sent to it."""

    worker: int


@dataclass(frozen=True, slots=True)
class Seek(Generic[N]):
    """Try to reach a node after ``delay`` seconds, and say what came of it."""

    node: N
    delay: float


class ReportWait(NamedTuple):
    """Tell the user that the consumer has waited for this task for ``seconds``; ``worker`` is None if none has it."""

    worker: int | None
    payload: Any
    seconds: float


class Say(NamedTuple):
    """Tell the user."""

    text: str
    is_warning: bool = True


Action = Load | Cancel | Open[Any] | Close | End | Restart | Seek[Any] | ReportWait | Say


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user has chosen of a pass.

    Attributes:
        num_workers: Workers of this process when the pass begins; streams of an iterable-style dataset.
        prefetch_factor: Tasks per worker that are asked for in advance.
        max_in_flight_bytes: Limit of what is answered and on its way, in bytes.
        max_retries: Tries of a task that kills its workers, or fails with an exception that may pass.
        task_timeout: Seconds that a task may take; None for any time.
        reconnect_timeout: Seconds to wait for nodes when no worker is left.
        marks_last_try: The last try of a task is another request than those before.
        leaves_out: A sample that kills its workers is left out of its task.
        label: Beginning of every message: the rank, if there are several.
        rank: Of this process, among those that share the nodes.
        world_size: Number of these.
        num_offered: Workers of all nodes together.
        max_workers: Of this process, however many nodes there come to be; 0 for no limit.
    """

    num_workers: int
    is_iterable: bool = False
    prefetch_factor: int = 2
    in_order: bool = True
    max_in_flight_bytes: int = 2**30
    max_retries: int = 3
    task_timeout: float | None = None
    reconnect_timeout: float = 300.0
    marks_last_try: bool = False
    leaves_out: bool = False
    label: str = ""
    rank: int = 0
    world_size: int = 1
    num_offered: int = 0
    max_workers: int = 0
