"""The table: datasets times arguments. Each row must behave as with torch's loader, whoever loads."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import multiprocessing
import os
import pickle
import random
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from tests.integration import kinds
from tests.integration.datasets import (
    Augmented,
    AugmentedBatches,
    Batched,
    Failing,
    NoLength,
    Numbers,
    Sliced,
    State,
    augment_batch,
)
from tests.integration.differential import Raised, Row, attempt, epochs, seeded, states, steps

# Datasets


def table() -> TensorDataset:
    return TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))


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


class Negative(Numbers):
    """Counts from the end, too."""

    def __getitem__(self, index: Any) -> Any:
        return torch.arange(self.size)[index]


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
        return [torch.tensor(index) for index in indices]


class Shrinking(Numbers):
    """Says that it is longer than it is."""

    def __len__(self) -> int:
        return self.size + 3


class Mixed(Numbers):
    """Samples that cannot be stacked, from one on."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2 if index < 10 else 3)


class Nothing(Numbers):
    """Forgot to return anything."""

    def __getitem__(self, index: int) -> Any:
        pass


class Picky(Exception):
    """Its constructor wants more than a text."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(name, code)

    def __str__(self) -> str:
        return f"{self.args[0]} failed with {self.args[1]}"


class Initialised(Numbers):
    """How often it was initialised, and how many samples its process has had."""

    def __init__(self) -> None:
        super().__init__(7)
        self.initialised = self.calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return index, self.initialised, self.calls


# Streams


class Stream(IterableDataset[Any]):
    """The same numbers in every worker."""

    def __init__(self, size: int = 7) -> None:
        self.size = size
        self.epoch = 0

    def __repr__(self) -> str:
        return "Stream"  # torch's warnings show it

    def __iter__(self) -> Any:
        for number in range(self.size):
            yield torch.tensor([number, self.epoch])


class Informed(Stream):
    """With what it knows of its worker."""

    def __iter__(self) -> Any:
        info: Any = get_worker_info()
        for number in range(self.size):
            yield (number, -1, 0) if info is None else (number, info.id, info.num_workers)


class Striped(Stream):
    """Shared out among the workers."""

    def __iter__(self) -> Any:
        info: Any = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.size, step))


class Uneven(Stream):
    """Some workers have more than others, some nothing."""

    def __iter__(self) -> Any:
        info: Any = get_worker_info()
        number = info.id if info else 1
        return iter(range(100 * number, 100 * number + (5 * number) % 13))


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
    info: Any = get_worker_info()
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


class Unsized(Sampler[int]):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(range(0, 20, 3))


class Endless(Sampler[int]):
    """Never ends."""

    def __iter__(self) -> Any:
        return (number % 20 for number in itertools.count())


class Buckets(Sampler[list[int]]):
    """Batches of neighbours of varying sizes, in random order; empty ones among them."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self.buckets = [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10], list(range(11, 20))]

    def __len__(self) -> int:
        return len(self.buckets)

    def __iter__(self) -> Any:
        for number in torch.randperm(len(self.buckets), generator=self.generator).tolist():
            yield self.buckets[number]


class Breaking(Sampler[int]):
    """Raises at one place, and ends."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        yield from range(8)
        raise OSError("the list of samples cannot be read")


class Reshuffled(Sampler[int]):
    """Draws from python's and numpy's generators."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        order = list(np.random.permutation(20))
        random.shuffle(order)
        return iter(order)


# Functions


def as_is(samples: Any) -> Any:
    return samples


def scaled(samples: list[Any]) -> Any:
    return {"twice": 2 * default_collate(samples), "number": len(samples)}


def transposed(samples: list[Any]) -> torch.Tensor:
    return torch.stack(samples).expand(3, -1).t()


def inform(samples: list[Any]) -> Any:
    info: Any = get_worker_info()
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


