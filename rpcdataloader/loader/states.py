"""The state of a pass in a checkpoint, and resuming from it.

It has the states of the random generators at the beginning of the pass, and the number of delivered batches. To resume,
the sampler is started again in the same state and skips that many batches, without loading samples. A sampler with a
state of its own, as torchdata's, is queried after each batch and skips nothing. The state also has the order (see
``order``), so that inexact resuming is refused.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rpcdataloader.client.sharing import current_partition
from rpcdataloader.fetch.batch_loader import StreamState
from rpcdataloader.fetch.samples import is_batch, stopped
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.host.state import get_states, has_state, set_states, states_from_plain, states_to_plain
from rpcdataloader.loader.order import check_order, describe_sampler
from rpcdataloader.loader.plain import StateCopier, from_plain, is_plain, to_plain
from rpcdataloader.loader.sampler import ResumableDistributedSampler, Source, order_of
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.tasks import OTHER_ORDER, Progress, skip

logger = logging.getLogger("rpcdataloader.loader")

# Version 1 had neither ranks nor samplers; version 2 had no state before the first batch of a sampler with a state.
VERSION = 3

# Fields of a progress that a state has as they are.
_PLAIN = ("base_seed", "epoch", "num_batches", "num_samples", "turn", "leg", "num_skipped", "finished")


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
    if sampler_state is None and progress.first is not None and is_plain(indices := to_plain(progress.first[0])):
        # Before the first batch is delivered: the state after it, and that batch itself.
        first, sampler_state = indices, progress.first[1]
    return {
        "version": VERSION,
        **{name: getattr(progress, name) for name in _PLAIN},
        "sampler": _plain_states(sampler_state),
        "first": first,
        "ahead": {str(number): [*batch, _plain_states(state)] for number, (*batch, state) in progress.ahead.items()},
        "streams": [[*counts, owner, to_plain(state), ended] for *counts, owner, state, ended, _ in progress.streams],
        "digest": [stream.digest for stream in progress.streams] if settings.iterable else progress.digest,
        "in_step": progress.in_step and settings.in_order,
        # Nothing is left, though the consumer has not reached the end.
        "whole": progress.in_step and progress.num_batches == progress.end,
        "end": progress.end,
        "generators": _generator_states(settings),
        "start": {**progress.start, "order": order},
    }


def _plain_states(states: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """States of a sampler and its iterator, of which some were captured only."""
    if states is None:
        return None
    return {name: to_plain(state() if callable(state) else state) for name, state in states.items()}


def _check_version(state: Any) -> None:
    """Check that this is a state of this version.

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
    if state.get("version") != VERSION:
        raise ValueError(
            f"this is not a state of this version's RPCDataloader: its version is {state.get('version')!r}, not "
            f"{VERSION}"
        )


def _check_state(settings: PassSettings, state: Mapping[str, Any]) -> None:
    """Check that this loader can resume from a state of this version.

    Raises:
        ValueError: It is not a state of such a loader.
    """
    if "start" not in state:  # saved before the first pass
        return
    here = _capture_order(settings)
    saved_kind = _kind_of_dataset(state["start"], is_iterable=bool(state["streams"]))
    _check_same("dataset", saved_kind, _kind_of_dataset(here, is_iterable=settings.iterable))
    if is_midway(state):
        check_order(state["start"], here)
        if "sampler" in (state["sampler"] or {}):
            kinds = ("one without load_state_dict", "one with a state of its own")
            _check_same("sampler", kinds[1], kinds[any(map(_is_stateful, settings.samplers))])
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


def is_midway(state: Mapping[str, Any]) -> bool:
    """Whether a part of the pass was delivered, and a part may be left. Any pass can follow one without a rest."""
    if state["finished"] or state["whole"]:
        return False
    order = state["start"]["order"]
    return bool(state["num_batches"] or state["ahead"] or (order is not None and order["start"]))


def is_before_first(state: Mapping[str, Any]) -> bool:
    """Whether the state has the first batch of its pass, and the state of a sampler after it."""
    return state["first"] is not None


def is_at_end(state: Mapping[str, Any], start: Mapping[str, Any], *, uses_first: bool) -> bool:
    """Whether nothing is left of the saved pass behind its state, apart from a first batch that this has."""
    if state["whole"]:
        return True
    # Other ranks may not have left out the batches that this one has.
    is_own = state["start"]["ranks"] == start["ranks"] and not state["ahead"]
    return is_own and state["end"] == (1 if uses_first else state["num_batches"])


