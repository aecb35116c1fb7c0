"""What it means that two batches are the same."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def assert_same(actual: Any, expected: Any, path: str = "batch") -> None:
    """Equal in type, structure, dtype, shape, strides, layout and bits."""
    assert type(actual) is type(expected), f"{path}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(actual, expected, path)
        assert_same(vars(actual), vars(expected), f"{path}.__dict__")
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype, path
        assert actual.shape == expected.shape, path
        if np.may_share_memory(expected, expected.ravel(order="K")):  # others arrive without what lies between
            assert actual.strides == expected.strides, path
        assert actual.flags.writeable, path
        np.testing.assert_array_equal(actual, expected, path)
    elif isinstance(expected, Mapping):
        if hasattr(expected, "__dict__"):
            assert vars(actual) == vars(expected), path
        assert list(actual) == list(expected), path
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{path}[{number}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(actual, field.name), getattr(expected, field.name), f"{path}.{field.name}")
    elif isinstance(expected, types.SimpleNamespace):
        assert_same(vars(actual), vars(expected), path)
    else:
        assert actual == expected, f"{path}: {actual!r} instead of {expected!r}"


def _assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    for name in ("dtype", "layout", "requires_grad", "is_quantized", "is_nested"):
        assert getattr(actual, name) == getattr(expected, name), f"{path}: {name}"
    if expected.is_nested:
        assert_same(list(actual.unbind()), list(expected.unbind()), path)
        return
    assert actual.shape == expected.shape, path
    for name in ("is_conj", "is_neg", "is_coalesced" if expected.layout is torch.sparse_coo else "is_conj"):
        assert getattr(actual, name)() == getattr(expected, name)(), f"{path}: {name}"
    if expected.is_quantized:
        assert actual.qscheme() == expected.qscheme(), path
        assert_same(actual.dequantize(), expected.dequantize(), path)
    elif expected.layout is torch.strided:
        assert actual.stride() == expected.stride(), f"{path}: {actual.stride()} instead of {expected.stride()}"
        if not expected.is_meta:
            assert _bits(actual) == _bits(expected), path
    else:
        assert_same(actual.to_dense(), expected.to_dense(), path)


def _bits(tensor: torch.Tensor) -> bytes:
    """In the order of the elements, so that NaN equals NaN."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return bytes(torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())[: plain.nbytes].numpy())
