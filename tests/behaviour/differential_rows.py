"""The table: datasets times arguments. Each row must behave as with torch's loader, whoever loads."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import os
import pickle
import random
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

from tests.support.datasets import (
    Augmented,
    AugmentedBatches,
    Batched,
    Failing,
    NoLength,
    Numbers,
    Sliced,
    State,
    augment_batch,
    draw,
)
from tests.support.differential import New, Raised, Row, attempt, epochs, row, seeded, states, steps
from tests.support.kinds import Tagged, as_is
from tests.support.streams import Parts

# Datasets


Pair = namedtuple("Pair", ["image", "name"])


class Pairs(Numbers):
    """Samples as dicts, with a bit of everything that the default collate takes."""

    def __getitem__(self, index: int) -> Any:
        return {
            "tensor": torch.full((2, 3), index, dtype=torch.float16).t(),
            "pair": Pair(np.full((2,), index, dtype=np.uint8), f"name {index}"),
            "numbers": (index, index / 3, index % 2 == 0),
            "scalar": np.float32(index),
        }


class Told(Numbers):
    """What it is asked for."""

    def __getitem__(self, index: Any) -> Any:
        return type(index).__name__, str(index)


class Words(dict):
    """A mapping from strings."""

    def __init__(self) -> None:
        super().__init__({name: torch.full((3,), len(name)) for name in ("one", "three", "seventeen", "")})


class Unmeasured(Numbers):
    """Its length is not known."""

    def __len__(self) -> int:
        raise TypeError("nobody knows how many there are")


class Half(Numbers):
    """Batches at once, of which some fail."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if 7 in indices:
            raise LookupError(f"{indices} cannot be read")
        return [torch.as_tensor(index) for index in indices]


