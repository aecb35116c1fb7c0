"""Every sample has random numbers of its own, whatever wraps its dataset: torch's wrappers, and those of libraries.

A table: each wrapper over each other, over a dataset that draws from the four sources of random numbers. The numbers of
a sample are those of no other, the same for any number of workers, and the same again when other ranks go on with
batches of another size.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    IterableDataset,
    StackDataset,
    Subset,
    get_worker_info,
    random_split,
)

from rpcdataloader import ResumableDistributedSampler, RPCDataloader, get_sample_seed
from tests.conftest import close_client, descendants, wait_until
from tests.support.datasets import Numbers, draw
from tests.support.library import Library
from tests.support.quick import quick_server
from tests.support.zygote import Zygote

SIZE = 28
MAX_WORKERS = 7

tfrecord = Library("tfrecord.iterator_utils", "tfrecord")
wds = Library("webdataset")
nodes = Library("torchdata.nodes", "torchdata")
hf = Library("datasets")
accelerate = Library("accelerate.data_loader", "accelerate")
pipelines = Library("transformers.pipelines.pt_utils", "transformers")
trainer = Library("transformers.trainer_pt_utils", "transformers")


@pytest.fixture(scope="module")
def address(zygote: Zygote) -> Iterator[str]:
    close_client()
    processes = set(descendants(os.getpid()))
    with quick_server(zygote, "--num-workers", str(MAX_WORKERS), "--max-connections", "64") as server:
        yield server.address
        close_client()
    wait_until(lambda: not set(descendants(os.getpid())) - processes, what="processes left behind")
    wait_until(lambda: not any(thread.name.startswith("rpcdl") for thread in threading.enumerate()), what="threads")


def drawn(number: Any, *more: int) -> torch.Tensor:
    """A sample: which one it is, and a number from each source."""
    seed = np.random.default_rng((get_sample_seed(), *more)).random()
    return torch.tensor([number, *draw(), seed], dtype=torch.float64)


# Map-style


class Drawn(Numbers):
    def __getitem__(self, index: int) -> Any:
        return drawn(index)


class Forwarding:
    """A wrapper that passes on what it has not itself, as many scripts have one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def drawn_rows(columns: dict[str, list[int]]) -> dict[str, list[torch.Tensor]]:
    return {"row": [drawn(number, number) for number in columns["number"]]}


def hf_rows() -> Any:
    """Draws for a whole batch at once."""
    return hf.Dataset.from_dict({"number": range(SIZE)}).with_transform(drawn_rows)


def same(sample: Any) -> Any:
    return sample


BASES: dict[str, Callable[[], Any]] = {"torch": functools.partial(Drawn, SIZE), "Hugging Face": hf_rows}


class Transforming(Subset[Any]):
    """A subclass as torch's documentation has it."""

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "Subset": lambda dataset: Subset(dataset, range(len(dataset) - 1, -1, -1)),
    "random_split": lambda dataset: random_split(dataset, [len(dataset), 0])[0],
    "StackDataset": lambda dataset: StackDataset(dataset, Numbers(len(dataset))),
    "StackDataset by name": lambda dataset: StackDataset(image=dataset, label=Numbers(len(dataset))),
    "ConcatDataset": lambda dataset: ConcatDataset([dataset, dataset]),
    "subclass": lambda dataset: Transforming(dataset, range(len(dataset))),
    "own": Forwarding,
    "PipelineDataset": lambda dataset: pipelines.PipelineDataset(dataset, same, {}),
    "KeyDataset": lambda dataset: pipelines.KeyDataset(StackDataset(image=dataset), "image"),
}

# Only these ask a dataset behind them for whole batches.
PASSED_ON = {"Subset", "random_split", "subclass", "own"}


# Iterable-style


class DrawnStream(IterableDataset[Any]):
    """Shared out among the workers."""

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        return map(drawn, range(info.id, SIZE, info.num_workers))


class Through(IterableDataset[Any]):
    """A stream that goes through what a library makes of it."""

    def __init__(self, wrap: Callable[[Any], Any], source: Any) -> None:
        self.wrap, self.source = wrap, source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wrap(self.source))


