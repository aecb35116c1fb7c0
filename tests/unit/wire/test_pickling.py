from __future__ import annotations

import collections
import copyreg
import dataclasses
import datetime
import fractions
import gc
import io
import pickle
import sys
import threading
import types
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from rpcdataloader.errors import SerializationError
from rpcdataloader.wire.pickling import Encoded, dumps, dumps_reply, loads
from rpcdataloader.wire.slabs import Allocator, Block, PageablePool, PinnedAllocator
from tests.conftest import leased_bytes

MIB = 1 << 20
Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: int


class Subclass(torch.Tensor):
    pass


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


class TestTensors:
    def test_tensors_arrive_anywhere_in_an_object(self, encode):
        image, ids = torch.rand(3, 200, 200), torch.arange(5)
        sent = {"a": [Sample(image, 3), Pair(ids, (torch.tensor(1.5), None))], 7: {"x": torch.zeros(0)}}
        received = transfer(sent, encode)
        assert received["a"][0].image.equal(image)
        assert received["a"][0].label == 3
        assert type(received["a"][1]) is Pair
        assert received["a"][1].left.equal(ids)
        assert received["a"][1].right[0].item() == 1.5
        assert received[7]["x"].shape == (0,)

    @pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 1), (2, 3)])
    def test_only_tensor_of_a_small_message_keeps_its_shape_and_can_be_resized(self, encode, shape):
        sent = torch.rand(shape)
        received = transfer(sent, encode)
        assert received.equal(sent)
        assert received.resize_(100).shape == (100,)

    def test_one_object_twice_arrives_as_one_object(self, encode):
        small, large = torch.rand(3), torch.rand(300, 300)
        received = transfer([small, large, {"again": (small, large)}], encode)
        assert received[2]["again"][0] is received[0]
        assert received[2]["again"][1] is received[1]

    @pytest.mark.parametrize("size", [5, 500])
    def test_views_of_one_tensor_arrive_in_memory_of_their_own(self, size, encode):
        base = torch.rand(size, size)
        whole, part, column = transfer((base, base[1:3], base[:, 1]), encode)
        part.fill_(2)
        assert whole.equal(base)
        assert column.equal(base[:, 1])
        assert column.is_contiguous()

    def test_no_large_tensor_is_in_the_payload(self, encode):
        encoded = encode({"x": torch.rand(1000, 1000), "y": np.zeros((1000, 1000)), "z": torch.rand(1000)})
        assert len(encoded.payload) < 1000
        assert encoded.size_bytes == len(encoded.payload) + 12 * 10**6 + 4000

    @pytest.mark.filterwarnings("ignore")  # torch on beta features
    @pytest.mark.parametrize("size", [3, 200])
    @pytest.mark.parametrize(
        "make",
        [
            lambda n: torch.nn.Parameter(torch.rand(n, n)),
            lambda n: torch.nn.Parameter(torch.rand(n, n), requires_grad=False),
            lambda n: torch.rand(n, n).requires_grad_(),
            lambda n: torch.rand(n, n).requires_grad_() * 2,
            lambda n: torch.rand(n, n).as_subclass(Subclass),
            lambda n: torch.rand(n, n, dtype=torch.complex64).conj(),
            lambda n: torch.rand(n, n, dtype=torch.complex64).conj().imag,
        ],
    )
    def test_more_than_plain_tensors_arrive_right(self, make, size, encode):
        sent = make(size)
        received = transfer([sent, torch.ones(2)], encode)[0]
        assert type(received) is type(sent)
        assert received.requires_grad == sent.requires_grad
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert torch.equal(received, sent)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize(
        "convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc]
    )
    def test_sparse_tensors_arrive_right(self, convert, encode):
        sent = convert(torch.eye(300))
        received = transfer(sent, encode)
        assert received.layout == sent.layout
        assert received.to_dense().equal(sent.to_dense())

    @pytest.mark.filterwarnings("ignore")
    def test_nested_tensors_arrive_right(self, encode):
        received = transfer(torch.nested.nested_tensor([torch.rand(2), torch.ones(3)]), encode)
        assert received.is_nested
        assert received.unbind()[1].tolist() == [1, 1, 1]

    @pytest.mark.parametrize("width", [2, 2000])
    def test_permuted_arrays_keep_their_strides(self, encode, width):
        sent = np.arange(12.0 * width).reshape(3, 4, width).transpose(2, 0, 1)
        received = transfer(sent, encode)
        assert np.array_equal(received, sent)
        assert received.strides == sent.strides
        received[0] = 1  # writable

    def test_module_that_this_numpy_lacks_is_an_error_that_names_numpy(self, encode, monkeypatch):
        module = types.ModuleType("numpy.elsewhere")
        exec("class Found: pass\nfound = Found()", vars(module))
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module.__name__, module)
            encoded = encode(module.found)
        with pytest.raises(SerializationError, match=f"numpy {np.__version__}: install the same version of numpy"):
            loads(encoded.payload, [])

    def test_storages_arrive_without_the_warning_of_earlier_versions_of_torch(self, encode, monkeypatch):
        def _load_from_bytes(content):
            warnings.warn("as torch 2.4 and 2.5 do", FutureWarning, stacklevel=1)
            return torch.load(io.BytesIO(content), weights_only=False)

        _load_from_bytes.__module__, _load_from_bytes.__qualname__ = "torch.storage", "_load_from_bytes"
        monkeypatch.setattr(torch.storage, "_load_from_bytes", _load_from_bytes)
        sent = torch.arange(5.0).as_subclass(Subclass)
        received = transfer(sent, encode)
        assert type(received) is Subclass
        assert received.tolist() == sent.tolist()

    @pytest.mark.filterwarnings("ignore")
    def test_quantized_tensors_arrive_right(self, encode):
        sent = torch.quantize_per_tensor(torch.arange(5.0), 0.5, 3, torch.quint8)
        received = transfer(sent, encode)
        assert received.is_quantized
        assert received.q_scale() == 0.5
        assert received.dequantize().equal(sent.dequantize())

    def test_meta_tensors_arrive_right(self, encode):
        received = transfer(torch.empty(3, 4, device="meta"), encode)
        assert received.is_meta
        assert received.shape == (3, 4)

    def test_attributes_of_a_tensor_arrive(self, encode):
        sent = torch.ones(3)
        sent.name_of_it = "mine"
        assert transfer(sent, encode).name_of_it == "mine"

    def test_dtypes_and_devices_and_sizes_arrive(self, encode):
        sent = (torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]))
        assert transfer(sent, encode) == sent

    def test_tensor_of_a_message_is_not_loaded_without_it(self):
        encoded = dumps_reply(torch.ones(2))
        with pytest.raises(pickle.UnpicklingError, match="only be loaded with the message"):
            pickle.loads(encoded.payload)

    def test_batches_of_a_fake_pinned_allocator_lie_on_its_memory(self):
        memory: set[int] = set()

        def empty(size_bytes: int) -> torch.Tensor:
            tensor = torch.empty(size_bytes, dtype=torch.uint8)
            memory.add(tensor.untyped_storage().data_ptr())
            kept.append(tensor)
            return tensor

        kept: list[torch.Tensor] = []
        for sent in (
            torch.tensor([1]),
            [torch.rand(300, 300), torch.rand(3).t()],
            {str(i): torch.rand(i % 7 + 1, 2) for i in range(64)},
            [torch.rand(i % 7 + 1, 2).t() for i in range(500)] + [torch.rand(100, 200)],
        ):
            received = transfer(sent, allocator=PinnedAllocator(empty))
            flat, _ = torch.utils._pytree.tree_flatten(received)
            assert all(tensor.untyped_storage().data_ptr() in memory for tensor in flat)
            for there, here in zip(flat, torch.utils._pytree.tree_flatten(sent)[0], strict=True):
                assert there.equal(here)

    def test_nested_tensor_in_pinned_memory_that_it_shares_arrives_right(self):
        sent = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)])
        others = [torch.rand(3) for _ in range(100)]
        allocator = PinnedAllocator(lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8))
        *_, received = transfer([*others, sent], dumps_reply, allocator)
        assert [part.tolist() for part in received.unbind()] == [part.tolist() for part in sent.unbind()]


