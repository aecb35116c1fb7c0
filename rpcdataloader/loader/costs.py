"""Batches of equal cost on all ranks, for samples of different lengths: planned by each rank alone, all alike."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import itertools
import logging
import math
import operator
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import IterableDataset, Sampler

from rpcdataloader.client.mutable import MutableDataset
from rpcdataloader.client.sharing import current_partition
from rpcdataloader.fetch.samples import MAX_SHOWN, whereabouts
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.loader.dataloader import RPCDataloader
from rpcdataloader.loader.dataset import RPCDataset, access_of
from rpcdataloader.wire.by_value import main_globals
from rpcdataloader.wire.definitions import Table
from rpcdataloader.wire.digests import digest_memory
from rpcdataloader.wire.exceptions import add_note
from rpcdataloader.wire.frames import as_bytes
from rpcdataloader.wire.pickling import Encoded, dumps

logger = logging.getLogger("rpcdataloader.loader")

# Samples whose costs are one batch: a worker holds them all, and some are large. With this many, a sample's part of the
# batch's trip is at most 0.1 ms, which more would reduce by half; and a message shows the indices of them all.
_MEASURED_AT_ONCE = MAX_SHOWN

# Options with which the loader's batches are not those of all samples, in order.
_OTHER_SAMPLES = (
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "collate_fn",
    "drop_last",
    "in_order",
    "on_error",
    "transform",
)

Indices = NDArray[np.int64]

_Order = tuple[int, int, bool]  # epoch, seed, and whether samples are shuffled


class CostBatchSampler(Sampler[list[int]]):
    """Batches under a budget, such that at each step all ranks have batches of nearly equal cost.

    The samples of an epoch are shuffled, then sorted by cost within windows of the shuffled order, and cut into batches
    that use the budget up. Batches of similar cost, as many as there are ranks, make a step; the steps are shuffled.
    Every rank computes the same plan, without messages, and takes its own batch of each step. All ranks have as many
    batches. The samples of the last batches, fewer than ranks, are dealt out again to smaller ones.

    Pass it as ``batch_sampler=`` to an :class:`~rpcdataloader.RPCDataloader`, which includes its state in its own.
    Another number of ranks can continue an epoch, each sample once, from the state of any rank.

    Args:
        costs: Cost of each sample: lengths, tokens or pixels, shape ``(len(dataset),)``, all above 0.
        max_cost: Budget of a batch, in the same unit.
        padded: The cost of a batch is its largest sample times their number, as where all are padded to the longest;
            False for the sum, as for packed sequences.
        window: Samples of the shuffled order that are sorted together. A larger one wastes less for padding; a smaller
            one mixes batches more from epoch to epoch.
        num_replicas: Number of ranks; by default that of torch.distributed, or of the job.
        rank: Rank of this process.
        shuffle: Another order in each epoch, see ``set_epoch``; False for windows of the dataset's own order.
        seed: Seed of the order, the same on all ranks.
        drop_last: Leave out the last batches, fewer than ranks, instead of dealing their samples out again. (Fewer
            samples than ranks are repeated.)

    Raises:
        ValueError: ``costs`` is empty, not one-dimensional, or has a number that is not finite and above 0; a sample
            costs more than the budget; or an option is out of range.
    """

    def __init__(
        self,
        costs: ArrayLike,
        max_cost: float,
        *,
        padded: bool = True,
        window: int = 16_384,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.costs = _check_costs(costs, max_cost)
        here = current_partition()
        # Numbers of NumPy may come in; those of a state go into JSON.
        self.num_replicas = here.world_size if num_replicas is None else operator.index(num_replicas)
        self.rank = here.rank if rank is None else operator.index(rank)
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank must be between 0 and {self.num_replicas - 1}, but is {self.rank}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, but is {seed}")
        if window < 1:
            raise ValueError(f"window must be at least 1, but is {window}")
        self.max_cost = max_cost
        self.padded = padded
        self.window = window
        self.shuffle = shuffle
        self.seed = operator.index(seed)
        self.drop_last = drop_last
        self.epoch = 0
        # Once, as the loader takes a state for every batch.
        options = f"{float(max_cost)} {padded} {window} {drop_last}"
        self._fingerprint = hashlib.blake2b(self.costs.tobytes() + options.encode(), digest_size=8).hexdigest()
        # What was delivered of the epoch, before the next pass and up to now: numbers of ranks, and of steps, one after
        # the other.
        self._start: list[tuple[int, int]] = []
        self._past: list[tuple[int, int]] = []
        self._order: _Order = 0, 0, False  # of what was delivered up to now
        self._made: tuple[Any, list[list[Indices]]] = None, []  # the last plan, and what it was made of

    def __iter__(self) -> Iterator[list[int]]:
        self._past, self._start = self._start, []
        self._order = self.epoch, self.seed, self.shuffle
        return self._batches(self._past, self._order)

    def _batches(self, past: list[tuple[int, int]], order: _Order) -> Iterator[list[int]]:
        before, steps, start = self._steps_after(past, order)
        for number, step in enumerate(steps[start:], start + 1):
            self._past, self._order = [*before, (self.num_replicas, number)], order
            yield step[self.rank].tolist()
        self._past = []

    def __len__(self) -> int:
        """Number of this rank's batches in the next pass."""
        _before, steps, start = self._steps_after(self._start, (self.epoch, self.seed, self.shuffle))
        return len(steps) - start

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; a new epoch begins at its start."""
        if epoch != self.epoch:
            self._start = self._past = []
        self.epoch = operator.index(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`: plain numbers, the same on all ranks after the same step."""
        # A pass keeps the order that it began with, whatever was chosen for the next one.
        epoch, seed, shuffle = self._order if self._past else (self.epoch, self.seed, self.shuffle)
        return {
            "epoch": epoch,
            "seed": seed,
            "shuffle": shuffle,
            "past": [list(past) for past in self._past],
            "plan": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue after the step that was saved.

        Raises:
            ValueError: The state belongs to other costs, or to another budget, window or way of counting.
        """
        if state["plan"] != self._fingerprint:
            raise ValueError(
                "this state of a CostBatchSampler belongs to other costs, or to another max_cost, padded, window or "
                "drop_last: go on with the same ones, or begin the epoch anew"
            )
        self.epoch, self.seed, self.shuffle = self._order = state["epoch"], state["seed"], state["shuffle"]
        self._start = self._past = [(num_ranks, num_steps) for num_ranks, num_steps in state["past"]]

    def _steps_after(
        self, past: list[tuple[int, int]], order: _Order
    ) -> tuple[list[tuple[int, int]], list[list[Indices]], int]:
        """What other numbers of ranks have delivered, the steps that follow it, and the first that is left."""
        before, start = list(past), 0
        if before and before[-1][0] == self.num_replicas:
            start = before.pop()[1]
        origin = order, before
        if self._made[0] != origin:
            samples = np.arange(len(self.costs))
            for number, (num_ranks, num_steps) in enumerate(before):
                steps = self._plan(samples, order, num_ranks, number)[:num_steps]
                samples = np.setdiff1d(samples, np.concatenate([batch for step in steps for batch in step]))
            self._made = origin, self._plan(samples, order, self.num_replicas, len(before)) if len(samples) else []
        return before, self._made[1], start

    def _plan(self, samples: Indices, order: _Order, num_ranks: int, number: int) -> list[list[Indices]]:
        """Plan the steps of these samples, each a batch per rank; ``number`` counts the plans of an epoch."""
        epoch, seed, shuffle = order
        generator = torch.Generator()
        generator.manual_seed(int(np.random.SeedSequence([seed, epoch, number]).generate_state(1)[0]))
        if shuffle:
            samples = samples[torch.randperm(len(samples), generator=generator, device="cpu").numpy()]
        batches: list[Indices] = []
        for begin in range(0, len(samples), self.window):
            batches += self._cut(self._sorted(samples[begin : begin + self.window]), self.max_cost)
        # Stable, so that batches of equal cost stay in the shuffled order.
        by_cost = np.argsort([self._cost(batch) for batch in batches], kind="stable")
        num_left = len(batches) % num_ranks
        steps = [[batches[k] for k in row] for row in by_cost[num_left:].reshape(-1, num_ranks)]
        if shuffle:
            steps = [steps[k] for k in torch.randperm(len(steps), generator=generator, device="cpu").tolist()]
            # No rank gets the largest batch of every step.
            turns = torch.randint(num_ranks, (len(steps),), generator=generator, device="cpu").tolist()
            steps = [step[turn:] + step[:turn] for step, turn in zip(steps, turns, strict=True)]
        if num_left and not self.drop_last:
            steps.append(self._deal([batches[k] for k in by_cost[:num_left]], num_ranks))
        return steps

    def _sorted(self, samples: Indices) -> Indices:
        return samples[np.argsort(-self.costs[samples], kind="stable")]

    def _cost(self, batch: Indices) -> float:
        costs = self.costs[batch]
        return float(costs.max() * len(costs) if self.padded else costs.sum())

    def _cut(self, samples: Indices, budget: float) -> list[Indices]:
        """Cut samples, the most expensive first, into batches of at most this cost."""
        costs = self.costs[samples]
        total = np.cumsum(costs)
        budget *= 1 + 1e-9  # three times 0.1 is above 0.3
        cuts = [0]
        while (begin := cuts[-1]) < len(samples):
            if self.padded:
                end = begin + int(budget / costs[begin])
            else:
                end = int(np.searchsorted(total, budget + total[begin] - costs[begin], side="right"))
            cuts.append(min(max(end, begin + 1), len(samples)))
        return [samples[begin:end] for begin, end in itertools.pairwise(cuts)]

    def _deal(self, left: list[Indices], num_ranks: int) -> list[Indices]:
        """Deal fewer batches than ranks out to one per rank, of nearly equal cost; fewer samples are repeated."""
        samples = np.concatenate(left)
        samples = self._sorted(np.resize(samples, max(len(samples), num_ranks)))
        low, high = 0.0, float(self.max_cost)
        for _ in range(30):  # the smallest budget with which the ranks suffice
            budget = (low + high) / 2
            low, high = (low, budget) if len(self._cut(samples, budget)) <= num_ranks else (budget, high)
        batches = self._cut(samples, high)
        if len(batches) > num_ranks:  # the sums of sorted samples may use up less of the budget than before
            batches = left
        while len(batches) < num_ranks:
            batches.sort(key=len)
            largest = batches.pop()
            batches += [largest[::2], largest[1::2]]
        return batches


def _check_costs(costs: ArrayLike, max_cost: float) -> NDArray[np.float64]:
    found = np.asarray(costs, dtype=np.float64)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"costs must be one number per sample, but their shape is {found.shape}")
    wrong = np.flatnonzero(~(np.isfinite(found) & (found > 0)))
    if len(wrong):
        raise ValueError(f"costs must be finite and above 0, but that of sample {wrong[0]} is {found[wrong[0]]}")
    if math.isinf(max_cost):
        raise ValueError(f"max_cost must be finite, but is {max_cost}")
    most = int(found.argmax())
    if not max_cost >= found[most]:
        raise ValueError(f"sample {most} costs {found[most]:g} alone, which is above max_cost={max_cost}")
    return found


def measure_costs(
    dataset: Any, cost: Callable[[Any], float], *, cache: str | os.PathLike[str] | None = None, **options: Any
) -> NDArray[np.float64]:
    """Load every sample once, on workers, and return what each costs; with a progress bar if tqdm is installed.

    Args:
        dataset: A map-style dataset, or an :class:`~rpcdataloader.RPCDataset`.
        cost: Function of a sample, such as ``len``; called where the sample is loaded.
        cache: Folder for the result. It is read again for the same dataset and function, what the script itself defines
            for them included: one process measures, before the ranks of a job begin, and these read.
        **options: Options of :class:`~rpcdataloader.RPCDataloader`, such as ``workers`` and ``num_workers``; none of
            those that choose, order or leave out samples.

    Returns:
        Costs in the order of the dataset, shape ``(len(dataset),)``.

    Raises:
        SerializationError: The dataset or the function cannot be pickled.
        TypeError: The dataset is a stream, or the function's result is no number.
        ValueError: An option would give the costs of other samples, or in another order.
        Exception: An exception of the dataset or the function, which names the sample.
    """
    if wrong := [name for name in options if name in _OTHER_SAMPLES]:
        raise ValueError(f"costs are measured of every sample, in the dataset's order: leave out {', '.join(wrong)}")
    if isinstance(dataset, IterableDataset):
        raise TypeError("costs are measured of a map-style dataset, and this is an iterable-style one")
    path = None if cache is None else Path(cache, f"costs-{_fingerprint(dataset, cost)}.npy")
    if path is not None and path.exists():
        found: NDArray[np.float64] = np.load(path)
        return found
    make = functools.partial(
        RPCDataloader, dataset, batch_size=_MEASURED_AT_ONCE, collate_fn=functools.partial(_measure, cost)
    )
    batches: Any = make(**options)
    if batches._where is None:  # torch's own loader would not name a sample
        batches = make(**{**options, "workers": "inline"})
    with contextlib.suppress(ImportError):
        batches = importlib.import_module("tqdm").tqdm(batches, desc="measuring costs", unit="batch")
    with generators_restored():  # the script draws the same, whether the costs were known or not
        found = np.concatenate([np.empty(0), *batches])
    if len(found) != len(dataset):
        raise ValueError(f"the dataset has {len(dataset)} samples, but {len(found)} were loaded")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks that measure at the same time replace each other's file by an equal one, in one step.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            np.save(Path(folder, path.name), found)
            os.replace(Path(folder, path.name), path)
    return found


def _measure(cost: Callable[[Any], float], samples: list[Any]) -> NDArray[np.float64]:
    """Collate the costs of samples in place of these."""
    costs = np.empty(len(samples))
    for number, sample in enumerate(samples):
        try:
            costs[number] = float(cost(sample))
        except Exception as error:
            first = (whereabouts.batch[0] - 1) * _MEASURED_AT_ONCE
            add_note(error, f"cost of the sample with index {first + number}")
            raise
    return costs


def _fingerprint(dataset: Any, cost: Callable[[Any], float]) -> str:
    access = access_of(dataset) if isinstance(dataset, RPCDataset) else dataset
    is_remote = isinstance(access, MutableDataset)
    contents = [
        Encoded(b"", access.blocks, definitions=access.definitions) if is_remote else dumps(access, name="dataset"),
        dumps(cost, name="cost"),
        *(
            Encoded(each.call.pickled, [], definitions=each.call.definitions)
            for each in (access.changes if is_remote else ())
        ),
    ]
    blocks = [block for content in contents for block in [*content.blocks, *_meanings(content.definitions)]]
    return digest_memory(map(as_bytes, blocks)).hex()[:16]


def _meanings(definitions: Table) -> Iterator[memoryview]:
    """What the script means by names, the same in each process, as the pickle of a class is not."""
    for name, definition in sorted(definitions.items(), key=operator.itemgetter(0)):
        value, meaning = main_globals().get(name), definition.pickled
        if isinstance(value, type) or (len(definition.tokens) > 1 and callable(value)):
            with contextlib.suppress(OSError, TypeError):  # without a source, costs are measured again
                meaning = inspect.getsource(value).encode()
        yield memoryview(name.encode() + b"\0" + meaning)