def initialise(_number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.initialised += 1


def options(**given: Any) -> Any:
    """Arguments without state."""
    return lambda: dict(given)


# Drives


def three_epochs(loader: Any) -> Any:
    return epochs(loader, 3)


def two_epochs(loader: Any) -> Any:
    return epochs(loader, 2)


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


def zipped(loader: Any) -> Any:
    yield from zip(loader, loader, strict=False)
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


def of_parts() -> Any:
    return ConcatDataset([Subset(Numbers(), [3, 1, 4]), Numbers(2), Subset(Batched(), range(5, 9))])


WITH_WORKERS = ("local", "workers", "RPCDataset")

ROWS: dict[str, Row] = {
    # Batches
    "defaults": Row(drive=two_epochs),
    "batch size 1": Row(options=options(batch_size=1)),
    "batch size 3": Row(options=options(batch_size=3)),
    "batch larger than the dataset": Row(options=options(batch_size=50)),
    "batch larger than the dataset, dropped": Row(options=options(batch_size=50, drop_last=True)),
    "no batches": Row(options=options(batch_size=None)),
    "drop_last": Row(options=options(batch_size=3, drop_last=True)),
    "drop_last of nothing": Row(options=options(batch_size=5, drop_last=True)),
    "drop_last without batches": Row(options=options(batch_size=None, drop_last=True)),
    "batch size 0": Row(options=options(batch_size=0)),
    "batch size as a float": Row(options=options(batch_size=2.0)),
    # Order
    "shuffle": Row(options=options(batch_size=3, shuffle=True), drive=three_epochs),
    "shuffle with a generator": Row(
        options=lambda: {"batch_size": 3, "shuffle": True, "generator": seeded()}, drive=three_epochs
    ),
    "shuffle without batches": Row(options=options(batch_size=None, shuffle=True), drive=two_epochs),
    "generator without shuffle": Row(options=lambda: {"generator": seeded()}, drive=two_epochs),
    "generators after each batch": Row(
        options=lambda: {"sampler": RandomSampler(range(40), True, 45), "batch_size": None, "generator": seeded()},
        dataset=lambda: Numbers(40),
        drive=every_state,
        exact=True,
    ),
    # Samplers
    "RandomSampler with replacement": Row(
        options=lambda: {"sampler": RandomSampler(range(20), replacement=True, num_samples=33), "batch_size": 4},
        drive=two_epochs,
    ),
    "RandomSampler of a part": Row(options=lambda: {"sampler": RandomSampler(range(20), num_samples=7)}),
    "RandomSampler of more than there is": Row(
        options=lambda: {"sampler": RandomSampler(range(20), num_samples=43, generator=seeded(2)), "batch_size": 5}
    ),
    "WeightedRandomSampler with a generator": Row(
        options=lambda: {
            "sampler": WeightedRandomSampler([0.1, 0.5, 2.0, 1.0], 10, generator=seeded(8)),
            "batch_size": 3,
            "generator": seeded(9),
        },
        drive=two_epochs,
    ),
    "WeightedRandomSampler": Row(
        options=lambda: {"sampler": WeightedRandomSampler([0.1, 0.5, 2.0, 1.0], 10), "batch_size": 4},
        drive=two_epochs,
    ),
    "SubsetRandomSampler": Row(
        options=lambda: {"sampler": SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6], generator=seeded()), "batch_size": 2},
        drive=two_epochs,
    ),
    "SequentialSampler": Row(options=lambda: {"sampler": SequentialSampler(range(9)), "batch_size": 2}),
    "DistributedSampler": Row(
        options=lambda: {"sampler": DistributedSampler(Numbers(), 3, 1, seed=3), "batch_size": 2},
        drive=change_sampler,
    ),
    "sampler is a list": Row(options=options(sampler=[5, 5, 2], batch_size=2)),
    "sampler is a range": Row(options=options(sampler=range(4, 11), batch_size=None)),
    "sampler is an iterator": Row(options=lambda: {"sampler": iter([4, 5, 6]), "batch_size": 2}, drive=two_epochs),
    "sampler draws from python and numpy": Row(
        options=lambda: {"sampler": Reshuffled(), "batch_size": 3},
        drive=two_epochs,
    ),
    "sampler without a length": Row(options=lambda: {"sampler": Unsized(), "batch_size": 3}),
    "sampler without a length or batches": Row(options=lambda: {"sampler": Unsized(), "batch_size": None}),
    "endless sampler": Row(options=lambda: {"sampler": Endless(), "batch_size": 3}, drive=ten),
    "sampler yields numpy integers": Row(Told, options(sampler=np.arange(5), batch_size=2)),
    "sampler yields numpy integers to torch": Row(
        Numbers, options(sampler=list(np.arange(5, dtype=np.uint8)), batch_size=2)
    ),
    "sampler yields tensors": Row(Told, lambda: {"sampler": torch.arange(5), "batch_size": 2}, torch=(0,)),
    "sampler yields tuples": Row(Told, options(sampler=[(1, 2), (3, 4), (5,)], batch_size=2)),
    "sampler yields tuples, without batches": Row(Told, options(sampler=[(1, 2), (3, 4)], batch_size=None)),
    "sampler yields strings": Row(Told, options(sampler=["a", "\udcff", ""], batch_size=2)),
    "sampler yields slices": Row(Told, options(sampler=[slice(3), slice(1, 5, 2)], batch_size=None)),
    "sampler yields None": Row(Told, options(sampler=[None, 1.5, True], batch_size=2)),
    "sampler yields batches": Row(
        Sliced, lambda: {"sampler": BatchSampler(SequentialSampler(range(9)), 4, False), "batch_size": None}
    ),
    # Batch samplers
    "buckets": Row(options=lambda: {"batch_sampler": Buckets()}, drive=three_epochs),
    "buckets with a generator": Row(
        options=lambda: {"batch_sampler": Buckets(seeded(9)), "generator": seeded()}, drive=three_epochs
    ),
    "batches of sampled batches": Row(
        options=lambda: {"batch_sampler": BatchSampler(RandomSampler(range(20)), 3, True)},
    ),
    "batches of varying sizes": Row(options=options(batch_sampler=[[1, 2], [3], [4, 5, 6], [7] * 5])),
    "empty batches": Row(options=options(batch_sampler=[[1, 2], [], [3], []], collate_fn=as_is)),
    "empty batches and the default collate": Row(options=options(batch_sampler=[[1, 2], [], [3], []])),
    "batches as tuples": Row(options=options(batch_sampler=[(1, 2), (3,)])),
    "batches as arrays": Row(Told, lambda: {"batch_sampler": [np.arange(3), np.arange(2)]}),
    "batches as tensors": Row(Told, lambda: {"batch_sampler": [torch.arange(3)]}, torch=(0,)),
    "batches as ranges": Row(options=options(batch_sampler=[range(3), range(5, 7)])),
    "batches for __getitems__": Row(Batched, options(batch_sampler=[(1, 2), [3], range(4)])),
    "generator of batches": Row(
        options=lambda: {"batch_sampler": ([start, start + 1] for start in (0, 7, 3))},
        drive=two_epochs,
    ),
    "batches that are none": Row(options=options(batch_sampler=[1, 2])),
    # Functions
    "collate_fn": Row(options=options(batch_size=4, collate_fn=transposed)),
    "collate_fn as it is": Row(options=options(batch_size=4, collate_fn=as_is)),
    "collate_fn calls the default": Row(options=options(batch_size=4, collate_fn=scaled)),
    "collate_fn without batches": Row(options=options(batch_size=None, collate_fn=torch.neg)),
    "collate_fn is a lambda": Row(options=lambda: {"batch_size": 4, "collate_fn": lambda samples: len(samples)}),
    "collate_fn asks for the worker": Row(
        options=options(batch_size=4, collate_fn=inform), exact=True, ours=WITH_WORKERS
    ),
    # Datasets
    "empty": Row(lambda: Numbers(0), options(batch_size=3)),
    "empty and shuffled": Row(lambda: Numbers(0), options(shuffle=True)),
    "empty with drop_last": Row(lambda: Numbers(0), options(batch_size=3, drop_last=True)),
    "one sample": Row(lambda: Numbers(1), options(batch_size=3, shuffle=True)),
    "one sample, dropped": Row(lambda: Numbers(1), options(batch_size=3, drop_last=True)),
    "__getitems__": Row(Batched, options(batch_size=6, shuffle=True)),
    "__getitems__ without batches": Row(Batched, options(batch_size=None)),
    "dicts": Row(Pairs, options(batch_size=3)),
    "dicts without batches": Row(Pairs, options(batch_size=None)),
    "TensorDataset": Row(table, options(batch_size=3, shuffle=True)),
    "Subset": Row(lambda: Subset(table(), [7, 3, 11, 7]), options(batch_size=3, shuffle=True)),
    "Subset of a dataset with __getitems__": Row(lambda: Subset(Batched(), [7, 3, 11, 7]), options(batch_size=3)),
    "ConcatDataset": Row(of_parts, options(batch_size=2)),
    "random_split": Row(
        lambda: random_split(Numbers(), [0.7, 0.3], generator=seeded())[1], options(batch_size=4, shuffle=True)
    ),
    "batches of many kinds": Row(
        kinds.Kinds, options(sampler=["structures"], batch_size=None, collate_fn=as_is), torch=(2,)
    ),
    "StackDataset": Row(lambda: StackDataset(Numbers(), table()), options(batch_size=3, shuffle=True)),
    "StackDataset by name": Row(lambda: StackDataset(a=Numbers(), b=table()), options(batch_size=3)),
    "list": Row(lambda: [[1.5, "x"], [2.5, "y"], [3.5, "z"]], options(batch_size=2)),
    "list of arrays": Row(lambda: [np.full(3, number, dtype=np.int16) for number in range(5)], options(batch_size=2)),
    "range": Row(lambda: range(10), options(batch_size=4, shuffle=True)),
    "mapping": Row(Words, options(sampler=["three", "", "one", "three"], batch_size=3)),
    "mapping without batches": Row(Words, options(sampler=["three", "", "one"], batch_size=None)),
    "mapping and missing keys": Row(Words, options(sampler=["three", "nine", "one"])),
    "mapping from numbers": Row(lambda: {0: 1.5, 1: 2.5}, options(batch_size=2)),
    "mapping without a sampler": Row(Words),
    "negative indices": Row(Negative, options(sampler=[-1, 3, -20, -2], batch_size=3)),
    "numpy indices": Row(Negative, lambda: {"sampler": list(np.array([-1, 3, 5])), "batch_size": 2}),
    "no length, with a sampler": Row(NoLength, options(sampler=[4, 2], batch_size=2)),
    "length that raises": Row(Unmeasured, options(sampler=[3, 1], batch_size=2)),
    # Refused
    "no length": Row(NoLength, ours=("local", "workers"), torch=(2,)),
    "sampler and shuffle": Row(options=options(sampler=[1], shuffle=True)),
    "batch_sampler and batch_size": Row(options=options(batch_sampler=[[1]], batch_size=3)),
    "batch_sampler and sampler": Row(options=options(batch_sampler=[[1]], sampler=[1])),
    "negative timeout": Row(options=options(timeout=-1)),
    "negative prefetch_factor": Row(options=options(prefetch_factor=-1)),
    "sampler that is none": Row(options=options(sampler=5), torch=(2,), ours=WITH_WORKERS),
    # Errors
    "dataset fails": Row(
        lambda: Failing(12, {3: (KeyError, "x"), 4: (ValueError,), 7: (Exception, "two\nlines"), 11: (OSError, 2, "z")})
    ),
    "dataset fails in a batch": Row(lambda: Failing(12, {3: (IndexError, "x")}), options(batch_size=4)),
    "dataset fails without batches": Row(lambda: Failing(6, {3: (RuntimeError, "x")}), options(batch_size=None)),
    "dataset fails at the first": Row(lambda: Failing(6, {0: (AssertionError,)}), options(batch_size=2, shuffle=True)),
    "__getitems__ fails": Row(Half, options(batch_size=3)),
    "dataset is shorter than it says": Row(Shrinking, options(batch_size=3)),
    "dataset forgets to return": Row(Nothing, options(batch_size=3)),
    "index out of range": Row(lambda: Numbers(5), options(sampler=[0, 9, 1, -7, 2])),
    "samples that cannot be stacked": Row(Mixed, options(batch_size=4)),
    "samples that cannot be collated": Row(lambda: [object, {1, 2}, 3], options()),
    "batch of different kinds": Row(lambda: [torch.zeros(1), 1, "x"], options(batch_size=3), torch=(0,)),
    "collate_fn fails": Row(options=options(batch_size=3, collate_fn=fail_at_seven)),
    # With workers, torch draws ahead, and loses the batch that it was about to return.
    "sampler fails": Row(
        options=lambda: {"sampler": Breaking(), "batch_size": None}, drive=until_the_sampler_ended, torch=(0,),
        numbers=(1, 2), as_sets=True,
    ),
    "sampler of batches fails": Row(
        options=lambda: {"sampler": Breaking(), "batch_size": 2}, drive=until_the_sampler_ended, torch=(0,),
        numbers=(1,), as_sets=True,
    ),
    "init function fails": Row(
        options=options(worker_init_fn=fail_to_begin), torch=(2,), drive=first_error, ours=WITH_WORKERS
    ),
    # Workers
    "init function": Row(
        Initialised, options(worker_init_fn=initialise), two_epochs, exact=True, numbers=(1,), ours=WITH_WORKERS
    ),
    "init function of persistent workers": Row(
        Initialised, options(worker_init_fn=initialise, persistent_workers=True), two_epochs, exact=True, numbers=(1,),
        ours=WITH_WORKERS,
    ),
    "persistent workers": Row(
        options=options(batch_size=3, shuffle=True, persistent_workers=True), drive=three_epochs
    ),
    "persistent workers and a generator": Row(
        options=lambda: {"batch_size": 3, "shuffle": True, "generator": seeded(), "persistent_workers": True},
        drive=three_epochs,
    ),
    "persistent workers left early": Row(
        options=options(batch_size=3, shuffle=True, persistent_workers=True), drive=early_break
    ),
    "persistent workers and errors": Row(
        lambda: Failing(12, {3: (KeyError, "x")}), options(batch_size=2, persistent_workers=True), three_epochs
    ),
    "prefetch_factor 1": Row(options=options(batch_size=2, shuffle=True, prefetch_factor=1)),
    "prefetch_factor 7": Row(options=options(batch_size=2, shuffle=True, prefetch_factor=7)),
    "any order": Row(options=options(batch_size=3, in_order=False), as_sets=True),
    "any order, shuffled": Row(
        options=lambda: {"batch_size": 3, "in_order": False, "shuffle": True, "generator": seeded()}, as_sets=True
    ),
    "any order, persistent": Row(
        options=options(batch_size=3, in_order=False, persistent_workers=True), as_sets=True
    ),
    "timeout": Row(options=options(batch_size=3, timeout=100), torch=(2,)),
    "pin_memory": Row(options=options(batch_size=3, pin_memory=True)),
    "pin_memory_device": Row(options=options(batch_size=3, pin_memory=True, pin_memory_device="cuda")),
    "pin_memory_device alone": Row(options=options(batch_size=3, pin_memory_device="cuda")),
    # Use
    "left early": Row(options=options(batch_size=3, shuffle=True), drive=early_break),
    "two iterators": Row(options=options(batch_size=3, shuffle=True), drive=beside),
    "two iterators, persistent": Row(
        options=options(batch_size=3, shuffle=True, persistent_workers=True), drive=beside
    ),
    "zip with itself": Row(
        options=options(batch_size=3, shuffle=True), drive=zipped, torch=(2,), ours=WITH_WORKERS
    ),
    "zip with itself, persistent": Row(
        options=options(batch_size=3, shuffle=True, persistent_workers=True), drive=zipped, ours=WITH_WORKERS
    ),
    "nested in another": Row(lambda: Numbers(4), options(batch_size=2), nested_in_another),
    "dropped": Row(options=options(batch_size=2, shuffle=True), drive=dropped, ours=WITH_WORKERS, torch=(2,)),
    "dropped, persistent": Row(
        options=options(batch_size=2, shuffle=True, persistent_workers=True), drive=dropped, ours=WITH_WORKERS
    ),
    "in threads": Row(options=options(batch_size=3), drive=in_threads, torch=(0,)),
    "handed over": Row(options=options(batch_size=2), drive=handed_over),
    "in a fork": Row(
        options=options(batch_size=3, shuffle=True), drive=in_a_fork, ours=("local", "workers", "inline"), torch=(0, 2)
    ),
    "nested in itself": Row(lambda: Numbers(4), options(batch_size=2, shuffle=True), drive=nested),
    "after the end": Row(options=options(batch_size=6), drive=after_the_end),
    "after the end, persistent": Row(options=options(batch_size=6, persistent_workers=True), drive=after_the_end),
    "attributes": Row(
        options=options(batch_size=4, timeout=3), drive=attributes, torch=(2,), exact=True, ours=("local",)
    ),
    "attributes without batches": Row(
        options=options(batch_size=None, in_order=False), drive=attributes, exact=True, ours=("local",)
    ),
    "attributes that may not be changed": Row(options=options(batch_size=4), drive=refused_changes),
    "attributes that may be changed": Row(
        options=options(batch_size=4, shuffle=True), drive=allowed_changes, torch=(2,)
    ),
    "copies": Row(
        options=lambda: {"batch_size": 4, "shuffle": True, "generator": seeded()},
        drive=copies, exact=True, ours=("local",),
    ),
    "dataset changes between epochs": Row(
        State, options(batch_size=7, collate_fn=told_state), change_dataset, ours=("local", "workers", "inline")
    ),
    "dataset grows between epochs": Row(
        lambda: [torch.tensor(number) for number in range(3)], options(shuffle=True), change_list,
        ours=("local", "workers", "inline"),
    ),
    "dataset changes, unseen by persistent workers": Row(
        State, options(batch_size=7, collate_fn=told_state, persistent_workers=True), change_dataset,
        ours=("local", "workers"),
    ),
    "dataset grows, unseen by persistent workers": Row(
        lambda: [torch.tensor(number) for number in range(3)], options(persistent_workers=True), change_list,
        ours=("local", "workers"),
    ),
    "dataset changes during an epoch": Row(
        State, options(batch_size=2, collate_fn=told_state), change_while_loading, ours=("local", "workers"), torch=(2,)
    ),
}  # fmt: skip