class Mixed(Numbers):
    """Samples that cannot be stacked, from one on."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2 if index < 10 else 3)


class Initialised(Numbers):
    """How often it was initialised, what was seen then, and how many samples its process has had."""

    def __init__(self) -> None:
        super().__init__(7)
        self.initialised = self.calls = 0
        self.seen: list[float] = []

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return index, self.initialised, self.calls, self.seen


# Streams


class Stream(data.IterableDataset[Any]):
    """The same numbers in every worker."""

    def __init__(self, size: int = 7) -> None:
        self.size = size
        self.epoch = 0

    def __repr__(self) -> str:
        return "Stream"  # torch's warnings show it

    def __iter__(self) -> Any:
        for number in range(self.size):
            yield torch.tensor([number, self.epoch])


class Striped(Stream):
    """Shared out among the workers."""

    def __iter__(self) -> Any:
        info: Any = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.size, step))


class Sized(Striped):
    """Says how long it is, and may be wrong."""

    def __init__(self, size: int, said: int) -> None:
        super().__init__(size)
        self.said = said

    def __len__(self) -> int:
        return self.said


class Ranged(Stream):
    """What the init function shares out."""

    def __init__(self) -> None:
        super().__init__(20)
        self.start = 0

    def __iter__(self) -> Any:
        return iter(range(self.start, self.size))


def share_out(number: int) -> None:
    """As in torch's documentation."""
    info: Any = data.get_worker_info()
    share = -(-info.dataset.size // info.num_workers)
    info.dataset.start, info.dataset.size = share * number, min(share * (number + 1), info.dataset.size)


class Breaks(Stream):
    """Fails in the middle."""

    def __iter__(self) -> Any:
        yield from range(3)
        raise LookupError("the file ends here")


class Resumes(Stream):
    """An iterator that fails, and goes on when asked again."""

    def __iter__(self) -> Any:
        self.number = -1
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == 3:
            raise LookupError("a bad record")
        if self.number == 7:
            raise StopIteration
        return self.number


class NoIterator(Stream):
    """Forgot to return an iterator."""

    def __iter__(self) -> Any:
        return 5


class Counts(Stream):
    """Remembers how often it was begun."""

    def __init__(self) -> None:
        super().__init__(5)
        self.begun = 0

    def __iter__(self) -> Any:
        self.begun += 1
        return iter([(number, self.begun) for number in range(self.size)])


# Samplers


class Endless(data.Sampler[int]):
    """Never ends."""

    def __iter__(self) -> Any:
        return (number % 20 for number in itertools.count())


class Buckets(data.Sampler[list[int]]):
    """Batches of neighbours of varying sizes, in random order; empty ones among them."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self.buckets = [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10], list(range(11, 20))]

    def __len__(self) -> int:
        return len(self.buckets)

    def __iter__(self) -> Any:
        for number in torch.randperm(len(self.buckets), generator=self.generator).tolist():
            yield self.buckets[number]


class Pieces(data.Sampler[int]):
    """Its iterator raises at one place, and goes on when asked again."""

    def __init__(self, at: Any) -> None:
        self.at = at

    def __len__(self) -> int:
        if self.at == "length":
            raise OSError(5, "text", "path")
        return 10

    def __iter__(self) -> Any:
        if self.at == "iter":
            raise OSError(5, "text", "path")
        self.number = -1
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == self.at:
            raise OSError(5, "text", "path")
        if self.number >= 10:
            raise StopIteration
        return self.number


class Over(data.Sampler[int]):
    def __init__(self, data_source: Any) -> None:
        self.data_source = data_source

    def __iter__(self) -> Any:
        return iter([3, 1, 2])


class BrokenBatches:
    """One is a generator that raises, another does not begin."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Any:
        yield from [[0, 1]] * 5
        yield (1 // number for number in (1, 0))
        yield [2, 3]
        yield Unreadable()
        yield [4]


class Unreadable:
    def __iter__(self) -> Any:
        raise OSError("the list cannot be read")


class Breaking(data.Sampler[int]):
    """Raises at one place, and ends."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        yield from range(8)
        raise OSError("the list of samples cannot be read")


class Reshuffled(data.Sampler[int]):
    """Draws from python's and numpy's generators."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        order = list(np.random.permutation(20))
        random.shuffle(order)
        return iter(order)


# Functions


def scaled(samples: list[Any]) -> Any:
    return {"twice": 2 * data.default_collate(samples), "number": len(samples)}


def transposed(samples: list[Any]) -> torch.Tensor:
    return torch.stack(samples).expand(3, -1).t()


def inform(samples: list[Any]) -> Any:
    info: Any = data.get_worker_info()
    return (
        [int(sample) for sample in samples],
        info.num_workers,
        type(info.dataset).__name__,
        info.id < info.num_workers,
    )


def fail_at_seven(samples: list[Any]) -> Any:
    if 7 in samples:
        raise LookupError("seven")
    return torch.stack(samples)


def fail_to_begin(number: int) -> None:
    raise PermissionError(f"worker may not begin, and its number is below 9: {number < 9}")


def initialise(number: int) -> None:
    info: Any = data.get_worker_info()
    info.dataset.initialised += 1
    info.dataset.seen = [number, info.id, info.num_workers, info.seed, torch.initial_seed(), *draw()]


# Drives


two_epochs, three_epochs = (functools.partial(epochs, count=count) for count in (2, 3))


def ten(loader: Any) -> Any:
    """For samplers that do not end."""
    for _epoch in range(2):
        yield from steps(iter(loader), 10)


def until_the_sampler_ended(loader: Any) -> Any:
    """torch's epoch ends then as if it were complete; ours says that it is not."""
    for step in steps(iter(loader)):
        if isinstance(step, Raised) and "has ended the sampler before its end" in str(step):
            yield "end"
            return
        yield step


def first_error(loader: Any) -> Any:
    return steps(iter(loader), 1)


def early_break(loader: Any) -> Any:
    """Epochs of which some are left."""
    for count in (2, 60, 1, 60):
        iterator = iter(loader)
        yield from steps(iterator, count)
        del iterator
    yield states(loader)


def beside(loader: Any) -> Any:
    """A second epoch is begun while the first one is unfinished."""
    one = iter(loader)
    yield from steps(one, 2)
    other = iter(loader)
    yield one is other
    yield from steps(other, 2)
    yield from steps(one, 2)
    yield from steps(other)
    yield from steps(one)
    yield states(loader)


def nested(loader: Any) -> Any:
    for batch in loader:
        yield batch, list(loader)
    yield states(loader)


def nested_in_another(loader: Any) -> Any:
    """On the same workers."""
    other = copy.copy(loader)
    for batch in loader:
        yield batch, list(other)
    yield states(loader)


def dropped(loader: Any) -> Any:
    """An iterator that is gone while its batches are on the way, and one that nobody asks."""
    for count in (3, 0):
        iterator = iter(loader)
        yield from steps(iterator, count)
        del iterator
        gc.collect()
    yield from steps(iter(loader))
    yield states(loader)


def in_threads(loader: Any) -> Any:
    """Each with an iterator of its own, and the main thread with another."""
    with ThreadPoolExecutor(3) as executor:
        others = [executor.submit(list, loader) for _ in range(3)]
        yield list(loader)
        for other in others:
            yield other.result()


def handed_over(loader: Any) -> Any:
    """One iterator, used by one thread after the other."""
    iterator = iter(loader)
    with ThreadPoolExecutor(1) as executor:
        for number in range(8):
            yield executor.submit(next, iterator).result() if number % 2 else next(iterator)


def in_a_fork(loader: Any) -> Any:
    """A fork, which begins its own epoch in the middle of one of its parent."""
    iterator = iter(loader)
    yield from steps(iterator, 2)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open(writer, "wb") as file:
                # Python's own generator is seeded anew in every fork.
                pickle.dump([list(steps(iter(loader))), torch.get_rng_state()], file)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        yield pickle.load(file)
    os.waitpid(pid, 0)
    yield from steps(iterator)
    yield states(loader)


def after_the_end(loader: Any) -> Any:
    iterator = iter(loader)
    yield from steps(iterator)
    yield from steps(iterator)
    yield iter(iterator) is iterator


def every_state(loader: Any) -> Any:
    """The generators after each batch: how far ahead the sampler is consumed."""
    for batch in loader:
        yield batch, states(loader)


def attributes(loader: Any) -> Any:
    for name in (
        "batch_size", "drop_last", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "collate_fn",
        "prefetch_factor", "persistent_workers", "in_order", "num_workers",
    ):  # fmt: skip
        yield name, attempt(lambda: getattr(loader, name))  # noqa: B023
    yield loader.generator and loader.generator.get_state()
    yield type(loader.sampler), type(loader.batch_sampler), type(loader.multiprocessing_context)
    yield attempt(lambda: len(loader))


def refused_changes(loader: Any) -> Any:
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"):
        try:
            setattr(loader, name, getattr(loader, name))
        except ValueError as exc:
            yield str(exc).replace("RPCDataloader", "DataLoader")
    yield from epochs(loader)


def allowed_changes(loader: Any) -> Any:
    yield from epochs(loader)
    loader.collate_fn = scaled
    loader.pin_memory = False
    loader.timeout = 100
    loader.worker_init_fn = None
    loader.generator = seeded(4)
    loader.prefetch_factor = loader.prefetch_factor and 3
    loader.note = "anything"
    yield loader.note
    yield from epochs(loader)


def change_sampler(loader: Any) -> Any:
    """As with ``set_epoch``."""
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        yield from epochs(loader)


def change_dataset(loader: Any) -> Any:
    for epoch in range(3):
        loader.dataset.epoch = epoch
        yield from epochs(loader)


def change_list(loader: Any) -> Any:
    for number in range(3):
        yield from epochs(loader)
        loader.dataset.append(torch.tensor(number))


def change_while_loading(loader: Any) -> Any:
    """Changes that come too late."""
    iterator = iter(loader)
    yield from steps(iterator, 1)
    loader.dataset.epoch = 9
    loader.dataset.size = 10
    yield from steps(iterator)
    yield len(loader)


def copies(loader: Any) -> Any:
    for duplicate in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        yield from attributes(duplicate)
        yield from epochs(duplicate)
    yield from epochs(loader)


def told_state(samples: list[Any]) -> Any:
    """Without the process."""
    return [sample[:3] for sample in samples]


def tensors() -> Any:
    return [torch.tensor(number) for number in range(3)]


def permuted(number: int, size: int) -> torch.Tensor:
    """Frames as decoders give them, in the order of training."""
    return torch.full((4, size, size, 3), number, dtype=torch.uint8).permute(0, 3, 1, 2)


MIXED = (torch.float32, torch.float64, torch.float64, torch.float16, torch.float32)

WITH_WORKERS = ("local", "workers", "RPCDataset")
SENT = ("local", "workers")

_rows: dict[str, Row] = {
    # Batches
    "defaults": row(drive=two_epochs),
    "batch size 3": row(batch_size=3),
    "batch larger than the dataset": row(batch_size=50),
    "batch larger than the dataset, dropped": row(batch_size=50, drop_last=True),
    "no batches": row(batch_size=None),
    "drop_last": row(batch_size=3, drop_last=True),
    "prefetch_factor 1": row(batch_size=2, shuffle=True, prefetch_factor=1),
    "any order": row(batch_size=3, in_order=False, as_sets=True),
    "any order, persistent": row(batch_size=3, in_order=False, persistent_workers=True, as_sets=True),
    "timeout": row(batch_size=3, timeout=100, torch=(2,)),
    "pin_memory": row(batch_size=3, pin_memory=True),
    "pin_memory_device": row(batch_size=3, pin_memory=True, pin_memory_device="cuda"),
    "pin_memory_device alone": row(batch_size=3, pin_memory_device="cuda"),
    # Order
    "shuffle": row(drive=three_epochs, batch_size=3, shuffle=True),
    "shuffle with a generator": row(drive=three_epochs, batch_size=3, shuffle=True, generator=New(seeded)),
    "shuffle without batches": row(drive=two_epochs, batch_size=None, shuffle=True),
    "generator without shuffle": row(drive=two_epochs, generator=New(seeded)),
    "generators after each batch": row(
        lambda: Numbers(40), every_state, exact=True, batch_size=None, generator=New(seeded),
        sampler=New(lambda: data.RandomSampler(range(40), True, 45)),
    ),
    # Samplers
    "DistributedSampler": row(
        drive=change_sampler, sampler=New(lambda: DistributedSampler(Numbers(), 3, 1, seed=3)), batch_size=2
    ),
    "sampler is a list": row(sampler=[5, 5, 2], batch_size=2),
    "sampler is an iterator": row(drive=two_epochs, sampler=New(lambda: iter([4, 5, 6])), batch_size=2),
    "sampler draws from python and numpy": row(drive=two_epochs, sampler=Reshuffled(), batch_size=3),
    "sampler is an iterator, without batches": row(sampler=New(lambda: iter([4, 5, 6])), batch_size=None),
    "endless sampler": row(drive=ten, sampler=Endless(), batch_size=3),
    "sampler yields numpy integers": row(Told, sampler=np.arange(5), batch_size=2),
    "sampler yields numpy integers to torch": row(sampler=list(np.arange(5, dtype=np.uint8)), batch_size=2),
    "sampler yields tensors": row(Told, sampler=torch.arange(5), batch_size=2, torch=(0,)),
    "sampler yields tuples": row(Told, sampler=[(1, 2), (3, 4), (5,)], batch_size=2),
    "sampler yields tuples, without batches": row(Told, sampler=[(1, 2), (3, 4)], batch_size=None),
    "sampler yields strings": row(Told, sampler=["a", "\udcff", ""], batch_size=2),
    "sampler yields slices": row(Told, sampler=[slice(3), slice(1, 5, 2)], batch_size=None),
    "sampler yields None": row(Told, sampler=[None, 1.5, True], batch_size=2),
    "sampler yields batches": row(Sliced, sampler=data.BatchSampler(range(9), 4, False), batch_size=None),
    # Batch samplers
    "buckets": row(drive=three_epochs, batch_sampler=Buckets()),
    "buckets with a generator": row(
        drive=three_epochs, batch_sampler=New(lambda: Buckets(seeded(9))), generator=New(seeded)
    ),
    "batches of varying sizes": row(batch_sampler=[[1, 2], [3], [4, 5, 6], [7] * 5]),
    "empty batches": row(batch_sampler=[[1, 2], [], [3], []], collate_fn=as_is),
    "empty batches and the default collate": row(batch_sampler=[[1, 2], [], [3], []]),
    "batches as tuples": row(batch_sampler=[(1, 2), (3,)]),
    "batches as arrays": row(Told, batch_sampler=[np.arange(3), np.arange(2)]),
    "batches as tensors": row(Told, batch_sampler=[torch.arange(3)], torch=(0,)),
    "batches as keys": row(Told, batch_sampler=[{1: 0, 3: 0}.keys()], torch=(0,)),
    "indices as tensors of a dataset that fails": row(Half, sampler=torch.arange(9), torch=(0,)),
    "batches for __getitems__": row(Batched, batch_sampler=[(1, 2), [3], range(4), np.arange(2), torch.arange(3)]),
    "generator of batches": row(
        drive=two_epochs, batch_sampler=New(lambda: ([start, start + 1] for start in (0, 7, 3)))
    ),
    "batches that are none": row(batch_sampler=[1, 2]),
    # Functions
    "collate_fn": row(batch_size=4, collate_fn=transposed),
    "collate_fn as it is": row(batch_size=4, collate_fn=as_is),
    "collate_fn calls the default": row(batch_size=4, collate_fn=scaled),
    "collate_fn without batches": row(batch_size=None, collate_fn=torch.neg),
    "collate_fn is a lambda": row(batch_size=4, collate_fn=lambda samples: len(samples)),
    "collate_fn asks for the worker": row(exact=True, ours=WITH_WORKERS, batch_size=4, collate_fn=inform),
    # Datasets
    "empty": row(lambda: Numbers(0), batch_size=3),
    "empty and shuffled": row(lambda: Numbers(0), shuffle=True),
    "empty with drop_last": row(lambda: Numbers(0), batch_size=3, drop_last=True),
    "one sample": row(lambda: Numbers(1), batch_size=3, shuffle=True),
    "__getitems__": row(Batched, batch_size=6, shuffle=True),
    "__getitems__ without batches": row(Batched, batch_size=None),
    "dicts": row(Pairs, batch_size=3),
    "dicts without batches": row(Pairs, batch_size=None),
    "Subset of a dataset with __getitems__": row(lambda: data.Subset(Batched(), [7, 3, 11, 7]), batch_size=3),
    "list": row(lambda: [[1.5, "x"], [2.5, "y"], [3.5, "z"]], batch_size=2),
    "range": row(lambda: range(10), batch_size=4, shuffle=True),
    "mapping": row(Words, sampler=["three", "", "one", "three"], batch_size=3),
    "mapping and missing keys": row(Words, sampler=["three", "nine", "one"]),
    "mapping without a sampler": row(Words),
    "no length, with a sampler": row(NoLength, sampler=[4, 2], batch_size=2),
    "length that raises": row(Unmeasured, sampler=[3, 1], batch_size=2),
    "no length": row(NoLength, ours=SENT, torch=(2,)),
    "sampler that is none": row(sampler=5, torch=(2,), ours=WITH_WORKERS),
    # Errors
    "dataset fails": row(
        lambda: Failing(12, {3: (KeyError, "x"), 4: (ValueError,), 7: (Exception, "two\nlines"), 11: (OSError, 2, "z")})
    ),
    "dataset fails in a batch": row(lambda: Failing(12, {3: (IndexError, "x")}), batch_size=4),
    "dataset fails without batches": row(lambda: Failing(6, {3: (RuntimeError, "x")}), batch_size=None),
    "dataset fails at the first": row(lambda: Failing(6, {0: (AssertionError,)}), batch_size=2, shuffle=True),
    "dataset fails, with persistent workers": row(
        lambda: Failing(12, {3: (KeyError, "x")}), three_epochs, batch_size=2, persistent_workers=True
    ),
    "__getitems__ fails": row(Half, batch_size=3),
    "index out of range": row(lambda: Numbers(5), sampler=[0, 9, 1, -7, 2]),
    "samples that cannot be stacked": row(Mixed, batch_size=4),
    "samples that cannot be collated": row(lambda: [object, {1, 2}, 3]),
    "batch of different kinds": row(lambda: [torch.zeros(1), 1, "x"], batch_size=3, torch=(0,)),
    "collate_fn fails": row(batch_size=3, collate_fn=fail_at_seven),
    # With workers, torch draws ahead, and loses the batch that it was about to return.
    "sampler fails": row(
        drive=until_the_sampler_ended, torch=(0,), numbers=(1, 2), as_sets=True, sampler=Breaking(), batch_size=None
    ),
    "sampler over a dataset without a length": row(Unmeasured, sampler=Over(Unmeasured())),
    "batches of the sampler fail": row(torch=(0,), numbers=(1,), as_sets=True, batch_sampler=BrokenBatches()),
    "sampler of batches fails": row(
        drive=until_the_sampler_ended, torch=(0,), numbers=(1,), as_sets=True, sampler=Breaking(), batch_size=2
    ),
    **{
        f"sampler fails once: {at}": row(
            drive=two_epochs, torch=(0,), numbers=(1,), as_sets=True, batch_size=None,
            sampler=New(functools.partial(Pieces, at)),
        )
        for at in ("length", "iter", 2, 9)
    },
    "init function fails": row(drive=first_error, torch=(2,), ours=WITH_WORKERS, worker_init_fn=fail_to_begin),
    # Workers
    "init function": row(
        Initialised, two_epochs, exact=True, numbers=(1,), ours=WITH_WORKERS, worker_init_fn=initialise
    ),
    "init function of persistent workers": row(
        Initialised, two_epochs, exact=True, numbers=(1,), ours=WITH_WORKERS,
        worker_init_fn=initialise, persistent_workers=True,
    ),
    "persistent workers": row(drive=three_epochs, batch_size=3, shuffle=True, persistent_workers=True),
    "persistent workers and a generator": row(
        drive=three_epochs, batch_size=3, shuffle=True, generator=New(seeded), persistent_workers=True
    ),
    # Use
    "nested in another": row(lambda: Numbers(4), nested_in_another, batch_size=2),
    "nested in itself": row(lambda: Numbers(4), nested, batch_size=2, shuffle=True),
    "in threads": row(drive=in_threads, batch_size=3, torch=(0,)),
    "handed over": row(drive=handed_over, batch_size=2),
    # There, forkserver starts no workers of torch.
    "in a fork": row(
        drive=in_a_fork, batch_size=3, shuffle=True, multiprocessing_context="fork", ours=(*SENT, "inline")
    ),
    "attributes": row(drive=attributes, batch_size=4, timeout=3, torch=(2,), exact=True, ours=("local",)),
    "attributes without batches": row(drive=attributes, batch_size=None, in_order=False, exact=True, ours=("local",)),
    "attributes that may not be changed": row(drive=refused_changes, batch_size=4),
    "attributes that may be changed": row(drive=allowed_changes, batch_size=4, shuffle=True, torch=(2,)),
    "copies": row(drive=copies, exact=True, ours=("local",), batch_size=4, shuffle=True, generator=New(seeded)),
    "dataset changes between epochs": row(
        State, change_dataset, batch_size=7, collate_fn=told_state, ours=(*SENT, "inline")
    ),
    "dataset changes, unseen by persistent workers": row(
        State, change_dataset, batch_size=7, collate_fn=told_state, persistent_workers=True, ours=SENT
    ),
    "dataset grows between epochs": row(tensors, change_list, shuffle=True, ours=(*SENT, "inline")),
    "dataset grows, unseen by persistent workers": row(tensors, change_list, persistent_workers=True, ours=SENT),
    "dataset changes during an epoch": row(
        State, change_while_loading, batch_size=2, collate_fn=told_state, ours=SENT, torch=(2,)
    ),
}  # fmt: skip

# What a batch looks like is what torch's workers make of it, whatever its size: some of these are collated in memory
# that is used again, and the last batch is smaller.
for _name, _samples in {
    "permuted": [permuted(number, 4) for number in range(5)],
    "permuted and large": [permuted(number, 70) for number in range(5)],
    "permuted, some of them": [permuted(0, 4), permuted(1, 4).contiguous(), permuted(2, 4).contiguous()],
    "permuted arrays": [permuted(number, 4).numpy() for number in range(5)],
    "permuted in dicts": [{"frames": permuted(number, 4)} for number in range(5)],
    "channels last": [torch.rand(1, 3, 8, 8).to(memory_format=torch.channels_last)[0] for _ in range(5)],
    "columns": [torch.arange(12).reshape(3, 4)[:, ::2] for _ in range(5)],
    "permuted, of a subclass": [permuted(number, 4).as_subclass(Tagged) for number in range(5)],
    "of other types": [torch.full((2,), number, dtype=kind) for number, kind in enumerate(MIXED)],
    "of other types and large": [torch.full((20_000,), number, dtype=kind) for number, kind in enumerate(MIXED)],
    "of other types, of a subclass": [torch.zeros(2, dtype=kind).as_subclass(Tagged) for kind in MIXED],
    "of other types of arrays": [np.full(2, number, kind) for number, kind in enumerate((np.float32, np.float64) * 2)],
    "of types that do not fit": [torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.ones(1, dtype=torch.bool)],
}.items():  # fmt: skip
    _rows[f"samples {_name}"] = row(functools.partial(list, _samples), batch_size=2, torch=(2,))

# Ways to use a loader, whose workers stay or not.
USES = {"left early": early_break, "two iterators": beside, "after the end": after_the_end}

for _persistent, _name in itertools.product((False, True), [*USES, "dropped"]):
    _rows[f"{_name}, persistent_workers={_persistent}"] = row(
        drive={**USES, "dropped": dropped}[_name], batch_size=3, shuffle=True, persistent_workers=_persistent,
        torch=(2,), ours=WITH_WORKERS if _name == "dropped" else Row.ours,
    )  # fmt: skip

# Another object: what a module changes in place is sent to node servers with each pass of these tests.
ROWS = {**_rows}
del _rows

# Each worker has a stream of its own, so all of these depend on the number of workers.
STREAMS: dict[str, Row] = {
    name: dataclasses.replace(each, exact=True)
    for name, each in {
        "defaults": row(Stream, two_epochs),
        "shared out": row(lambda: Striped(20), batch_size=3),
        "shared out, with drop_last": row(lambda: Striped(20), batch_size=3, drop_last=True),
        "shared out, without batches": row(lambda: Striped(11), batch_size=None),
        "shared out by the init function": row(Ranged, batch_size=3, worker_init_fn=share_out),
        "uneven": row(lambda: Parts([0, 5, 10]), batch_size=2),
        "uneven, with drop_last": row(lambda: Parts([0, 5, 10]), batch_size=2, drop_last=True),
        "uneven, without batches": row(lambda: Parts([0, 5, 10]), batch_size=None),
        "fewer samples than workers": row(lambda: Striped(2), batch_size=3),
        "empty": row(lambda: Stream(0), two_epochs, batch_size=3),
        "generator": row(Stream, two_epochs, generator=New(seeded)),
        "collate_fn asks for the worker": row(lambda: Striped(9), batch_size=3, collate_fn=inform),
        "persistent workers": row(Counts, three_epochs, batch_size=2, persistent_workers=True),
        "workers that are not persistent": row(Counts, two_epochs, batch_size=2),
        "nested in itself": row(lambda: Striped(4), nested, batch_size=2),
        "any order": row(lambda: Striped(20), batch_size=3, in_order=False, as_sets=True),
        "ChainDataset": row(lambda: data.ChainDataset([Striped(5), Striped(8)]), batch_size=2),
        "fails": row(Breaks, batch_size=2),
        "fails, without batches": row(Breaks, batch_size=None),
        "fails and goes on": row(Resumes, batch_size=2),
        "is no iterator": row(NoIterator, first_error),
        "right length": row(lambda: Sized(20, 20), batch_size=3, ours=SENT),
        "length that is too short": row(lambda: Sized(20, 7), batch_size=3, ours=SENT),
        "length that is too long": row(lambda: Sized(5, 9), batch_size=None, ours=SENT),
        "length with drop_last": row(lambda: Sized(20, 8), batch_size=3, drop_last=True, ours=SENT),
        "changes between epochs": row(Stream, change_dataset, batch_size=3, ours=SENT),
        "changes, unseen by persistent workers": row(
            Stream, change_dataset, batch_size=3, persistent_workers=True, ours=SENT
        ),
        "attributes": row(Stream, attributes, batch_size=3, ours=("local",)),
        "in a fork": row(
            lambda: Striped(20), in_a_fork, batch_size=2, multiprocessing_context="fork", ours=("workers",)
        ),
        **{
            f"{name}, persistent_workers={persistent}": row(
                lambda: Striped(30), drive, batch_size=2, persistent_workers=persistent
            )
            for persistent in (False, True)
            for name, drive in USES.items()
        },
    }.items()
}


# Random numbers are those of the sample's place, whoever loads: compared among ours.
DRAWS: dict[str, Row] = {
    name: dataclasses.replace(each, ours=(*each.ours, "built in workers"))
    for name, each in {
        "shuffled": row(Augmented, two_epochs, batch_size=3, shuffle=True),
        "with a generator": row(Augmented, two_epochs, batch_size=3, shuffle=True, generator=New(seeded)),
        "without batches": row(Augmented, batch_size=None),
        "__getitems__": row(AugmentedBatches, batch_size=3),
        "collate_fn that draws": row(Augmented, batch_size=3, collate_fn=augment_batch),
        "repeated index": row(Augmented, sampler=[4] * 12, batch_size=3),
        "with replacement": row(Augmented, sampler=New(lambda: data.RandomSampler(range(20), True, 30)), batch_size=4),
        "batches of varying sizes": row(Augmented, batch_sampler=Buckets()),
        "init function that seeds": row(Augmented, batch_size=3, worker_init_fn=torch.manual_seed),
        "persistent": row(Augmented, three_epochs, batch_size=3, shuffle=True, persistent_workers=True),
        "persistent, left early": row(Augmented, early_break, batch_size=3, persistent_workers=True),
        "left early": row(Augmented, early_break, batch_size=3, shuffle=True),
        "any order": row(Augmented, batch_size=3, in_order=False, as_sets=True),
        "one after the other": row(Augmented, batch_size=3, prefetch_factor=7),
    }.items()
}
