"""Streams of iterable-style datasets that go on with another number of ranks: dealt out anew, each as it was. Pure.

A stream's dataset has chosen its samples by rank, world size, worker id and number of workers, and its random numbers
come from these. A stream that goes on elsewhere therefore keeps its :class:`Identity`, whichever rank it is dealt to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rpcdataloader.client.sharing import Partition


class Identity(NamedTuple):
    """A stream as its dataset sees it.

    Attributes:
        job: RANK and WORLD_SIZE of the trainer that it began in; None for this one.
        partition: Rank and world size of its loader, which may be another one (``partition=``).
    """

    job: tuple[int, int] | None
    partition: tuple[int, int]
    worker_id: int
    num_workers: int
    base_seed: int


def identities_of(state: Mapping[str, Any]) -> list[Identity]:
    """The identity of each stream of a state."""
    if state.get("identities"):
        return [Identity(tuple(job), tuple(part), *rest) for job, part, *rest in state["identities"]]
    origin, num_streams = state["start"]["origin"], len(state["streams"])
    return [
        Identity(tuple(origin["job"]), tuple(origin["partition"]), number, num_streams, state["base_seed"])
        for number in range(num_streams)
    ]


def deal(
    states: Sequence[Mapping[str, Any]], partition: Partition, origin: Mapping[str, Any], *, is_iterable: bool
) -> Mapping[str, Any]:
    """Make the state that this rank goes on from, out of the states of all ranks.

    Args:
        states: In any order; checked one by one.
        origin: What ``state_dict`` says of this rank.

    Raises:
        ValueError: A rank is missing or there twice, ranks were in different epochs, or the streams cannot be dealt out
            evenly.
    """
    begun = [state for state in states if "start" in state]
    if not begun:
        return states[0]
    if len(begun) < len(states):
        raise ValueError(f"{len(states) - len(begun)} of the {len(states)} states are of ranks that had not begun")
    ranks = [tuple(state["start"]["origin"]["partition"]) for state in states]
    by_rank = {rank: state for (rank, _size), state in zip(ranks, states, strict=True)}
    if sorted(ranks) != [(rank, len(states)) for rank in range(len(states))]:
        found = ", ".join(f"{rank} of {size}" for rank, size in sorted(ranks))
        raise ValueError(f"give the states of all ranks, each once: these are of rank {found}")
    if partition.world_size == len(states):
        return by_rank[partition.rank]
    if not is_iterable:
        _check_in_step(states)
    if not is_iterable or all(state["finished"] for state in states):
        return by_rank[partition.rank % len(states)]
    if len(epochs := {state["epoch"] for state in states}) > 1:
        raise ValueError(f"the ranks were in different epochs when they were saved: {sorted(epochs)}")
    identities: list[Identity] = []
    streams: list[list[Any]] = []
    for _rank, state in sorted(by_rank.items()):
        identities += identities_of(state)
        # A rank that was at its end knows so; its streams may not, where their last batch was full.
        streams += [[*stream[:4], stream[4] or state["finished"]] for stream in state["streams"]]
    if len(streams) % partition.world_size:
        raise ValueError(
            f"{len(streams)} streams, those of {len(states)} ranks, cannot be dealt out evenly to "
            f"{partition.world_size} ranks: begin with a number of ranks that divides {len(streams)}"
        )
    size = len(streams) // partition.world_size
    mine = slice(partition.rank * size, (partition.rank + 1) * size)
    own = by_rank[partition.rank % len(states)]
    return {
        **own,
        "streams": streams[mine],
        "identities": [list(identity) for identity in identities[mine]],
        "turn": 0,
        "num_batches": sum(stream[1] for stream in streams[mine]),
        # Each rank has a limit of its own.
        "num_skipped": sum(state["num_skipped"] for state in states) // len(states),
        "whole": False,
        "finished": False,
        "start": {**own["start"], "origin": origin},
    }


def _check_in_step(states: Sequence[Mapping[str, Any]]) -> None:
    """Check that ranks that share one order have come as far in it as each other, so that any state is that of all."""
    places = [
        (state["num_batches"], state["whole"], state["finished"], (state["start"]["order"] or {}).get("start"))
        for state in states
    ]
    if len(set(places)) > 1 or not all(state["in_step"] for state in states):
        batches = ", ".join(str(state["num_batches"]) for state in states)
        raise ValueError(
            f"the ranks were not at the same batch when they were saved (after {batches} batches), or have left out "
            "whole batches: go on with as many ranks as before"
        )
