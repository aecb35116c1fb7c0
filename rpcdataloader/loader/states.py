"""The state of a pass in a checkpoint: what is in it, and whether it fits a loader.

It has the states of the random generators at the beginning of the pass, and what was delivered since. How the rest is
found again is the sampler's way (see ``ways``). The state also has the order (see ``order``), so that inexact resuming
is refused.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from rpcdataloader.client.sharing import current_partition
from rpcdataloader.fetch.batch_loader import StreamState
from rpcdataloader.host.signals import suppress_errors
from rpcdataloader.host.state import get_states, set_states, states_from_plain, states_to_plain
from rpcdataloader.loader.order import check_order, describe_sampler
from rpcdataloader.loader.plain import from_plain, to_plain
from rpcdataloader.loader.sampler import Source, is_stateful, order_of
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.tasks import Progress, join_digests

logger = logging.getLogger("rpcdataloader.loader")

# Version 1 had neither ranks nor samplers; version 2 had no state before the first batch of a sampler with a state;
# version 3 had no streams of the pass before, and no states of samplers inside; version 4 had no first batch of these;
# version 5 told of the next batch alone, not of all that were drawn.
VERSION = 6
OLDEST = 4  # that can be read

# In place of the digest of a first batch that can be read only once.
UNKNOWN = -1

# Fields of a progress that a state has as they are.
_PLAIN = ("base_seed", "epoch", "num_batches", "num_samples", "turn", "leg", "num_skipped", "finished")


def to_first_state(settings: PassSettings) -> dict[str, Any]:
    """Return the state before the first pass, which draws from the loader's own generators."""
    # Keys of later states, too: of a checkpoint, torch.distributed.checkpoint loads only those that are here.
    start = {"ranks": capture_order(settings)["ranks"]}
    return {"version": VERSION, "base_seed": None, "start": start, "generators": _generator_states(settings)}


def has_begun(state: Mapping[str, Any]) -> bool:
    """Whether this is the state of a pass, not of the time before the first one."""
    return state.get("base_seed") is not None


def to_state(settings: PassSettings, progress: Progress) -> dict[str, Any]:
    """Return the state of a pass: plain containers, numbers and strings, apart from states of other objects."""
    if progress.ahead and settings.resumable is not None:
        raise ValueError("a ResumableDistributedSampler cannot be saved with in_order=False: batches are missing")
    order, sampler = progress.start["order"], settings.distributed
    if order is not None and sampler is not None:
        # Position of all ranks together in the order.
        consumed = order["start"] + progress.num_samples * sampler.num_replicas
        order = None if progress.ahead else {**order, "start": min(consumed, order["length"])}
    sampler_state, first = progress.sampler, None
    num_drawn = None if progress.finished else progress.num_batches  # None for the end of the pass
    if sampler_state is None and progress.first is not None:
        # Before the first batch is delivered: the state after it, and that batch itself, unless it cannot be copied.
        with suppress_errors():
            first, sampler_state, num_drawn = to_plain(progress.first[0]), progress.first[1], 1
    return {
        "version": VERSION,
        **{name: getattr(progress, name) for name in _PLAIN},
        "sampler": _plain_states(sampler_state, at_end=num_drawn in (None, progress.end)),
        "first": first,
        "ahead": {
            str(number): [*batch, _plain_states(state, at_end=number + 1 == progress.end)]
            for number, (*batch, state) in progress.ahead.items()
        },
        "streams": list(map(_plain_stream, progress.known_streams())),
        "before": list(map(_plain_stream, progress.before)),
        "digest": [stream.digest for stream in progress.streams] if settings.iterable else progress.digest,
        "drawn": list(progress.drawn()),
        "in_step": progress.in_step and settings.in_order,
        # Nothing is left, though the consumer has not reached the end.
        "whole": progress.in_step and progress.num_batches == progress.end,
        "end": progress.end,
        "last": progress.last if settings.in_order else None,
        "generators": _generator_states(settings),
        "start": {**progress.start, "global": states_to_plain(progress.start["global"]), "order": order},
    }