for _name, _context in {
    "fork": "fork",
    "spawn": "spawn",
    "forkserver": "forkserver",
    "nonsense": "nonsense",
    "no context": 5,
    "a context": multiprocessing.get_context("fork"),
    "another context": multiprocessing.get_context("spawn"),
}.items():
    ROWS[f"multiprocessing_context: {_name}"] = Row(
        options=options(multiprocessing_context=_context, batch_size=5), drive=attributes, exact=True, ours=("local",)
    )


# Each worker has a stream of its own, so all of these depend on the number of workers.
STREAMS: dict[str, Row] = {
    name: dataclasses.replace(row, exact=True)
    for name, row in {
        "defaults": Row(Stream, drive=two_epochs),
        "batches": Row(Stream, options(batch_size=3), drive=two_epochs),
        "drop_last": Row(Stream, options(batch_size=3, drop_last=True)),
        "no batches": Row(Stream, options(batch_size=None)),
        "worker info": Row(Informed, options(batch_size=2)),
        "shared out": Row(lambda: Striped(20), options(batch_size=3)),
        "shared out, with drop_last": Row(lambda: Striped(20), options(batch_size=3, drop_last=True)),
        "shared out, without batches": Row(lambda: Striped(11), options(batch_size=None)),
        "shared out by the init function": Row(Ranged, options(batch_size=3, worker_init_fn=share_out)),
        "uneven": Row(Uneven, options(batch_size=2)),
        "uneven, with drop_last": Row(Uneven, options(batch_size=2, drop_last=True)),
        "uneven, without batches": Row(Uneven, options(batch_size=None)),
        "fewer samples than workers": Row(lambda: Striped(2), options(batch_size=3)),
        "empty": Row(lambda: Stream(0), options(batch_size=3), drive=two_epochs),
        "generator": Row(Stream, lambda: {"generator": seeded()}, drive=two_epochs),
        "collate_fn": Row(Stream, options(batch_size=3, collate_fn=transposed)),
        "collate_fn asks for the worker": Row(lambda: Striped(9), options(batch_size=3, collate_fn=inform)),
        "prefetch_factor": Row(lambda: Striped(20), options(batch_size=2, prefetch_factor=1)),
        "persistent workers": Row(Counts, options(batch_size=2, persistent_workers=True), drive=three_epochs),
        "workers that are not persistent": Row(Counts, options(batch_size=2), drive=two_epochs),
        "left early": Row(lambda: Striped(30), options(batch_size=2), drive=early_break),
        "left early, persistent": Row(
            lambda: Striped(30), options(batch_size=2, persistent_workers=True), drive=early_break
        ),
        "two iterators": Row(lambda: Striped(30), options(batch_size=2), drive=beside),
        "two iterators, persistent": Row(
            lambda: Striped(30), options(batch_size=2, persistent_workers=True), drive=beside
        ),
        "zip with itself": Row(lambda: Striped(9), options(batch_size=2), drive=zipped),
        "nested in itself": Row(lambda: Striped(4), options(batch_size=2), drive=nested),
        "after the end": Row(lambda: Striped(9), options(batch_size=2), drive=after_the_end),
        "any order": Row(lambda: Striped(20), options(batch_size=3, in_order=False), as_sets=True),
        "ChainDataset": Row(lambda: ChainDataset([Striped(5), Striped(8)]), options(batch_size=2)),
        "fails": Row(Breaks, options(batch_size=2)),
        "fails, without batches": Row(Breaks, options(batch_size=None)),
        "fails and goes on": Row(Resumes, options(batch_size=2)),
        "is no iterator": Row(NoIterator, drive=first_error),
        "right length": Row(lambda: Sized(20, 20), options(batch_size=3), ours=("local", "workers")),
        "length that is too short": Row(lambda: Sized(20, 7), options(batch_size=3), ours=("local", "workers")),
        "length that is too long": Row(lambda: Sized(5, 9), options(batch_size=None), ours=("local", "workers")),
        "length with drop_last": Row(
            lambda: Sized(20, 8), options(batch_size=3, drop_last=True), ours=("local", "workers")
        ),
        "changes between epochs": Row(Stream, options(batch_size=3), change_dataset, ours=("local", "workers")),
        "changes, unseen by persistent workers": Row(
            Stream, options(batch_size=3, persistent_workers=True), change_dataset, ours=("local", "workers")
        ),
        "shuffle": Row(Stream, options(shuffle=True)),
        "no shuffle": Row(Stream, options(shuffle=False, batch_size=5)),
        "sampler": Row(Stream, options(sampler=[1, 2])),
        "batch_sampler": Row(Stream, options(batch_sampler=[[1, 2]])),
        "timeout": Row(Stream, options(batch_size=3, timeout=100)),
        "pin_memory": Row(Stream, options(batch_size=3, pin_memory=True)),
        "attributes": Row(Stream, options(batch_size=3), attributes, ours=("local",)),
        "in a fork": Row(lambda: Striped(20), options(batch_size=2), in_a_fork, ours=("workers",)),
    }.items()
}


