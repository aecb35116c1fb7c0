"""What encoding and decoding leave behind; what arrives is in tests/behaviour/test_batches.py."""

from __future__ import annotations

import gc
import re
import threading
import weakref

import numpy as np
import pytest
import torch

from rpcdataloader.errors import SerializationError
from rpcdataloader.fetch.raw import pack
from rpcdataloader.wire import pickling
from rpcdataloader.wire.picklers import DefinitionPickler, Limited
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


def test_views_of_the_same_memory_travel_without_the_rest_and_arrive_as_they_were():
    wide = torch.arange(1_000_000).view(1000, 1000)
    columns = [wide[:, 0], wide[:, 0], wide[:, 500:502]]
    assert dumps(columns).size_bytes < 64_000
    parts = [wide[1:3], wide[2:4], wide[2], wide[2].view(torch.uint8), wide[3, 1:5:2], wide[9]]
    assert dumps(parts).size_bytes < 40_000
    assert all(map(torch.equal, transfer(columns, dumps)[0], columns))
    assert_same(transfer(parts, dumps)[0], parts)
    *_, row, numbers, few, apart = received = transfer(parts, dumps)[0]
    few.zero_()
    numbers.zero_()
    assert (received[0][1].sum(), received[1][0].sum(), row.sum(), received[1][1, [1, 3]].sum()) == (0, 0, 0, 0)
    assert torch.equal(apart, wide[9])


@pytest.mark.parametrize("encode", [dumps, dumps_reply], ids=["request", "reply"])
@pytest.mark.parametrize("size", [3, 1000])
def test_sparse_tensor_travels(size, encode):
    sparse = torch.eye(size).to_sparse()
    assert_same(transfer(sparse, encode)[0].to_dense(), sparse.to_dense())


def test_sparse_tensor_is_refused_by_a_limit_on_its_parts():
    sparse = torch.eye(1000).to_sparse()
    DefinitionPickler(Limited(1 << 15), [], {}).dump({"sparse": sparse})
    with pytest.raises(OverflowError):
        DefinitionPickler(Limited(1 << 13), [], {}).dump({"sparse": sparse})


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


# What cannot be pickled


class Counted:
    """A part of ``whole``; counts how often such a part is pickled."""

    count = 0

    def __init__(self, whole):
        self.whole = whole

    def __reduce__(self):
        type(self).count += 1
        return Sample, (self.whole,)


@pytest.mark.parametrize("num_samples", [10, 1000])
@pytest.mark.parametrize("place", ["before", "after"])
def test_each_part_is_pickled_a_few_times_until_the_culprit_is_found(num_samples, place):
    whole, lock = Sample(None), threading.Lock()
    whole.what = [Counted(whole) for _ in range(num_samples)]
    whole.what.insert({"before": 0, "after": num_samples}[place], [{"key": lock}])
    Counted.count = 0
    path = rf"dataset\.what\[{whole.what.index([{'key': lock}])}\]\[0\]\['key'\]"
    with pytest.raises(SerializationError, match=rf"^{path} is a _thread\.lock, which cannot be pickled \(TypeError: "):
        dumps(whole, name="dataset")
    assert Counted.count <= 2 * num_samples


class MakesLock:
    def __getstate__(self):
        return [threading.Lock()]


class Ends:
    def __reduce__(self):
        return Sample, (range(3), *fail())


def fail():
    raise OSError("no more")


CULPRITS = {
    "sample.what.what is a tests.unit.wire.test_pickling.MakesLock": lambda: Sample(Sample(MakesLock())),
    "sample.what[2] is a tests.unit.wire.test_pickling.Ends": lambda: Sample([1, 2, Ends(), 3]),
    "sample.what.__self__.what is a _thread.lock": lambda: Sample(Sample(threading.Lock()).__eq__),
    "sample.what is a dict": lambda: Sample({threading.Lock(): 1}),
}


@pytest.mark.parametrize("text", CULPRITS)
@pytest.mark.parametrize("encode", [dumps, dumps_reply])
def test_innermost_part_that_has_a_path_is_named(text, encode):
    with pytest.raises(SerializationError, match=f"^{re.escape(text)}, which"):
        encode(CULPRITS[text](), name="sample")


def test_search_has_a_limit(monkeypatch):
    monkeypatch.setattr(pickling, "_MAX_SEARCH_SECONDS", 0)
    with pytest.raises(SerializationError, match=r"^sample is a list, which cannot be pickled \(TypeError: .*lock"):
        dumps([threading.Lock()], name="sample")


# What cannot be rebuilt


class Wrapper:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Table:
    def __init__(self):
        self.columns = {}

    def __getattr__(self, name):
        return self.get(name)

    def get(self, name):
        return self.__dict__["columns"][name]


@pytest.mark.parametrize(("make", "error"), [(lambda: Wrapper([1]), "RecursionError"), (Table, "KeyError")])
def test_class_whose_attributes_need_others_is_named_and_the_advice_mends_it(make, error, monkeypatch):
    with pytest.raises(SerializationError, match=rf"{error}.*: {make().__class__.__module__}\.") as caught:
        transfer(make())
    kind, advice = type(make()), str(caught.value).partition("begin it with\n")[2]
    assert f".{kind.__name__}.__getattr__ was asked for '__setstate__'" in str(caught.value)
    found = {}
    exec(f"def guard(name):\n{advice}", found)
    asked = kind.__getattr__

    def mended(self, name):
        found["guard"](name)
        return asked(self, name)

    monkeypatch.setattr(kind, "__getattr__", mended)
    assert vars(transfer(make())[0]) == vars(make())
