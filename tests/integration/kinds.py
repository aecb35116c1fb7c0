"""Batches of everything that a collate function may return, each made from the same seed wherever it is made."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch


class Point(NamedTuple):
    x: torch.Tensor
    label: str


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    box: dict[str, Any]
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: int


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Tagged(torch.Tensor):
    """A subclass."""


class Pinnable:
    """A batch type with a method of its own for pinning."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.pinned = False

    def pin_memory(self) -> Pinnable:
        self.pinned = True
        return self


def make_structures() -> dict[str, Any]:
    image = torch.rand(3, 8, 8)
    return {
        "nested": {"a": [torch.tensor([1, 2]), (torch.tensor(3.0), None)], 4: {"deep": {"deeper": torch.ones(2)}}},
        "namedtuples": [Point(torch.rand(2), "p"), Pair(torch.rand(1), Pair(1, "two"))],
        "dataclasses": [Sample(image, {"xy": torch.tensor([1, 2])}, "cat"), Sample(image.clone(), {}), Frozen(3)],
        "ordered": OrderedDict(b=torch.zeros(1), a=torch.ones(1)),
        "default": defaultdict(list, {"x": [1]}),
        "strings": ["", "text", "\udcff surrogate", "ünïcode", b"bytes", bytearray(b"array"), b"x" * 100_000],
        "numbers": [None, True, 1, -(2**70), 1.5, float("inf"), 2 + 3j, Color.BLUE],
        "collections": [{1, 2}, frozenset("ab"), slice(1, None, 2), range(4), ...],
        "types": [int, torch.float16, torch.device("cpu"), torch.Size([1, 2])],
        "empty": [[], {}, (), set()],
        "same object twice": [image, image],
    }


def make_tensors() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    ):  # fmt: skip
        for kind, shape in (("small", (3, 5)), ("large", (400, 300)), ("scalar", ()), ("empty", (0, 4))):
            made[f"{kind} {dtype}"] = (torch.rand(shape) * 100).to(dtype)
    for name in ("float8_e4m3fn", "uint16", "uint32", "uint64"):
        if hasattr(torch, name):
            made[name] = torch.arange(6).view(2, 3).to(getattr(torch, name))
    large = torch.rand(200, 300)
    made |= {
        "channels last": torch.rand(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "transposed": large.clone().t(),
        "expanded": torch.rand(4, 1).expand(4, 30_000),
        "row of a large one": torch.rand(1000, 100)[7],
        "column of a large one": torch.rand(1000, 100)[:, 7],
        "with a step": torch.rand(100, 100)[::7, 3::2],
        "not a number": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "conjugate": torch.rand(3, dtype=torch.complex64).conj(),
        "negative": torch.rand(3, dtype=torch.complex64).conj().imag,
        "requires grad": torch.rand(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.rand(100, 300)),
        "subclass": torch.rand(3).as_subclass(Tagged),
        "sparse": torch.rand(4, 4).relu().to_sparse(),
        "not coalesced": torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,)),
        "zero size": torch.rand(0),
        "meta": torch.empty(3, device="meta"),
        "one of a storage": large[0],
        "another of it": large[1],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and deprecations
        made |= {
            "sparse rows": torch.eye(4).to_sparse_csr(),
            "nested": torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)]),
            "quantized": torch.quantize_per_tensor(torch.rand(5), 0.1, 3, torch.quint8),
        }
    return made


def make_arrays() -> dict[str, Any]:
    pair = np.dtype([("x", "f4"), ("name", "U3")])
    return {
        "plain": np.arange(6).reshape(2, 3),
        "large": np.random.rand(100, 200),
        "fortran": np.asfortranarray(np.random.rand(100, 200)),
        "with a step": np.arange(100)[::7],
        "reversed": np.arange(10)[::-1],
        "scalar": np.float32(3.5),
        "0-d": np.array(7, dtype="i2"),
        "empty": np.empty((0, 3)),
        "structured": np.array([(1.0, "abc"), (2.0, "d")], dtype=pair),
        "objects": np.array([None, "x", 3], dtype=object),
        "strings": np.array(["a", "bcd"]),
        "dates": np.array(["2024-02-29"], dtype="datetime64[D]"),
        "big-endian": np.arange(3, dtype=">i4"),
        "bool": np.array([True, False]),
        "half": np.arange(3, dtype="f2"),
    }


MAKERS = {"structures": make_structures, "tensors": make_tensors, "arrays": make_arrays}


class Kinds:
    """Its samples are batches already."""

    def __len__(self) -> int:
        return len(MAKERS)

    def __getitem__(self, name: str) -> Any:
        return make(name)


def make(name: str) -> Any:
    torch.manual_seed(1)
    np.random.seed(1)
    return MAKERS[name]()


def as_is(value: Any) -> Any:
    """In place of the collate function."""
    return value


def make_small_and_large(_samples: object) -> dict[str, Any]:
    """What most batches look like: images, labels, and something about each."""
    torch.manual_seed(1)
    return {
        "image": torch.rand(16, 3, 32, 32),
        "label": torch.arange(16),
        "weight": torch.rand(16),
        "boxes": [torch.rand(2, 4) for _ in range(16)],
        "array": np.arange(20_000.0),
    }