class TestArrays:
    LARGE = np.random.default_rng(0).integers(0, 100, (100, 200, 7))

    @pytest.mark.parametrize(
        "sent",
        [
            LARGE,
            np.asfortranarray(LARGE),
            LARGE.transpose(1, 0, 2),
            LARGE[::2, ::3],
            LARGE[5:],
            LARGE.astype(">i4"),
            LARGE.astype(np.float16),
            LARGE.astype(complex),
            LARGE > 50,
            LARGE.astype("datetime64[s]"),
            LARGE.astype("timedelta64[ms]"),
            LARGE.astype("U5"),
            LARGE.astype("S3"),
            np.zeros(10_000, dtype=[("a", "u1"), ("b", ">f8", (2, 2)), ("c", "datetime64[D]")]),
            np.broadcast_to(np.arange(7), (2000, 7)),
        ],
        ids=lambda array: f"{array.dtype.str}{array.shape}{array.strides}",
    )
    def test_large_arrays_travel_out_of_band_and_arrive_as_they_were(self, sent, encode):
        encoded = encode({"a": sent})
        assert [buffer.nbytes for buffer in encoded.buffers] == [sent.nbytes]
        assert len(encoded.payload) < 1000
        received = loads(encoded.payload, deliver(encoded))["a"]
        assert type(received) is np.ndarray
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert received.flags.f_contiguous == sent.flags.f_contiguous
        if np.may_share_memory(sent, sent.ravel(order="K")):  # all of a piece of memory
            assert received.strides == sent.strides
        assert received.flags.writeable
        np.testing.assert_array_equal(received, sent)

    @pytest.mark.parametrize(
        "sent",
        [
            np.arange(5),
            np.array(3.5),
            np.array([]),
            np.zeros((0, 3), order="F"),
            np.float32(2.5),
            np.datetime64("2024-01-01"),
            np.array([None, "a", {"b": 1}], dtype=object),
            np.array([[1, "a"]] * 20_000, dtype=object),
            np.array([("x", [1])], dtype=[("a", "U1"), ("b", object)]),
            np.arange(20).reshape(4, 5)[::2, ::2],
            np.ma.masked_array([1, 2], [True, False]),
            np.arange(4).view(np.recarray),
        ],
        ids=lambda array: f"{type(array).__name__}{array.shape}{array.dtype.str}",
    )
    def test_other_arrays_travel_in_band(self, sent, encode):
        encoded = encode(sent)
        assert encoded.buffers == []
        received = loads(encoded.payload, [])
        assert type(received) is type(sent)
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert repr(received) == repr(sent)

    @pytest.mark.parametrize("size", [10, 100_000])
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_arrays_that_were_read_only_can_be_written_to(self, size, order, encode):
        sent = np.asarray(np.arange(2 * size).reshape(2, size), order=order)
        sent.flags.writeable = False
        received = transfer(sent, encode)
        assert received.flags.writeable
        assert received.strides == sent.strides
        np.testing.assert_array_equal(received, sent)

    def test_arrays_lie_on_their_block(self, encode):
        encoded = encode(np.arange(100_000))
        blocks = deliver(encoded)
        received = loads(encoded.payload, blocks)
        blocks[0].view[:8] = (77).to_bytes(8, sys.byteorder)
        assert received[0] == 77

    def test_arrays_beside_tensors_get_the_right_blocks(self, encode):
        sent = [torch.rand(200, 200), np.random.rand(200, 200), torch.rand(3), np.random.rand(3), np.ones(10_000)]
        received = transfer(sent, encode)
        for there, here in zip(received, sent, strict=True):
            assert type(there) is type(here)
            assert np.array_equal(np.asarray(there), np.asarray(here))


