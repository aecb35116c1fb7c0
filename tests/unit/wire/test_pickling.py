from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from rpcdataloader.errors import SerializationError
from rpcdataloader.fetch.raw import pack
from rpcdataloader.wire.pickling import Encoded, dumps, dumps_reply, loads
from rpcdataloader.wire.slabs import Allocator, Block, PageablePool
from tests.conftest import leased_bytes
from tests.support.devices import FakePinned

MIB = 1 << 20


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: int


def deliver(encoded: Encoded, allocator: Allocator | None = None) -> list[Block]:
    blocks = [(allocator or PageablePool()).allocate(buffer.nbytes) for buffer in encoded.buffers]
    for block, buffer in zip(blocks, encoded.buffers, strict=True):
        block.view[:] = buffer
    return blocks


def transfer(obj: Any, encode=dumps_reply, allocator: Allocator | None = None, **options: Any) -> Any:
    encoded = encode(obj)
    return loads(encoded.payload, deliver(encoded, allocator), allocator=allocator, **options)


@pytest.fixture(params=[dumps, dumps_reply], ids=["request", "reply"])
def encode(request):
    return request.param


class TestMemory:
    def test_memory_returns_to_the_pool_with_the_last_tensor_or_array_and_not_before(self):
        pool = PageablePool()
        received = transfer({"t": torch.rand(1000, 1000), "a": np.random.rand(1000, 1000)}, allocator=pool)
        assert leased_bytes(pool) == 12 * MIB
        tensor_part = received["t"][3]
        array_part = received["a"][5:].T
        expected = tensor_part.clone(), array_part.copy()
        del received
        others = [transfer(torch.rand(1000, 1000), allocator=pool) for _ in range(4)]  # would overwrite what is free
        assert tensor_part.equal(expected[0])
        assert np.array_equal(array_part, expected[1])
        del others, tensor_part
        assert leased_bytes(pool) == 8 * MIB
        del array_part
        assert leased_bytes(pool) == 0

    def test_very_few_bytes_travel_in_the_payload_and_arrive_in_memory_of_the_allocator(self):
        batch = {"label": torch.arange(200), "weight": torch.ones(50)}
        assert len(dumps_reply(batch).buffers) == 0
        assert len(dumps_reply({**batch, "more": torch.arange(100)}).buffers) == 1
        pinned = FakePinned()
        received = transfer(batch, allocator=pinned)
        for name, tensor in received.items():
            assert tensor.equal(batch[name])
            assert pinned.holds(tensor)

    @pytest.mark.parametrize("what", [torch.ones(5), torch.ones(100_000), np.ones(100_000)])
    def test_nothing_is_kept_after_encoding_until_a_garbage_collection(self, what, encode):
        obj = Sample(what, 0)
        alive = weakref.ref(obj)
        gc.collect()
        gc.disable()
        try:
            encode([obj, lambda: 1])
            del obj
            assert alive() is None
        finally:
            gc.enable()

    def test_nothing_is_kept_after_decoding_until_a_garbage_collection(self):
        pool = PageablePool()
        gc.collect()
        gc.disable()
        try:
            transfer([torch.rand(1000, 1000), np.ones(200_000)], allocator=pool, persistent_load=abs)
            assert leased_bytes(pool) == 0
        finally:
            gc.enable()

    def test_encoded_tensors_stay_until_they_are_sent(self):
        encoded = dumps_reply([torch.full((100_000,), 3.0), np.full(100_000, 4.0)])
        torch.full((100_000,), 5.0)
        received = loads(encoded.payload, deliver(encoded))
        assert received[0].unique().tolist() == [3]
        assert np.unique(received[1]).tolist() == [4]


class TestErrors:
    @pytest.mark.parametrize("error", [ValueError("bad state"), SystemExit(3), IndexError("x")])
    def test_objects_that_fail_to_rebuild_are_an_error_with_a_cause(self, error):
        class Fragile:
            def __setstate__(self, state):
                raise error

            def __getstate__(self):
                return {"a": 1}

        with pytest.raises(SerializationError, match=f"cannot be rebuilt: {type(error).__name__}: ") as caught:
            transfer(Fragile(), dumps)
        assert type(caught.value.__cause__) is type(error)

    def test_interrupt_of_the_user_is_not_swallowed(self):
        class Slow:
            def __reduce__(self):
                return _interrupt, ()

        with pytest.raises(KeyboardInterrupt):
            transfer(Slow(), dumps)

    @pytest.mark.parametrize(
        ("spoil", "num_blocks"),
        [
            (lambda payload: payload[:0], 3),
            (lambda payload: b"garbage" + payload[-9:], 3),
            (lambda payload: payload[:-5], 3),
            (lambda payload: payload[:-4] + b"\xff\xff\xff\xff", 3),
            (lambda payload: payload[10:], 3),
            *((bytes, num_blocks) for num_blocks in range(3)),
        ],
    )
    def test_broken_messages_are_errors_of_the_package(self, spoil, num_blocks):
        encoded = dumps_reply([torch.ones(100_000), np.ones(100_000), torch.ones(3), "a"])
        with pytest.raises(SerializationError):
            loads(spoil(encoded.payload), deliver(encoded)[:num_blocks])


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["raw samples", "array"])
def test_requests_can_be_collected_as_garbage(kind):
    """Python 3.11 crashed when a memoryview of another one was part of a cycle."""
    content = np.zeros(200_000)
    if kind == "raw samples":
        encoded = dumps(pack([{"bytes": bytes(1 << 20)}]))
        content = loads(
            encoded.payload, [Block(torch.frombuffer(bytearray(b), dtype=torch.uint8)) for b in encoded.buffers]
        )
    views = dumps([content]).buffers
    cycle = [*views, *(view.obj for view in views)]
    cycle.append(cycle)
    del content, views, cycle
    assert gc.collect()


def test_objects_are_rebuilt_whatever_torch_calls_its_function_for_storages(monkeypatch):
    monkeypatch.delattr(torch.storage, "_load_from_bytes")
    assert transfer(Sample(torch.ones(2), 3)).label == 3
