"""Small tensors in shared memory, by which a script tells workers something: torch's persistent ones of their epoch.

A node has copies, which share nothing with the script. Each tensor has a number, which goes with it into the pickle: so
its copy is known wherever the methods of a dataset have put it, and takes the values that the script sets later.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping

import torch

# Bytes of a tensor by which a script tells something; others hold data.
_MAX_BYTES = 1 << 12

_KINDS = torch.Tensor, torch.nn.Parameter


class _Told:
    """A tensor of this process, and its value when it was sent first."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.number = next(_numbers)
        self.tensor = weakref.ref(tensor, functools.partial(_forget, id(tensor)))
        self.sent = tensor.detach().clone()
        self.was_set = False  # since then, by the script: it may be as before again

    def value(self) -> torch.Tensor | None:
        """Its present value; None if it is gone."""
        if (tensor := self.tensor()) is None:
            return None
        value = tensor.detach().clone()
        self.was_set = self.was_set or not torch.equal(value, self.sent)
        return value


_numbers = itertools.count()

#: Tensors of this process that were sent, by their ids.
sent_tensors: dict[int, _Told] = {}


def _forget(identity: int, _tensor: object) -> None:
    sent_tensors.pop(identity, None)


def number_of(tensor: torch.Tensor) -> int | None:
    """The number of a tensor that is sent; None if it tells nothing."""
    if type(tensor) not in _KINDS or not tensor.is_cpu or tensor.layout != torch.strided:
        return None  # a sparse one has no memory of its own
    is_shared = tensor.nbytes <= _MAX_BYTES and tensor.is_shared()  # type: ignore[no-untyped-call]
    if not is_shared:
        return None
    found = sent_tensors.get(id(tensor)) or sent_tensors.setdefault(id(tensor), _Told(tensor))
    found.value()  # a copy may have another one than the first had
    return found.number


def values_set() -> dict[int, torch.Tensor]:
    """Present values of the tensors that the script has ever set since they were sent, by their numbers."""
    values = {found.number: (found, found.value()) for found in list(sent_tensors.values())}
    return {number: value for number, (found, value) in values.items() if value is not None and found.was_set}


# The receiver's side: tensors of this process that are copies of one, by its number.
_copies: dict[int, list[weakref.ref[torch.Tensor]]] = {}


def note_copy(tensor: torch.Tensor, number: int) -> None:
    """Note that a tensor was made from the pickle of one with this number."""
    _copies[number] = [each for each in _copies.get(number, ()) if each() is not None] + [weakref.ref(tensor)]


def set_values(values: Mapping[int, torch.Tensor]) -> None:
    """Give the copies in this process other values."""
    for number, value in values.items():
        for refer in _copies.get(number, ()):
            if (tensor := refer()) is not None and tensor.shape == value.shape:
                tensor.detach().copy_(value)
