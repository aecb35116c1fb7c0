"""One row of the table, run through torch's loader or through ours: everything that a script could notice."""

from __future__ import annotations

import dataclasses
import gc
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from rpcdataloader import RPCDataloader, RPCDataset
from tests.support.comparison import assert_same
from tests.support.datasets import Numbers

# Arguments that torch refuses without workers.
OF_WORKERS = {"multiprocessing_context", "persistent_workers", "prefetch_factor"}

# More batches than any row has: an iterator that never ends is told from one that does.
MAX_STEPS = 60


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception: its type, and the first line of what it says.

    torch puts the original text after a heading and before nothing: at the end of a traceback.
    """

    type: type[BaseException]
    line: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        lines = str(error).splitlines() or [""]
        if "Original Traceback (most recent call last):" in str(error):
            last = re.compile(r"(?:\w+\.)*" + type(error).__name__ + r"(?:: (.*))?$")
            lines = [match[1] or "" for line in reversed(lines) if (match := last.match(line))]
        # Refers to torch's iterator, which takes 10 s to end when it is found by the collector.
        error.__traceback__ = None
        return cls(type(error), lines[0])


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to run a row.

    Attributes:
        how: ``torch``; ``local`` for workers of this machine; ``workers``, ``RPCDataset`` or ``built in workers`` for a
            node server; ``inline``.
    """

    how: str
    num_workers: int

    def __str__(self) -> str:
        return f"{self.how}-{self.num_workers}"


OURS = [
    Variant("local", 2),
    *(Variant(how, number) for how in ("workers", "RPCDataset") for number in (1, 2, 3)),
    Variant("built in workers", 2),
    Variant("inline", 1),
]


@dataclasses.dataclass(frozen=True)
class New:
    """The value of an argument that has a state: made anew for each run."""

    make: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A dataset and arguments.

    Attributes:
        dataset: Makes the dataset; also what an ``RPCDataset`` is given.
        options: The arguments.
        drive: Uses the loader; what it returns or yields is compared.
        exact: The outcome depends on the number of workers: compare with as many of torch's.
        ours: Which of our variants, by how they load.
        torch: Which numbers of torch's workers.
        numbers: Which numbers of our workers.
        as_sets: Batches in any order.
    """

    dataset: Callable[[], Any] = Numbers
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drive: Callable[[Any], Iterable[Any]] = lambda loader: epochs(loader)
    exact: bool = False
    ours: tuple[str, ...] = ("local", "workers", "RPCDataset", "inline")
    torch: tuple[int, ...] = (0, 2)
    numbers: tuple[int, ...] = (1, 2, 3)
    as_sets: bool = False

    def variants(self) -> list[Variant]:
        """Those of ours that it is for."""
        found = [variant for variant in OURS if variant.how in self.ours and variant.num_workers in self.numbers]
        return [variant for variant in found if not (self.exact and variant.how == "inline")]

    def some_variants(self, turn: int) -> list[Variant]:
        """That without workers, and one of those with them; more than two only where their number matters."""
        variants = self.variants()
        workers = [variant for variant in variants if variant.how != "inline"]
        workers = [variant for variant in workers if variant.num_workers <= 2 or self.exact] or workers
        return [variant for variant in variants if variant.how == "inline" or variant == workers[turn % len(workers)]]

    def references(self, variants: Iterable[Variant]) -> list[Variant]:
        """Those of torch's that these are compared with."""
        if self.exact:
            return [Variant("torch", number) for number in sorted({variant.num_workers for variant in variants})]
        needs_workers = bool(OF_WORKERS & set(self.options))
        return [Variant("torch", number) for number in self.torch if number or not needs_workers]

    def make(self, variant: Variant, addresses: Mapping[int, str]) -> Any:
        """The loader.

        Args:
            addresses: A node server for each number of workers.
        """
        options = {name: value.make() if isinstance(value, New) else value for name, value in self.options.items()}
        match variant.how:
            case "torch":
                return DataLoader(self.dataset(), num_workers=variant.num_workers, **options)
            case "local":
                return RPCDataloader(self.dataset(), num_workers=variant.num_workers, **options)
            case "workers":
                return RPCDataloader(self.dataset(), workers=addresses[variant.num_workers], **options)
            case "inline":
                return RPCDataloader(self.dataset(), workers="inline", **options)
        build = "node" if variant.how == "RPCDataset" else "worker"
        return RPCDataloader(RPCDataset(addresses[variant.num_workers], self.dataset, build=build), **options)

    def run(self, variant: Variant, addresses: Mapping[int, str]) -> list[Any]:
        """What happens, warnings included."""
        seed()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                outcome = list(self.drive(self.make(variant, addresses)))
            except Exception as exc:
                outcome = ["refused", Raised.of(exc)]
            gc.collect()  # tracebacks refer to torch's iterator, and it to its workers
        if self.as_sets:
            outcome.sort(key=repr)
        return [*outcome, *(seen for warning in caught if (seen := _seen(warning)))]

    def check(self, addresses: Mapping[int, str], turn: int | None = None) -> None:
        """Ours does what torch does.

        Args:
            turn: Where the row is in its table, to compare some variants only; None for all of them.
        """
        variants = self.variants() if turn is None else self.some_variants(turn)
        references = self.references(variants)
        if turn is not None and not self.exact:
            references = references[:1]  # as a rule without workers, which costs no fork: torch keeps them alike
        expected = {reference.num_workers: self.run(reference, addresses) for reference in references}
        for variant in variants:
            outcome = self.run(variant, addresses)
            like = [variant.num_workers] if self.exact else expected
            for number in like:
                assert_same(outcome, expected[number], f"{variant} beside torch-{number}")


