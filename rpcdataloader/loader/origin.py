"""The origin of a saved state: its rank and number of ranks, its samples, and their order.

A pass can be resumed in the middle only where these are the same. They are compared as plain values in the state:
classes of samplers, and their attributes that decide about the order.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
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

# Continues a pass of any number of ranks.
RESUMABLE = "ResumableDistributedSampler"

_RANK_KEYS = {"kind", "rank", "num_ranks", "set_epoch"}


@dataclass(frozen=True, slots=True)
class Origin:
    """The ranks and samplers of a pass."""

    job: list[int]  # rank and world size of the process
    partition: list[int]  # rank and world size that the loader was given; usually equal to ``job``
    # Description of the order, from the outermost sampler to the innermost. Empty for an iterable-style dataset.
    samplers: list[dict[str, Any]]
    # True if all ranks together take the samples of one order in turn, and a state knows the place in it.
    one_order: bool = False

    @property
    def kinds(self) -> list[str]:
        """Classes of the samplers."""
        return [sampler["kind"] for sampler in self.samplers]

    @property
    def ranks(self) -> list[list[int]]:
        """Rank and number of ranks, for each pair that decides about the samples."""
        found = [[sampler["rank"], sampler["num_ranks"]] for sampler in self.samplers if "num_ranks" in sampler]
        return found or ([self.job] if self.job == self.partition else [self.job, self.partition])

    @property
    def num_ranks(self) -> list[int]:
        return [number for _rank, number in self.ranks]

    @property
    def place(self) -> str:
        """The ranks in words."""
        return "rank " + " and ".join(f"{rank} of {number}" for rank, number in self.ranks)


def describe_sampler(sampler: Any) -> dict[str, Any]:
    """Describe the order of a sampler."""
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
        found["length"] = len(source)
    if (epoch := _plain(getattr(sampler, "epoch", None))) is not None:
        if hasattr(sampler, "set_epoch"):
            found["set_epoch"] = epoch
        elif not hasattr(sampler, "load_state_dict"):
            found["epoch"] = epoch
    return found


def _plain(value: Any) -> int | None:
    return value if type(value) in (int, bool) else None


def check_order(saved: Origin, here: Origin, *, epochs: bool = True) -> None:
    """Check that the same number of ranks draw the same samples here, in the same order.

    Args:
        epochs: True to compare the epoch counters of samplers, too.

    Raises:
        ValueError: They draw others.
    """
    if saved.one_order and here.one_order and here.kinds[-1] == RESUMABLE:
        # Any number of ranks can continue, with any batch size.
        return
    kinds, kinds_here = (" over ".join(origin.kinds) or "an iterable-style dataset" for origin in (saved, here))
    if kinds != kinds_here or saved.num_ranks != here.num_ranks:
        raise _refused(f"{kinds} on {saved.place}", f"{kinds_here} on {here.place}", _remedy(saved, here, "samplers"))
    ignored = _RANK_KEYS if epochs else {*_RANK_KEYS, "epoch"}
    for one, other in zip(saved.samplers, here.samplers, strict=True):
        names = sorted(name for name in one.keys() | other.keys() if name not in ignored)
        names = [name for name in names if one.get(name) != other.get(name)]
        if names:
            was, is_here = (
                f"{one['kind']}({', '.join(f'{name}={sampler.get(name)}' for name in names)})"
                for sampler in (one, other)
            )
            what = " and ".join(names).replace("_", " ")
            remedy = _remedy(saved, here, what) if names == ["batch_size"] else f"go on with the same {what}"
            raise _refused(was, is_here, remedy)


def check_rank(saved: Origin, here: Origin, *, in_step: bool) -> None:
    """Check that the state of one rank suits this one.

    Args:
        in_step: True if all ranks had delivered batches of the same numbers.

    Raises:
        ValueError: It does not, so that each rank needs its own.
    """
    if saved.ranks == here.ranks or (not in_step and saved.num_ranks == [1]):
        return
    if not in_step:
        why = "with in_order=False, or where whole batches were left out, each rank has delivered different ones"
    elif not saved.samplers:
        why = "each rank has streams of its own"
    elif any("num_ranks" in sampler for sampler in saved.samplers) or saved.kinds[-1] in _ORDERED:
        return  # each rank takes its part of one order
    else:
        why = f"{saved.kinds[-1]} draws an order for each rank"
    raise _refused(saved.place, here.place, f"{why}, so save a state on each rank, and load it there")


def _remedy(saved: Origin, here: Origin, what: str) -> str:
    same = f"go on with the same {what}"
    if saved.num_ranks != here.num_ranks:
        same = f"go on with as many ranks as before, {saved.num_ranks[0]}"
    if not saved.samplers:
        return f"each rank has streams of its own, so {same}, or begin the epoch anew"
    if saved.one_order:
        return f"{same}, or with a {RESUMABLE}, which takes up this state with any number of ranks and batch size"
    return f"{same}. An epoch that is begun with a {RESUMABLE} can be continued with any number of ranks and batch size"


def _refused(saved: str, here: str, remedy: str) -> ValueError:
    return ValueError(f"this state is from the middle of an epoch of {saved}, and here is {here}: {remedy}")