def end_source(settings: PassSettings, saved: Mapping[str, Any]) -> None:
    """Tell the source of a loader with a ``transform`` that its pass has ended, which it had not been told."""
    if isinstance(settings.sampler, Source) and saved["sampler"]:
        settings.sampler.load_state_dict({**from_plain(saved["sampler"]["sampler"]), "finished": True})


def has_as_many_ranks(state: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    """Whether the pass goes on with as many ranks as it was saved with."""
    before, here = ([number for _rank, number in order["ranks"]] for order in (state["start"], start))
    return before == here


def has_first(settings: PassSettings, state: Mapping[str, Any]) -> bool:
    """Whether a state from before the first batch is of this rank and these samplers, with their state after it."""
    if state["first"] is None or ("sampler" in state["sampler"] and not any(map(_is_stateful, settings.samplers))):
        return False
    here = _capture_order(settings)
    try:
        check_order(state["start"], here)
    except ValueError:
        return False
    return bool(state["start"]["ranks"] == here["ranks"])


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
    ranks = _capture_order(settings)["ranks"]
    own = next((state for state in states if "start" in state and state["start"]["ranks"] == ranks), states[0])
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
    """Capture the state at the beginning of a pass."""
    return {
        "global": states_to_plain(get_states()),
        "generators": _generator_states(settings),
        **_capture_order(settings),
    }


def _capture_order(settings: PassSettings) -> dict[str, Any]:
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
    start = saved["start"]
    set_states(states_from_plain(start["global"]))
    _restore_generators(settings, start["generators"])
    # The order of the saved pass; the user may have chosen another since, or none.
    for sampler, before in zip(settings.chain, start["samplers"], strict=False):
        if type(sampler).__qualname__ == before["kind"] and "set_epoch" in before and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(before["set_epoch"])
    if (resumable := settings.resumable) is not None and (order := start["order"]) is not None:
        own = resumable.state_dict()
        is_same = order["length"] == len(resumable.dataset)  # type: ignore[arg-type]  # it has one
        if is_same or is_midway(saved):  # a beginning, or an end, fits another length
            resumable.load_state_dict(order)
    new = {**start, **_capture_order(settings)}
    if is_midway(saved):
        try:
            check_order(start, new, in_step=saved["in_step"])
            if saved["ahead"] and start["ranks"] != new["ranks"]:
                raise ValueError("the state is of in_order=False, with batches missing: go on with the same ranks")
        except ValueError:
            if resumable is not None:  # an epoch that begins anew has all samples
                resumable.load_state_dict(own)
            raise
    return new


def begin_sampler(settings: PassSettings, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """Iterate over the sampler; from its own saved state, if it has one.

    Raises:
        ValueError: Its iterator has no state here.
    """
    state = state or {}
    if "sampler" in state:
        load_sampler(settings, state)
    samples: Any = iter(settings.sampler)
    if "iterator" in state:
        if not _is_stateful(samples):
            raise ValueError("the state is of a sampler whose iterator has load_state_dict, but here it has none")
        samples.load_state_dict(from_plain(state["iterator"]))
    return samples  # type: ignore[no-any-return]


def load_sampler(settings: PassSettings, state: Mapping[str, Any]) -> None:
    """Load the saved state of the sampler itself."""
    next(filter(_is_stateful, settings.samplers)).load_state_dict(from_plain(state["sampler"]))


def progress_of(saved: Mapping[str, Any], start: dict[str, Any]) -> Progress:
    """The progress of a saved pass."""
    digests = iter(saved.get("digest") or itertools.repeat(None)) if saved["streams"] else iter(())
    is_compared = "digest" in saved  # users remove it
    sampler = from_plain(saved["sampler"])
    return Progress(
        **{name: saved[name] for name in _PLAIN},
        sampler=None if is_before_first(saved) else sampler,
        first=(from_plain(saved["first"]), sampler) if is_before_first(saved) else None,
        ahead={
            int(number): (size, digest if is_compared else None, from_plain(state))
            for number, (size, digest, state) in saved["ahead"].items()
        },
        digest=None if saved["streams"] else saved.get("digest"),
        streams=[
            StreamState(num_samples, num_batches, owner, from_plain(state), ended, next(digests))
            for num_samples, num_batches, owner, state, ended in saved["streams"]
        ],
        in_step=saved["in_step"],
        start=start,
    )


def skip_delivered(
    settings: PassSettings, progress: Progress, saved: Mapping[str, Any], samples: Iterator[Any]
) -> Iterator[Any]:
    """Return the rest of a sampler that has just begun, and complete the progress of its saved pass.

    Raises:
        ValueError: The sampler is too short, or gives other samples.
    """
    if saved["streams"]:
        return samples
    # A ResumableDistributedSampler begins at the position of all ranks, and so does a sampler with a state.
    begins_there = settings.resumable is not None or progress.sampler is not None
    num_batches = 0 if begins_there else progress.num_batches
    num_samples, digest = skip(samples, num_batches, auto_collation=settings.auto_collation)
    if settings.resumable is not None:
        progress.num_samples = 0
    if begins_there:
        return samples
    if num_samples != progress.num_samples:
        raise ValueError(
            f"the saved pass had delivered {progress.num_samples} samples in {num_batches} batches, but the sampler "
            f"gives {num_samples} in as many now: have dataset, batch size or sampler changed?"
        )
    # The state may be that of another rank, which has taken its own part of the same order.
    is_own = saved["start"]["ranks"] == progress.start["ranks"]
    if is_own and progress.digest not in (None, digest):
        raise ValueError(OTHER_ORDER)
    if progress.digest is not None:
        progress.digest = digest
    return samples


def end_pass(settings: PassSettings, saved: Mapping[str, Any]) -> None:
    """Bring the loader's own generators and its sampler to their state after a saved pass of which nothing is left."""
    if saved["sampler"] is not None and not isinstance(settings.sampler, Source):
        chosen = [getattr(sampler, "epoch", None) for sampler in settings.chain]  # for the next pass
        with generators_restored():
            set_states(states_from_plain(saved["start"]["global"]))
            _restore_generators(settings, saved["start"]["generators"])
            try:
                samples = begin_sampler(settings, saved["sampler"])
            except Exception:  # another sampler, which begins anew
                logger.debug("the sampler takes no state of the last epoch", exc_info=True)
            else:
                # To its end, where samplers change to the next epoch; unless its end is the beginning of that, as for
                # those that count what they have given in all epochs.
                if not _is_end(samples, saved) and "sampler" in saved["sampler"]:
                    load_sampler(settings, saved["sampler"])
        for sampler, epoch, before in zip(settings.chain, chosen, saved["start"]["samplers"], strict=False):
            # Unless the sampler counts its epochs itself.
            if hasattr(sampler, "set_epoch") and getattr(sampler, "epoch", epoch) == before.get("set_epoch") != epoch:
                sampler.set_epoch(epoch)
    _restore_generators(settings, saved["generators"])


def _is_end(samples: Iterator[Any], saved: Mapping[str, Any]) -> bool:
    """Whether nothing is left but the incomplete batch that ``drop_last`` left out; draws what there is of that."""
    size = saved["start"]["samplers"][0].get("batch_size", 1)
    left = size - 1 if saved["num_samples"] == saved["num_batches"] * size else 0
    for indices in samples:
        left -= len(indices) if is_batch(indices) else 1
        if left < 0:
            return False
    return True


def _generator_states(settings: PassSettings) -> list[str]:
    return [generator.get_state().numpy().tobytes().hex() for generator in settings.own_generators]


def _restore_generators(settings: PassSettings, states: Iterable[str]) -> None:
    for generator, state in zip(settings.own_generators, states, strict=True):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def sampler_state(settings: PassSettings, samples: Iterator[Any]) -> Callable[[], Any] | None:
    """Return a function that gives the states of the sampler and its iterator; None if neither has one of its own."""
    if settings.iterable or settings.resumable is not None:
        return None
    sampler = next(filter(_is_stateful, settings.samplers), None)
    owners: dict[str, Any] = {"sampler": sampler, "iterator": samples if _is_stateful(samples) else None}
    stateful = {name: owner for name, owner in owners.items() if owner is not None}
    copier = StateCopier()

    def get_state() -> dict[str, Any]:
        if isinstance(sampler, Source):
            return {"sampler": sampler.capture()}
        # The sampler may go on changing the same object.
        try:
            return {name: copier.copy(owner.state_dict(), (name,)) for name, owner in stateful.items()}
        except StopIteration as stop:
            raise stopped("state_dict() of the sampler") from stop

    return get_state if stateful else None


def _is_stateful(value: Any) -> bool:
    # Ours knows its position, or cannot know it.
    is_ours = isinstance(value, ResumableDistributedSampler)
    return has_state(value) and not is_ours
