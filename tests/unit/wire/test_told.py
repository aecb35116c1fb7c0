"""Small shared tensors: which are numbered, and whether their copies take what is set later; with workers, see
``tests/behaviour/test_definitions.py``.
"""

from __future__ import annotations

import gc

import pytest
import torch

from rpcdataloader.wire import told
from rpcdataloader.wire.pickling import dumps, loads
from rpcdataloader.wire.told import number_of, set_values, values_set


def shared(value=0.0, size=1):
    return torch.full((size,), value).share_memory_()


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    gc.collect()  # tensors of other tests
    monkeypatch.setattr(told, "sent_tensors", {})


def copy_of(value, *, in_band=False):
    encoded = dumps(value, in_band=in_band, with_told=True)
    return loads(encoded.payload, [])


class Restructured:
    """Leaves a tensor out of its pickle, so that the others have other places there."""

    def __init__(self, *tables):
        self.tables = list(tables)

    def __getstate__(self):
        return {"tables": self.tables[1:]}


@pytest.mark.parametrize("in_band", [False, True])
def test_copies_take_the_values_of_their_own_tensors_wherever_these_are(in_band):
    whole = Restructured(shared(), shared(), torch.nn.Parameter(shared()), shared().requires_grad_())
    copies = [copy_of(whole, in_band=in_band) for _copy in range(2)]
    assert values_set() == {}
    for number, table in enumerate(whole.tables):
        table.detach().fill_(10 + number)
    set_values(values_set())
    for copy in copies:
        assert [int(table) for table in copy.tables] == [11, 12, 13]
        assert [type(table) for table in copy.tables] == [type(table) for table in whole.tables[1:]]


def test_a_tensor_that_is_as_before_again_is_still_told():
    tensor = shared(1.0)
    tensor.fill_(2)
    first = copy_of(tensor)
    tensor.fill_(3)
    second = copy_of(tensor)
    tensor.fill_(2)
    set_values(values_set())
    assert (int(first), int(second)) == (2, 2)


def test_pickle_of_a_tensor_stays_the_same_while_its_value_does():
    for tensor in shared(), torch.nn.Parameter(shared()), shared().requires_grad_():
        for in_band in False, True:
            first, second = (bytes(dumps([tensor], in_band=in_band, with_told=True).payload) for _time in range(2))
            assert first == second


def test_only_small_shared_tensors_of_the_cpu_are_numbered():
    class Kind(torch.Tensor):
        pass

    for other in torch.zeros(1), shared(size=10_000), torch.eye(2).to_sparse(), shared().as_subclass(Kind):
        assert number_of(other) is None
    assert number_of(tensor := shared()) == number_of(tensor) != number_of(shared())


def test_tensors_that_are_gone_are_forgotten():
    tensor = shared()
    copy = copy_of(tensor)
    tensor.fill_(1)
    values = values_set()
    assert len(values) == 1
    del tensor, copy
    gc.collect()
    assert told.sent_tensors == {}
    set_values(values)


def test_a_copy_of_another_shape_stays_as_it_is():
    copy = copy_of(tensor := shared())
    number = number_of(tensor)
    copy.resize_(2).fill_(5)
    set_values({number: torch.zeros(1)})
    assert copy.tolist() == [5, 5]