class TestOtherObjects:
    @pytest.mark.parametrize(
        "sent",
        [
            b"x" * 200_000,
            bytearray(b"x" * 200_000),
            "text",
            (1, 2.5, None, True, 1 << 100),
            {1, 2},
            datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
            collections.OrderedDict(a=1),
            range(5),
            slice(1, 2),
            fractions.Fraction(1, 3),
            Pair(1, 2),
            type(None),
            Ellipsis,
            len,
            np.add,
            torch.nn.functional.relu,
            torch.nn.Linear,
        ],
        ids=lambda obj: type(obj).__name__,
    )
    def test_objects_arrive_equal_without_blocks(self, sent, encode):
        encoded = encode(sent)
        assert encoded.buffers == []
        received = loads(encoded.payload, [])
        assert type(received) is type(sent)
        assert received == sent

    def test_buffers_of_other_types_go_out_of_band_too(self):
        class Holder:
            def __init__(self, content):
                self.content = content

            def __reduce__(self):
                return bytes, (pickle.PickleBuffer(self.content),)

        encoded = dumps(Holder(bytearray(b"z" * 100_000)))
        assert [buffer.nbytes for buffer in encoded.buffers] == [100_000]
        assert loads(encoded.payload, deliver(encoded)) == b"z" * 100_000

    def test_reducers_that_users_register_go_on_working(self, encode, monkeypatch):
        monkeypatch.setitem(copyreg.dispatch_table, fractions.Fraction, lambda fraction: (str, (f"{fraction}",)))
        assert transfer([fractions.Fraction(1, 3)], encode) == ["1/3"]

    def test_global_table_of_reducers_is_left_alone(self, encode):
        before = dict(copyreg.dispatch_table)
        transfer([torch.ones(3), np.ones(100_000)], encode)
        assert copyreg.dispatch_table == before
        assert torch.Tensor not in copyreg.dispatch_table

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_payload_may_be_any_buffer(self, kind):
        encoded = dumps([torch.ones(3), "a"])
        assert loads(kind(encoded.payload), deliver(encoded))[1] == "a"

    def test_objects_of_the_caller_are_replaced_on_the_wire(self):
        class Ref:
            def __init__(self, handle):
                self.handle = handle

        encoded = dumps(
            {"a": [Ref(3), Ref(3)], "b": 1}, persistent_id=lambda obj: ("ref", obj.handle) if type(obj) is Ref else None
        )
        objects = {("ref", 3): object()}
        received = loads(encoded.payload, [], persistent_load=objects.__getitem__)
        assert received["a"] == [objects["ref", 3]] * 2
        with pytest.raises(SerializationError, match="objects held elsewhere"):
            loads(encoded.payload, [])


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

    def test_one_memory_serves_batch_after_batch(self):
        pool = PageablePool()
        addresses = {transfer([torch.rand(700, 700)], allocator=pool)[0].data_ptr() for _ in range(5)}
        assert len(addresses) == 1

    def test_keeping_one_small_tensor_of_a_batch_keeps_no_large_one(self):
        pool = PageablePool()
        batch = transfer({"image": torch.rand(1000, 1000), "label": torch.arange(64)}, allocator=pool)
        label = batch["label"]
        del batch
        assert leased_bytes(pool) == 0
        assert label.equal(torch.arange(64))

    def test_very_few_bytes_travel_in_the_payload_and_arrive_in_memory_of_the_allocator(self):
        batch = {"label": torch.arange(200), "weight": torch.ones(50)}
        assert len(dumps_reply(batch).buffers) == 0
        assert len(dumps_reply({**batch, "more": torch.arange(100)}).buffers) == 1
        lent: list[torch.Tensor] = []

        def lend(size_bytes: int) -> torch.Tensor:
            lent.append(torch.empty(size_bytes, dtype=torch.uint8))
            return lent[-1]

        received = transfer(batch, allocator=PinnedAllocator(lend))
        for name, tensor in received.items():
            assert tensor.equal(batch[name])
            storage = tensor.untyped_storage().data_ptr()
            assert any(storage == memory.data_ptr() for memory in lent)
        received = transfer(batch)
        received["label"].resize_(1000)
        assert received["weight"].equal(torch.ones(50))

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

    def test_threads_encode_and_decode_at_once(self):
        pool = PageablePool(max_bytes=16 * MIB)
        failures: list[int] = []

        def work(mark: int) -> None:
            for i in range(15):
                sent = {"x": torch.full((400, 400 + i), mark), "y": [torch.tensor(mark)] * 3, "f": lambda: mark}
                received = transfer(sent, dumps, pool)
                if not (received["x"] == mark).all() or received["y"][2] != mark or received["f"]() != mark:
                    failures.append(mark)

        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert leased_bytes(pool) == 0