def row(dataset: Callable[[], Any] = Numbers, drive: Callable[[Any], Iterable[Any]] | None = None, **given: Any) -> Row:
    """A row from its own fields and arguments of the loader."""
    names = {field.name for field in dataclasses.fields(Row)}
    own = {name: value for name, value in given.items() if name in names}
    options = {name: value for name, value in given.items() if name not in names}
    return Row(dataset, options, drive or epochs, **own)


# Of the test's own making: a process with threads forks torch's workers; more of them than there are CPUs.
UNWANTED = re.compile("This process .* is multi-threaded, use of fork|This DataLoader will create . worker processes")


def _seen(warning: warnings.WarningMessage) -> tuple[Any, ...] | None:
    text = str(warning.message).splitlines()[0]
    if text.startswith("Length of IterableDataset "):
        # The rest is advice, in other words, with the dataset's repr or its type.
        return "warning", warning.category, re.findall(r"reported to be (\d+) ?\(.* but (\d+) samples", text)
    if warning.category is ResourceWarning or UNWANTED.match(text):
        return None
    return "warning", warning.category, text


def seed(number: int = 7) -> None:
    """Put the three global generators to where each run begins.

    ``torch.manual_seed`` would also keep the stack of each call, for devices, which takes longer than all else here.
    """
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def seeded(number: int = 5) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(number)


# Drives


def steps(iterator: Iterator[Any], count: int = MAX_STEPS) -> Iterator[Any]:
    """Batches and exceptions as they come, until the end or ``count``."""
    for _ in range(count):
        try:
            yield next(iterator)
        except StopIteration as exc:
            exc.__traceback__ = None  # see above
            yield "end"
            return
        except Exception as exc:
            yield Raised.of(exc)


def states(loader: Any) -> list[Any]:
    """Where the generators are."""
    of_numpy: Any = np.random.get_state()
    found = [torch.get_rng_state(), random.getstate(), of_numpy[1]]
    return found if loader.generator is None else [*found, loader.generator.get_state()]


def epochs(loader: Any, count: int = 1) -> Iterator[Any]:
    """Everything, and the generators after each epoch."""
    yield attempt(lambda: len(loader))
    for _epoch in range(count):
        iterator = iter(loader)
        yield attempt(lambda: len(iterator))  # noqa: B023
        yield from steps(iterator)
        yield states(loader)


def attempt(function: Callable[[], Any]) -> Any:
    """What it returns or raises."""
    try:
        return function()
    except Exception as exc:
        return Raised.of(exc)
