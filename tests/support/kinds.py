"""Batches of everything that a collate function may return, each made from the same seed wherever it is made."""

from __future__ import annotations

import array
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
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


@dataclasses.dataclass
class Slotted:
    __slots__ = ("value",)
    value: torch.Tensor


class Named(dict[str, Any]):
    """A dictionary with an attribute."""

    name = ""


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Tagged(torch.Tensor):
    """A subclass."""


class Boxes(torch.Tensor):
    """A subclass with an attribute, which it gives to what is computed from it."""

    canvas: tuple[int, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Boxes) and args and isinstance(args[0], Boxes):
            result.canvas = getattr(args[0], "canvas", (0, 0))
        return result


def make_structures() -> dict[str, Any]:
    image = torch.rand(3, 8, 8)
    leap_day, third = datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc), fractions.Fraction(1, 3)
    named = Named(a=image)
    named.name = "cat"
    return {
        "own classes": [Slotted(torch.ones(2)), named, types.SimpleNamespace(x=1, y=torch.ones(1))],
        "times": [leap_day, datetime.timedelta(3), datetime.date.min],
        "exact numbers": [decimal.Decimal("1.10"), third, np.float32(1.5), np.int8(3), np.bool_(True)],
        "names": [pathlib.Path("/a/b"), uuid.UUID(int=3), np.str_("x"), np.datetime64("2024-01-01"), Level.LOW],
        "more collections": [Counter("aab"), deque([1, 2], maxlen=3), array.array("d", [1.0, 2.0]), NotImplemented],
        "many objects": [(number, str(number)) for number in range(20_000)],
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
        "packed": torch.nn.utils.rnn.pack_sequence([torch.rand(5, 3), torch.rand(2, 3)]),
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
        "part of an image": torch.rand(2, 3, 50, 50).to(memory_format=torch.channels_last)[:, :, 5:25, 5:25],
        "strided": torch.rand(20).as_strided((3, 4), (2, 1)),
        "requires grad, computed": torch.rand(3, requires_grad=True) * 2,
        "hybrid": torch.rand(4, 4).to_sparse(1),
        "parameter without grad": torch.nn.Parameter(torch.rand(3), requires_grad=False),
        "zero size": torch.rand(0),
        "meta": torch.empty(3, device="meta"),
        "one of a storage": large[0],
        "another of it": large[1],
    }
    boxes = torch.rand(2, 4).as_subclass(Boxes)
    boxes.canvas = (480, 640)
    made["boxes"] = boxes
    with_attribute = torch.rand(2)
    with_attribute.source = "cat"  # type: ignore[attr-defined]
    made["attribute"] = with_attribute
    large_boxes, image = torch.rand(20_000, 4).as_subclass(Boxes), torch.rand(3, 200, 300)
    large_boxes.canvas, large_boxes.scale = (480, 640), torch.ones(3)  # type: ignore[attr-defined]
    large_with_attribute = torch.rand(20_000)
    large_with_attribute.source = "cat"  # type: ignore[attr-defined]
    made |= {
        "boxes, large": large_boxes,
        "attribute, large": large_with_attribute,
        "subclass, large": image.as_subclass(Tagged),
        "subclass, large and permuted": image.clone().permute(1, 2, 0).as_subclass(Tagged),
        "subclass, part of a large one": image[:, 20:, 7:].as_subclass(Tagged),
        "subclass, row of a large one": image[1].as_subclass(Tagged),
        "subclass, large, half": image.bfloat16().as_subclass(Tagged),
        "subclass, large, requires grad": image.clone().as_subclass(Tagged).requires_grad_(),
        "subclass, large, conjugate": torch.rand(9_000, dtype=torch.complex64).conj().as_subclass(Tagged),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and deprecations
        made |= {
            "sparse rows": torch.eye(4).to_sparse_csr(),
            "sparse columns": torch.eye(4).to_sparse_csc(),
            "sparse blocks": torch.eye(4).to_sparse_bsr((2, 2)),
            "quantized by channel": torch.quantize_per_channel(
                torch.rand(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
            ),
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
        "masked": np.ma.masked_array([1, 2], [True, False], fill_value=9),
        "masked, large": np.ma.masked_array(np.arange(20_000), np.arange(20_000) % 2 == 0),
        "records": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "structured, large": np.zeros(20_000, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        "with objects": np.array([(1, "x")], dtype=[("a", "i4"), ("b", object)]),
        "dates, large": np.arange(20_000).astype("M8[s]"),
        "permuted": np.random.rand(2, 3, 4).transpose(1, 0, 2),
        "permuted, large": np.random.rand(20, 30, 40).transpose(1, 0, 2),
        "repeated": np.broadcast_to(np.arange(3), (4, 3)),
        "repeated, large": np.broadcast_to(np.arange(3), (20_000, 3)),
        "read-only": _read_only(np.arange(3)),
        "read-only, large": _read_only(np.asfortranarray(np.random.rand(100, 200))),
        "bytes": np.frombuffer(b"abc", dtype=np.uint8),
    }


def _read_only(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values.flags.writeable = False
    return values


def make_images() -> list[Any]:
    """Of the image library, if it is there."""
    try:
        from PIL import Image
    except ImportError:
        return []
    return [Image.new(mode, (5, 4), 3) for mode in ("1", "L", "F", "RGB", "RGBA")]


MAKERS: dict[str, Callable[[], Any]] = {
    "structures": make_structures,
    "tensors": make_tensors,
    "arrays": make_arrays,
    "images": make_images,
}


class Kinds:
    """Its samples are batches already."""

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
