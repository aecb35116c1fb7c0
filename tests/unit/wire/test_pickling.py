"""What encoding and decoding leave behind; what arrives is in tests/behaviour/test_batches.py."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from rpcdataloader.fetch.raw import pack
from rpcdataloader.wire.pickling import dumps, dumps_reply, loads
from rpcdataloader.wire.slabs import PageablePool
from tests.conftest import leased_bytes
from tests.support.comparison import assert_same
from tests.support.devices import FakePinned
from tests.support.kinds import Tagged, make_tensors


def transfer(obj, encode=dumps_reply, pool=None, **options):
    encoded, pool = encode(obj), pool or PageablePool()
    blocks = [pool.allocate(buffer.nbytes) for buffer in encoded.buffers]
    for block, buffer in zip(blocks, encoded.buffers, strict=True):
        block.view[:] = buffer
    return loads(encoded.payload, blocks, allocator=pool, **options), pool


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Sample:
    def __init__(self, what):
        self.what = what


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("encode", [dumps, dumps_reply], ids=["request", "reply"])
@pytest.mark.parametrize("what", [torch.ones(5), torch.ones(100_000), np.ones(100_000)])
def test_nothing_is_kept_after_encoding_until_a_garbage_collection(what, encode):
    obj = Sample(what)
    alive = weakref.ref(obj)
    encode([obj, lambda: 1])
    del obj
    assert alive() is None


@pytest.mark.usefixtures("no_collection")
def test_nothing_is_kept_after_decoding_until_a_garbage_collection():
    received, pool = transfer([torch.rand(1000, 1000), np.ones(200_000)], persistent_load=abs)
    del received
    assert leased_bytes(pool) == 0


def test_very_few_bytes_travel_in_the_payload_and_arrive_in_memory_of_the_allocator():
    batch = {"label": torch.arange(200), "weight": torch.ones(50)}
    assert len(dumps_reply(batch).buffers) == 0
    assert len(dumps_reply({**batch, "more": torch.arange(100)}).buffers) == 1
    received, pinned = transfer(batch, pool=FakePinned())
    assert all(map(pinned.holds, received.values()))


@pytest.mark.parametrize("encode", [dumps, dumps_reply])
@pytest.mark.parametrize("wrap", [lambda view: view, KeyError], ids=["sample", "exception"])
def test_views_of_a_large_tensor_travel_without_the_rest(encode, wrap):
    view = torch.arange(1e6)[10:20].as_subclass(Tagged).requires_grad_()
    view.format = "xyxy"
    encoded = encode(wrap(view))
    assert encoded.size_bytes < 5000
    found = transfer(wrap(view), encode)[0]
    found = found if wrap is not KeyError else found.args[0]
    assert (type(found), found.format, found.requires_grad) == (Tagged, "xyxy", True)
    assert found.tolist() == list(range(10, 20))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of others of the kinds
@pytest.mark.parametrize("name", ["subclass, large and permuted", "boxes, large", "attribute, large"])
def test_large_tensor_of_a_subclass_is_a_block_of_memory_that_is_used_again(name):
    tensor = make_tensors()[name]
    encoded = dumps_reply(tensor)
    assert [buffer.nbytes for buffer in encoded.buffers] == [tensor.numel() * 4]
    assert len(encoded.payload) < 3000
    received, pinned = transfer(tensor, pool=FakePinned())
    assert_same(received, tensor)
    assert pinned.holds(received)


def interrupt():
    raise KeyboardInterrupt


class Slow:
    def __reduce__(self):
        return interrupt, ()


def test_interrupt_of_the_user_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        transfer(Slow(), dumps)


@pytest.mark.parametrize("kind", ["raw samples", "array"])
def test_requests_can_be_collected_as_garbage(kind):
    """Python 3.11 crashed when a memoryview of another one was part of a cycle."""
    content = np.zeros(200_000)
    if kind == "raw samples":
        content, _pool = transfer(pack([{"bytes": bytes(1 << 20)}]), dumps)
    views = dumps([content]).buffers
    cycle = [*views, *(view.obj for view in views)]
    cycle.append(cycle)
    del content, views, cycle
    assert gc.collect()
