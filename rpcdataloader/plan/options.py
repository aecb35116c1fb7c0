"""What the user has chosen of a pass, as far as it decides anything. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user has chosen of all this.

    Attributes:
        num_workers: Workers of this process when the pass begins; streams of an iterable-style dataset.
        is_iterable: The dataset is iterable-style.
        prefetch_factor: Tasks per worker that are asked for in advance.
        in_order: Batches are delivered in the order of the sampler.
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