def raise_system_exit() -> None:
    raise SystemExit(3)


class TestErrors:
    def test_missing_module_is_named_with_what_to_do(self, encode, monkeypatch):
        module = types.ModuleType("only_there")
        exec("class Thing: pass\ndef work(): pass", vars(module))
        monkeypatch.setitem(sys.modules, "only_there", module)
        encodings = [encode(module.Thing()), encode(module.work), encode(module)]
        monkeypatch.delitem(sys.modules, "only_there")
        for encoded in encodings:
            with pytest.raises(SerializationError, match=r"No module named 'only_there'.*PYTHONPATH.*--preload"):
                loads(encoded.payload, [])

    def test_missing_name_is_named_with_its_module(self, encode, monkeypatch):
        module = types.ModuleType("older_here")
        exec("class Thing: pass", vars(module))
        monkeypatch.setitem(sys.modules, "older_here", module)
        encoded = encode(module.Thing())
        del module.Thing
        with pytest.raises(SerializationError, match="module 'older_here' has no 'Thing' here"):
            loads(encoded.payload, [])

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
        "spoil",
        [
            lambda payload: payload[:0],
            lambda payload: b"garbage" + payload[-9:],
            lambda payload: payload[:-5],
            lambda payload: payload[:-4] + b"\xff\xff\xff\xff",
            lambda payload: payload[10:],
        ],
    )
    def test_broken_payloads_are_errors_of_the_package(self, spoil):
        encoded = dumps_reply([torch.ones(5), "a"])
        with pytest.raises(SerializationError):
            loads(spoil(encoded.payload), deliver(encoded))

    @pytest.mark.parametrize("keep", [0, 1, 2])
    def test_missing_blocks_are_errors_of_the_package(self, keep):
        encoded = dumps_reply([torch.ones(100_000), np.ones(100_000), torch.ones(3)])
        with pytest.raises(SerializationError):
            loads(encoded.payload, deliver(encoded)[:keep])


def _interrupt() -> None:
    raise KeyboardInterrupt
