from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from rpcdataloader.fetch.collate import MIN_PIECE_BYTES, TensorCollator, find_stacks
from rpcdataloader.wire.tensors import Stack

SIZE = MIN_PIECE_BYTES // 4


def image(value=0.0):
    return torch.full((4, SIZE // 4), float(value))


def gathered(samples):
    """Of the parts of the first sample, those that are sent as they are."""
    return [stack.tensors for stack in find_stacks(samples).values()]


@pytest.mark.parametrize(
    "make",
    [
        image,
        lambda value: (image(value), 5),
        lambda value: {"image": image(value), "label": torch.tensor(1)},
        lambda value: {"views": [image(value)], "name": "a"},
        lambda value: torch.full((SIZE,), value, dtype=torch.float32).view(4, -1),
        lambda value: torch.full((2 * SIZE,), value, dtype=torch.bfloat16),
    ],
    ids=["tensor", "tuple", "dict", "nested", "view", "bfloat16"],
)
def test_tensors_that_only_the_batch_has_are_sent_as_they_are(make):
    samples = [make(value) for value in range(5)]
    ((first, *_rest),) = gathered(samples)
    assert len(_rest) == 4
    parts = [samples[0]] if isinstance(samples[0], torch.Tensor) else list(torch.utils._pytree.tree_leaves(samples[0]))
    assert any(first is part for part in parts)


kept: list[object] = []


def keep(value):
    kept.append(value)
    return value


def keep_alias(make_alias):
    def make(value):
        tensor = image(value)
        keep(make_alias(tensor))
        return tensor

    return make


@pytest.mark.parametrize(
    "make",
    [
        lambda value: keep(image(value)),
        lambda value: (keep(image(value)), 1),
        lambda value: keep((image(value), 1)),
        lambda value: keep({"image": image(value)}),
        lambda value: {"a": keep([image(value)])},
        keep_alias(torch.Tensor.numpy),
        keep_alias(torch.Tensor.detach),
        keep_alias(lambda tensor: tensor[1:]),
        lambda value: keep(image(value)).view(-1),
        lambda value: keep(image(value).view(2, 2, -1)).view(-1),
        keep_alias(torch.Tensor.untyped_storage),
        keep_alias(torch.Tensor.__dlpack__),
        lambda value: torch.from_numpy(keep(np.full(SIZE, value, np.float32))),
        lambda value: torch.from_numpy(np.full(SIZE, value, np.float32)),
        lambda value: image(value).share_memory_(),
    ],
    ids=[
        "tensor", "in a tuple", "tuple", "dict", "list", "numpy", "detached", "slice", "base", "view of the same",
        "storage", "dlpack", "of numpy", "made by numpy", "shared memory",
    ],
)  # fmt: skip
def test_tensors_that_somebody_else_may_change_are_copied(make):
    samples = [make(value) for value in range(5)]
    assert gathered(samples) == []
    kept.clear()


@pytest.mark.parametrize(
    "samples",
    [
        lambda: [image(), torch.zeros(SIZE)],
        lambda: [image(), image().double()],
        lambda: [image(), image().requires_grad_()],
        lambda: [image().t() for _ in range(5)],
        lambda: [torch.zeros(SIZE // 2) for _ in range(5)],
        lambda: [image()],
        lambda: [(image(), 1), (image(),), image()],
        lambda: [{"a": image()}, {"b": image()}],
        lambda: (image(), image(), image(), image()),
        list,
    ],
    ids=["shape", "dtype", "grad", "strides", "small", "too few", "lengths", "keys", "not a list", "empty"],
)
def test_what_is_not_one_block_of_equal_pieces_is_collated_by_torch(samples):
    assert gathered(samples()) == []


def test_a_few_that_others_have_are_copied_alone():
    samples = [image(value) for value in range(5)]
    last = samples[4]
    ((*owned, copy),) = gathered(samples)
    assert all(tensor is sample for tensor, sample in zip(owned, samples, strict=False))
    assert copy is not last
    assert copy.equal(last)


def test_a_stack_is_collated_in_the_place_of_its_tensor():
    samples = [{"image": image(value), "label": value} for value in range(5)]
    expected = default_collate(samples)
    collator = TensorCollator(None)
    collator.stacks = find_stacks(samples)
    batch = default_collate(samples)  # torch's own
    assert batch["image"].equal(expected["image"])
    stack = collator([sample["image"] for sample in samples])
    assert type(stack) is Stack
    assert pickle.loads(pickle.dumps(stack)).equal(expected["image"])
    assert type(collator([sample["image"] for sample in samples[1:]])) is torch.Tensor