def _plain_stream(stream: StreamState) -> list[Any]:
    return [stream.num_samples, stream.num_batches, stream.owner, to_plain(stream.state), stream.ended, stream.at]


def streams_of(saved: list[list[Any]]) -> list[StreamState]:
    """The states of streams in a saved state, without digests."""
    return [
        StreamState(num_samples, num_batches, owner, from_plain(state), ended, at=at)
        for num_samples, num_batches, owner, state, ended, at in saved
    ]


def with_earlier(states: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """States of a sampler and its iterator, with those from before the last batch, which count at the end of a pass."""
    return {**states, "earlier": earlier}


def is_early(states: Mapping[str, Any]) -> bool:
    """Whether saved states of a sampler and its iterator are from before the last batch of their pass."""
    return bool(states.get("is_early"))


def ended_streams(saved: Mapping[str, Any]) -> list[StreamState]:
    """The states of streams that were all read to their ends."""
    return [stream._replace(ended=True) for stream in streams_of(saved["streams"])]


def _plain_states(states: Mapping[str, Any] | None, *, at_end: bool) -> dict[str, Any] | None:
    """States of a sampler and its iterator, of which some were captured only."""
    if states is None:
        return None
    if at_end and (earlier := states.get("earlier")) is not None:
        states = {**earlier, "is_early": True}
    return {
        name: to_plain(state() if callable(state) else state) for name, state in states.items() if name != "earlier"
    }


def _check_version(state: Any) -> None:
    """Check that this is a state of a version that can be read.

    Raises:
        TypeError: It is not a mapping.
        ValueError: It is of another version or loader.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state_dict must be what state_dict() returned, or a list of what it returned on all ranks, but is a "
            f"{type(state).__name__}"
        )
    if "_iterator_finished" in state and "version" not in state:  # Accelerate adds it to states of this loader
        raise ValueError(
            "this is a state of torchdata's StatefulDataLoader, which an RPCDataloader cannot continue: begin the "
            "epoch anew without it, or end the epoch with the StatefulDataLoader"
        )
    if state.get("version") not in range(OLDEST, VERSION + 1):
        raise ValueError(
            f"this is not a state that this RPCDataloader can read: its version is {state.get('version')!r}, not "
            f"{OLDEST} to {VERSION}; end its epoch with the package that saved it, or begin the epoch anew without it"
        )
    of_pass = {*_PLAIN} - {"base_seed"}
    is_of_pass = has_begun(state) and state.keys() >= of_pass
    is_first = not has_begun(state) and state.keys().isdisjoint(of_pass) and state.keys() >= {"start", "generators"}
    if not (is_of_pass or is_first):
        raise ValueError(
            "this is only a part of a state, as torch.distributed.checkpoint loads it into a loader that has no pass "
            "yet: save pickle.dumps(loader.state_dict()) there, under a name for each rank"
        )


def _completed(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state with what those of earlier versions lack, as far as they tell it.

    Raises:
        ValueError: It does not tell enough to go on exactly.
    """
    if not has_begun(state) or "drawn" in state:
        return state
    num_batches, following, start = state["num_batches"], state["next"], state["start"]
    if type(inside := start.get("inside")) is list:
        if inside and state["sampler"] is None and place_of(state) != "middle":
            raise ValueError(
                f"this state of version {state['version']} is not from the middle of an epoch, and does not tell where "
                "the samplers inside of the batch sampler are then: load one from the middle, or begin an epoch "
                "without it"
            )
        start = {**start, "inside": {"states": inside, "first": UNKNOWN}}
    drawn = [num_batches, None] if following is None else [num_batches + 1, join_digests(0, following)]
    return {"last": None, **state, "start": start, "drawn": drawn}


def _check_state(settings: PassSettings, state: Mapping[str, Any]) -> None:
    """Check that this loader can resume from a state of this version.

    Raises:
        ValueError: It is not a state of such a loader.
    """
    here = capture_order(settings)
    if has_begun(state):
        saved_kind = _kind_of_dataset(state["start"], is_iterable=bool(state["streams"]))
        _check_same("dataset", saved_kind, _kind_of_dataset(here, is_iterable=settings.iterable))
    if has_begun(state) and place_of(state) == "middle":
        check_order(state["start"], here)
        if "sampler" in (state["sampler"] or {}):
            kinds = ("one without load_state_dict", "one with a state of its own")
            _check_same("sampler", kinds[1], kinds[any(map(is_stateful, settings.samplers))])
    num_saved, num_here = len(state["generators"]), len(settings.own_generators)
    if num_saved != num_here:
        raise ValueError(
            f"the state is of a loader whose samplers draw from {num_saved} generators of their own, but here there "
            f"are {num_here}: give it generator= as before"
        )


def _kind_of_dataset(order: Mapping[str, Any], *, is_iterable: bool) -> str:
    if any(sampler["kind"] == Source.__qualname__ for sampler in order["samplers"]):
        return "an iterable-style dataset with a transform"
    return "an iterable-style dataset" if is_iterable else "a map-style dataset"


def place_of(state: Mapping[str, Any]) -> Literal["begin", "middle", "end"]:
    """Where in a pass it was saved: only a middle must find its own pass again, while any can follow an end."""
    if state["finished"] or state["whole"]:
        return "end"
    order = state["start"]["order"]
    is_begun = state["num_batches"] or state["ahead"] or (order is not None and order["start"])
    return "middle" if is_begun else "begin"


def is_at_end(state: Mapping[str, Any], start: Mapping[str, Any], *, knows_first: bool) -> bool:
    """Whether the sampler has nothing left of the saved pass after its state there."""
    if state["whole"]:
        return True
    # Other ranks may not have left out the batches that this one has.
    is_own = state["start"]["ranks"] == start["ranks"] and not state["ahead"]
    return is_own and state["end"] == (1 if knows_first else state["num_batches"])


def has_as_many_ranks(state: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    """Whether the pass goes on with as many ranks as it was saved with."""
    before, here = ([number for _rank, number in order["ranks"]] for order in (state["start"], start))
    return before == here


def _check_same(what: str, saved: str, here: str) -> None:
    if saved != here:
        raise ValueError(f"the state is of a loader with {saved}, but the {what} here is {here}")


def state_of_rank(settings: PassSettings, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the state from which this rank resumes: its own, or one that is checked as if it were.

    Raises:
        TypeError: A state is not a mapping.
        ValueError: The list is empty, or the state is of another kind.
    """
    if isinstance(states, Mapping) or not isinstance(states, Sequence):
        states = [states]
    if not states:
        raise ValueError("state_dict is an empty list: give the states of all ranks")
    for state in states:
        _check_version(state)
    states = [*map(_completed, states)]
    ranks = capture_order(settings)["ranks"]
    own = next((state for state in states if state["start"]["ranks"] == ranks), states[0])
    _check_state(settings, own)
    return own


def check_one_stream(saved: Mapping[str, Any]) -> None:
    """Check that a single iterator over the dataset can resume from a state.

    Raises:
        ValueError: It has several streams.
    """
    if len(saved["streams"]) > 1 and not saved["finished"]:
        raise ValueError(
            f"the state is of {len(saved['streams'])} workers, and an iterable-style dataset goes on with as many as "
            "it began with; workers='inline' is one"
        )


def capture_start(settings: PassSettings) -> dict[str, Any]:
    """Capture the state at the beginning of a pass; its global generators become plain in :func:`to_state`."""
    return {"global": get_states(), "generators": _generator_states(settings), **capture_order(settings)}


def capture_order(settings: PassSettings) -> dict[str, Any]:
    """Describe the order, see :data:`rpcdataloader.loader.order.Order`."""
    samplers = [] if settings.iterable else [describe_sampler(sampler) for sampler in settings.chain]
    ranks = [[sampler["rank"], sampler["num_ranks"]] for sampler in samplers if "num_ranks" in sampler]
    if not ranks:
        # The process's, and those that the loader was given, which are usually equal.
        pairs = [(each.rank, each.world_size) for each in (current_partition(), settings.partition)]
        ranks = [list(pair) for pair in dict.fromkeys(pairs)]
    order: dict[str, Any] | None = None
    if settings.resumable is not None:
        order = settings.resumable.state_dict()
    elif (sampler := settings.distributed) is not None:
        order = order_of(sampler, len(sampler.dataset), 0)  # type: ignore[arg-type]  # it has one
    return {"ranks": ranks, "samplers": samplers, "order": order}


def restore_start(settings: PassSettings, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Bring generators, also the global ones, and samplers to the beginning of the saved pass; returns the new start.

    Raises:
        ValueError: Another rank draws another order.
    """
    start, place = saved["start"], place_of(saved)
    restore_generators(settings, saved, of_start=True)
    restore_epochs(settings, saved)
    if (resumable := settings.resumable) is not None and (order := start["order"]) is not None:
        own = resumable.state_dict()
        is_same = order["length"] == len(resumable.dataset)  # type: ignore[arg-type]  # it has one
        if is_same or place == "middle":  # a beginning, or an end, fits another length
            resumable.load_state_dict(order)
    new = {**start, "global": states_from_plain(start["global"]), **capture_order(settings)}
    if place == "middle":
        try:
            check_order(start, new, in_step=saved["in_step"])
            if saved["ahead"] and start["ranks"] != new["ranks"]:
                raise ValueError("the state is of in_order=False, with batches missing: go on with the same ranks")
        except ValueError:
            if resumable is not None:  # an epoch that begins anew has all samples
                resumable.load_state_dict(own)
            raise
    return new


def restore_epochs(settings: PassSettings, saved: Mapping[str, Any]) -> None:
    """Give samplers the epochs of the saved pass; the user may have chosen others since, or none."""
    for sampler, before in zip(settings.chain, saved["start"]["samplers"], strict=False):
        if type(sampler).__qualname__ == before["kind"] and "set_epoch" in before and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(before["set_epoch"])


def progress_of(saved: Mapping[str, Any], start: dict[str, Any]) -> Progress:
    """The progress of a saved pass."""
    digests = iter(saved.get("digest") or itertools.repeat(None)) if saved["streams"] else iter(())
    is_compared = "digest" in saved  # users remove it
    sampler = from_plain(saved["sampler"])
    return Progress(
        **{name: saved[name] for name in _PLAIN},
        sampler=sampler if saved["first"] is None else None,
        first=None if saved["first"] is None else (from_plain(saved["first"]), sampler),
        ahead={
            int(number): (size, digest if is_compared else None, from_plain(state))
            for number, (size, digest, state) in saved["ahead"].items()
        },
        digest=None if saved["streams"] else saved.get("digest"),
        streams=[stream._replace(digest=next(digests)) for stream in streams_of(saved["streams"])],
        before=streams_of(saved["before"]),
        in_step=saved["in_step"],
        last=saved["last"],
        start=start,
    )


def _generator_states(settings: PassSettings) -> list[str]:
    return [generator.get_state().numpy().tobytes().hex() for generator in settings.own_generators]


def restore_generators(settings: PassSettings, saved: Mapping[str, Any], *, of_start: bool = False) -> None:
    """Restore the loader's own generators; those of the beginning of the pass with the global ones."""
    if of_start:
        set_states(states_from_plain(saved["start"]["global"]))
    states = saved["start"]["generators"] if of_start else saved["generators"]
    for generator, state in zip(settings.own_generators, states, strict=True):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