def through(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return functools.partial(Through, wrap)


def hf_stream(source: Any) -> Any:
    return hf.IterableDataset.from_generator(lambda: ({"row": row.numpy()} for row in source))


def of_hf(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return through(lambda source: (torch.tensor(row["row"]) for row in wrap(hf_stream(source))))


def in_batches(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return rows


def of_wds(*stages: str) -> Callable[[Any], Any]:
    def wrap(source: Any) -> Any:
        made = {"shuffle": lambda: wds.shuffle(6, initial=6, seed=3), "map": lambda: wds.map(same)}
        return wds.DataPipeline(lambda: iter(source), *(made[stage]() for stage in stages))

    return through(wrap)


def graph(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return through(lambda source: nodes.Loader(wrap(source)))


def weighted(source: Any) -> Any:
    sources = {name: nodes.IterableWrapper(source) for name in ("one", "other")}
    until = nodes.StopCriteria.ALL_DATASETS_EXHAUSTED
    return nodes.MultiNodeWeightedSampler(sources, {"one": 1.0, "other": 3.0}, stop_criteria=until, seed=3)


def weighted_iterators(source: Any) -> Any:
    return tfrecord.sample_iterators([lambda: iter(source)] * 2, [1, 3], infinite=False)


STREAM_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "ChainDataset": lambda stream: ChainDataset([stream, stream]),
    "read at once": through(list),
    "WebDataset, shuffle": of_wds("shuffle"),
    "WebDataset, map": of_wds("map", "shuffle", "map"),
    "WebDataset, RoundRobin": lambda stream: wds.RoundRobin([stream, stream], longest=True),
    "WebDataset, RandomMix": lambda stream: wds.RandomMix([stream, stream], longest=True),
    "TFRecord, shuffle": through(lambda source: tfrecord.shuffle_iterator(iter(source), 3)),
    "TFRecord, sample": through(weighted_iterators),
    "torchdata, Batcher": graph(lambda source: nodes.Unbatcher(nodes.Batcher(nodes.IterableWrapper(source), 3, False))),
    "torchdata, Mapper": graph(lambda source: nodes.Mapper(nodes.IterableWrapper(source), same)),
    "torchdata, weighted": graph(weighted),
    "Hugging Face, shuffle": of_hf(lambda source: source.shuffle(seed=3, buffer_size=3)),
    "Hugging Face, map": of_hf(lambda source: source.map(in_batches, batched=True, batch_size=3)),
    "Hugging Face, interleave": of_hf(lambda source: hf.interleave_datasets([source, source])),
    "Accelerate": lambda stream: accelerate.IterableDatasetShard(stream, 2, num_processes=2, process_index=1),
    "Transformers": lambda stream: trainer.IterableDatasetShard(stream, 2, num_processes=2, process_index=1),
}

# Repeat what they have read, to fill the last batch up.
REPEATING = {"Accelerate", "Transformers"}

# Read ahead in threads, at their own time: what is drawn there depends on it.
THREADED = {"Hugging Face, shuffle", "Hugging Face, interleave"}


# The rows


class Row(NamedTuple):
    base: str
    outer: str
    inner: str = ""

    def make(self) -> Any:
        made, wrappers = (DrawnStream(), STREAM_WRAPPERS) if self.base == "stream" else (BASES[self.base](), WRAPPERS)
        for name in filter(None, (self.inner, self.outer)):
            made = wrappers[name](made)
        return made

    @property
    def is_quick(self) -> bool:
        """Whether every run of the tests has it: each wrapper alone, and torch's over the most used ones."""
        if self.base == "stream":
            return not self.inner and not self.outer.startswith(("Accelerate", "Transformers", "Hugging Face"))
        torchs = list(WRAPPERS)[:7]
        return self.base == "torch" and self.outer in torchs and self.inner in ("", *torchs[:3])

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of workers: streams of one shard, as those of Hugging Face here, are read by one."""
        if any(name.startswith("Hugging Face, ") for name in self):
            return (1,)
        return (1, 3) if self.is_quick else (1, 3, MAX_WORKERS)

    def __str__(self) -> str:
        return " of ".join(filter(None, (self.outer, self.inner, self.base)))


def rows_of(bases: Any, wrappers: Any) -> list[Any]:
    rows = [Row(base, *names) for base in bases for names in itertools.product(wrappers, ["", *wrappers])]
    slow = pytest.mark.slow, pytest.mark.instruments
    return [pytest.param(row, marks=() if row.is_quick else slow, id=str(row)) for row in rows]


MAP_STYLE, STREAMS = rows_of(BASES, WRAPPERS), rows_of(["stream"], STREAM_WRAPPERS)


def rows_in(value: Any) -> list[tuple[float, ...]]:
    """The samples in a batch, without what wrappers add."""
    if isinstance(value, torch.Tensor) and value.ndim == 2:
        return [tuple(row) for row in value.tolist()]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [row for part in parts for row in rows_in(part)]


def load(dataset: Any, batch_size: int = 4, workers: str = "inline", num_workers: int = 0, **options: Any) -> Any:
    options.setdefault("generator", torch.Generator().manual_seed(1))
    return RPCDataloader(dataset, batch_size, workers=workers, num_workers=num_workers, **options)


def samples_of(loader: Any) -> list[tuple[float, ...]]:
    return [row for batch in loader for row in rows_in(batch)]


def check_independent(rows: list[tuple[float, ...]]) -> None:
    numbers = [number for row in rows for number in row[1:]]
    assert len(set(numbers)) == len(numbers)


def resumed(make: Callable[[], Any], batch_size: int, num_ranks: int) -> list[tuple[float, ...]]:
    """All samples of a pass that others go on with after its second batch."""

    def begin(batch_size: int, rank: int, num_ranks: int) -> Any:
        dataset = make()
        options: dict[str, Any] = {"partition": (rank, num_ranks)}
        if not isinstance(dataset, IterableDataset):
            options["sampler"] = ResumableDistributedSampler(dataset, num_ranks, rank)
        return load(dataset, batch_size, **options)

    loader = begin(4, 0, 1)
    batches = iter(loader)
    samples = [row for _ in range(2) for row in rows_in(next(batches))]
    for rank in range(num_ranks):
        goes_on = begin(batch_size, rank, num_ranks)
        goes_on.load_state_dict(loader.state_dict())
        samples += samples_of(goes_on)
    return samples


@pytest.mark.parametrize("row", MAP_STYLE)
def test_samples_of_wrapped_datasets_have_numbers_of_their_own(address, row):
    at_once = row.base != "torch" and {row.outer, row.inner} - {""} <= PASSED_ON
    torch.manual_seed(0)
    dataset = row.make()
    expected = samples_of(load(dataset))
    assert len(expected) == len(dataset)
    check_independent(expected)
    for num_workers in row.numbers:
        assert samples_of(load(dataset, workers=address, num_workers=num_workers)) == expected
    if not at_once:
        assert samples_of(load(dataset, 3)) == expected
        sampler = ResumableDistributedSampler(dataset, 1, 0)
        assert sorted(resumed(lambda: dataset, 2, 2)) == sorted(samples_of(load(dataset, sampler=sampler)))


@pytest.mark.filterwarnings("ignore:Number of elements in the iterator:UserWarning")  # of tfrecord
@pytest.mark.parametrize("row", STREAMS)
def test_samples_of_wrapped_streams_have_numbers_of_their_own(address, row):
    def of_workers(num_workers: int) -> list[tuple[float, ...]]:
        samples = samples_of(load(row.make(), workers=address, num_workers=num_workers))
        assert len(samples) >= SIZE / 4
        check_independent(list(dict.fromkeys(samples)) if REPEATING & set(row) else samples)
        return samples

    for num_workers in row.numbers:
        samples = of_workers(num_workers)
        if not THREADED & set(row):
            assert samples_of(load(row.make())) == samples if num_workers == 1 else of_workers(num_workers) == samples
    if not THREADED & set(row):
        assert samples_of(load(row.make(), 3)) == resumed(row.make, 3, 1) == of_workers(1)
