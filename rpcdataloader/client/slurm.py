"""Which rank Slurm gave this process, read from the environment of its step. Pure.

Only what ``srun`` started has one: the shell of a batch script says ``SLURM_PROCID=0`` and ``SLURM_NTASKS=8`` as well,
and is alone. The variables that begin with ``SLURM_STEP`` are those of steps.
"""

from __future__ import annotations

from collections.abc import Mapping


def rank_of_step(environ: Mapping[str, str], is_terminal: bool) -> tuple[int, int] | None:
    """Rank and world size of this process in its step; None if it is in none.

    Of a step over all components of a heterogeneous job (``srun A : B``), the tasks of one component count: the others
    run another program. A process that cannot tell them apart, in a job without script and ``salloc``, counts all.

    Args:
        environ: Of the process.
        is_terminal: Whether somebody types into its standard input. The shell of ``srun --pty bash`` is a task, but
            what is tried in it is no rank. What a step from there starts is one; it inherits ``SLURM_PTY_PORT``.

    Raises:
        ValueError: A variable holds no number.
    """
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if not all(name in environ for name in names) or (is_terminal and "SLURM_PTY_PORT" in environ):
        return None
    rank, world_size = int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"])
    tasks = _of_components(environ, "SLURM_NTASKS")
    nodes = _of_components(environ, "SLURM_JOB_NUM_NODES")
    # Components share no node: a step on as many nodes as all have is one over all of them. Ranks follow their order.
    if len(tasks) > 1 and sum(tasks) == world_size and sum(nodes) == int(environ.get("SLURM_STEP_NUM_NODES", 0)):
        for count in tasks:
            if rank < count:
                return rank, count
            rank -= count
    return rank, world_size


def _of_components(environ: Mapping[str, str], name: str) -> list[int]:
    """What a variable says of each component of a heterogeneous job; nothing if it is missing for one."""
    keys = [f"{name}_HET_GROUP_{k}" for k in range(int(environ.get("SLURM_HET_SIZE", 0)))]
    return [int(environ[key]) for key in keys] if all(key in environ for key in keys) else []