# Random numbers are those of the sample's place, whoever loads: compared among ours.
DRAWS: dict[str, Row] = {
    "shuffled": Row(Augmented, options(batch_size=3, shuffle=True), two_epochs),
    "with a generator": Row(Augmented, lambda: {"batch_size": 3, "shuffle": True, "generator": seeded()}, two_epochs),
    "without batches": Row(Augmented, options(batch_size=None)),
    "__getitems__": Row(AugmentedBatches, options(batch_size=3)),
    "collate_fn that draws": Row(Augmented, options(batch_size=3, collate_fn=augment_batch)),
    "repeated index": Row(Augmented, options(sampler=[4] * 12, batch_size=3)),
    "with replacement": Row(
        Augmented, lambda: {"sampler": RandomSampler(range(20), replacement=True, num_samples=30), "batch_size": 4}
    ),
    "batches of varying sizes": Row(Augmented, lambda: {"batch_sampler": Buckets()}),
    "init function that seeds": Row(Augmented, options(batch_size=3, worker_init_fn=torch.manual_seed)),
    "persistent": Row(Augmented, options(batch_size=3, shuffle=True, persistent_workers=True), three_epochs),
    "persistent, left early": Row(Augmented, options(batch_size=3, persistent_workers=True), early_break),
    "left early": Row(Augmented, options(batch_size=3, shuffle=True), early_break),
    "any order": Row(Augmented, options(batch_size=3, in_order=False), as_sets=True),
}
