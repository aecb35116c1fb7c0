"""Digests of indices and samples: the same in every process, others for other values."""

from __future__ import annotations

import numpy as np
import torch

from rpcdataloader.wire.digests import digest

VALUES = [
    5, [5, 6], [6, 5], [5, "six"], (5, None), [True, 1.5], "text", b"bytes", {"a": 1, "b": 2}, {"a": 2, "b": 1},
    torch.arange(4), torch.arange(4)[::2], torch.tensor(3.0, dtype=torch.bfloat16), np.arange(4.0),
    np.arange(9).reshape(3, 3).T, np.array(["a", None], dtype=object), np.array(["b", None], dtype=object),
    2**70, 2**71, [2**64 - 1], -(2**63), {3, 4}, object(), [torch.arange(2), 7],
]  # fmt: skip


def test_digest_is_the_same_in_any_process_and_tells_values_apart():
    digests = [digest(value) for value in VALUES]
    assert len(set(digests)) == len(digests)
    assert digest(digests) == 2169626089  # of this process and all others, whose hashes of texts and addresses differ


def test_indices_have_the_same_digest_whatever_makes_them():
    indices = list(range(300, 310))
    assert digest(indices) == digest(list(np.array(indices))) == digest(list(torch.tensor(indices)))
    assert digest(indices) == digest(range(300, 310)) == digest(np.array(indices)) == digest(torch.tensor(indices))


def test_value_that_cannot_be_read_does_not_count():
    class Broken(dict):
        def items(self):
            raise OSError("gone")

    loop: list[object] = []
    loop.append(loop)
    assert digest(Broken(), 5) == digest(torch.eye(2).to_sparse(), 5) == digest(loop, 5) == 5
