"""The order of a pass as plain values: the ranks, and what decides about the samples that each of them takes.

A pass can be resumed in the middle only where these are the same: classes of samplers, and their attributes that decide
about the order. Pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any

# Names of samplers' attributes for rank and number of ranks: torch's, Accelerate's, and others'.
_RANKS = (("rank", "num_replicas"), ("process_index", "num_processes"), ("rank", "world_size"))

# Other attributes that decide about the samples, where they are plain numbers. drop_last and the like only change the
# end of the order.
_VALUES = ("batch_size", "split_batches", "seed", "initial_seed", "shuffle", "replacement", "num_samples")

# Attributes that hold the source of a sampler.
_SOURCES = ("data_source", "dataset", "indices", "weights")

# Samplers with the same order on all ranks, without any generator.
_ORDERED = ("SequentialSampler", "list", "tuple", "range")

_RESUMABLE = "ResumableDistributedSampler"

# Its state checks the plan, and continues with any number of ranks.
_PLANNED = "CostBatchSampler"

# ``ranks``: rank and number of ranks, for each pair that decides about the samples. ``samplers``: their descriptions,
# from the outermost to the innermost; none for an iterable-style dataset. ``order``: that of all ranks together, for a
# ResumableDistributedSampler; None if the sampler does not know it.
Order = Mapping[str, Any]


def describe_sampler(sampler: Any) -> dict[str, Any]:
    """Describe a sampler."""
    found: dict[str, Any] = {"kind": type(sampler).__qualname__}
    for names in _RANKS:
        rank, num_ranks = (_plain(getattr(sampler, name, None)) for name in names)
        if rank is not None and num_ranks is not None:
            found |= {"rank": rank, "num_ranks": num_ranks}
            break
    for name in _VALUES:
        if (value := _plain(getattr(sampler, name, None))) is not None:
            found[name] = value
    source = next((getattr(sampler, name) for name in _SOURCES if hasattr(sampler, name)), None)
    if source is None and found["kind"] in _ORDERED:
        source = sampler
    if isinstance(source, Sized):
        with contextlib.suppress(Exception):  # it has none after all
            found["length"] = len(source)
    if (epoch := _plain(getattr(sampler, "epoch", None))) is not None:
        if hasattr(sampler, "set_epoch"):
            found["set_epoch"] = epoch
        elif not hasattr(sampler, "load_state_dict"):
            found["epoch"] = epoch
    return found


def _plain(value: Any) -> int | None:
    return value if type(value) in (int, bool) else None


def check_order(saved: Order, here: Order, *, in_step: bool | None = None) -> None:
    """Check that a state suits the order here.

    Args:
        saved: Order of the state, with the ``order`` of all ranks together, if its sampler knows it.
        here: The same of this loader.
        in_step: True if all ranks had delivered batches of the same numbers; None before the pass begins, when this
            process may not know its rank and its epoch yet.

    Raises:
        ValueError: The ranks here draw other samples, or this rank does; the text says what to do.
    """
    is_resumable = _RESUMABLE in [sampler["kind"] for sampler in here["samplers"][-1:]]
    is_planned = _kinds(saved) == _kinds(here) == _PLANNED
    if not is_planned and (None in (saved["order"], here["order"]) or not is_resumable):
        _check_samplers(saved, here, ["rank", "num_ranks", "set_epoch", *(["epoch"] if in_step is None else [])])
    if in_step is not None and saved["ranks"] != here["ranks"] and (reason := _needs_own(saved, in_step=in_step)):
        remedy = f"{reason}, so save a state on each rank, and load it there"
        raise _refused(_in_words(saved), _in_words(here), remedy)


def _check_samplers(saved: Order, here: Order, ignored: Sequence[str]) -> None:
    kinds, kinds_here = _kinds(saved), _kinds(here)
    num_ranks, num_here = ([number for _rank, number in order["ranks"]] for order in (saved, here))
    if kinds != kinds_here or num_ranks != num_here:
        same = "the same samplers" if num_ranks == num_here else f"as many ranks as before, {num_ranks[0]}"
        was, is_here = f"{kinds} on {_in_words(saved)}", f"{kinds_here} on {_in_words(here)}"
        raise _refused(was, is_here, f"go on with {same}{_other_way(saved)}")
    for one, other in zip(saved["samplers"], here["samplers"], strict=True):
        names = sorted(name for name in one.keys() | other.keys() if name not in ignored)
        if names := [name for name in names if one.get(name) != other.get(name)]:
            was, is_here = (
                f"{one['kind']}({', '.join(f'{name}={sampler.get(name)}' for name in names)})"
                for sampler in (one, other)
            )
            remedy = f"go on with the same {' and '.join(names).replace('_', ' ')}"
            raise _refused(was, is_here, remedy + (_other_way(saved) if names == ["batch_size"] else ""))


def _needs_own(saved: Order, *, in_step: bool) -> str:
    """The reason why each rank needs a state of its own; empty if it takes its part of one order."""
    samplers = saved["samplers"]
    if not in_step:
        # One rank is in step with itself.
        return "" if saved["ranks"] == [[0, 1]] else "each rank has delivered batches of other numbers"
    if not samplers:
        return "each rank has streams of its own"
    if any("num_ranks" in sampler for sampler in samplers) or samplers[-1]["kind"] in _ORDERED:
        return ""
    return f"{samplers[-1]['kind']} draws an order for each rank"


def _kinds(order: Order) -> str:
    return " over ".join(sampler["kind"] for sampler in order["samplers"]) or "an iterable-style dataset"


def _in_words(order: Order) -> str:
    return "rank " + " and ".join(f"{rank} of {number}" for rank, number in order["ranks"])


def _other_way(saved: Order) -> str:
    if not saved["samplers"]:
        return ", because each rank has streams of its own, or begin the epoch anew"
    if saved["order"] is not None:
        return f", or with a {_RESUMABLE}, which takes up this state with any number of ranks and batch size"
    if saved["samplers"][-1]["kind"] == _RESUMABLE:  # what is over it makes batches of its own
        return ""
    return f". An epoch that is begun with a {_RESUMABLE} can be continued with any number of ranks and batch size"


def _refused(saved: str, here: str, remedy: str) -> ValueError:
    return ValueError(f"this state is from the middle of an epoch of {saved}, and here is {here}: {remedy}")
