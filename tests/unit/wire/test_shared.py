from __future__ import annotations

import fcntl
import gc
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.wire import shared
from rpcdataloader.wire.frames import SharedBlock
from rpcdataloader.wire.shared import Borrower, Lender, create_memory

MIB = 1 << 20
LARGE = 3 * MIB


class Machine:
    """A worker and a trainer, and what they tell each other."""

    def __init__(self):
        self.trainer = Borrower()
        self.news = []
        self.worker = Lender(lambda number, descriptor: self.news.append((number, os.dup(descriptor))))
        self.introduce(self.send(self.worker.allocate(LARGE)))

    def introduce(self, sent):
        """Let the trainer map what the worker has announced, which it has sent meanwhile."""
        assert all(isinstance(buffer, memoryview) for buffer in sent)
        for number, descriptor in self.news:
            assert self.trainer.map(number, descriptor)
            self.worker.mapped(number)
        self.news.clear()

    def send(self, *blocks):
        """Lend what the worker refers to nowhere else, as when a batch is sent."""
        buffers = [block.view for block in blocks]
        del blocks
        self.worker.lend(buffers)
        return buffers

    def lend(self, value=0, size_bytes=LARGE):
        block = self.worker.allocate(size_bytes)
        block.tensor.fill_(value)
        buffers = [block.view]
        del block
        self.worker.lend(buffers)
        return buffers[0]

    def give_back(self):
        returned = self.trainer.take_ended()
        self.worker.returned(returned)
        return returned


@pytest.fixture
def machine():
    return Machine()


def values(block):
    return block.tensor.unique().tolist()


def test_block_of_the_worker_is_a_block_of_the_trainer(machine):
    block = machine.worker.allocate(LARGE + 5)
    assert block.view.nbytes == block.tensor.numel() == LARGE + 5
    block.tensor.copy_(torch.arange(LARGE + 5) % 251)
    expected, buffers = block.tensor.clone(), [block.view]
    del block
    machine.worker.lend(buffers)
    assert type(buffers[0]) is SharedBlock
    assert buffers[0].nbytes == 0
    borrowed = machine.trainer.borrow(buffers[0])
    assert torch.equal(borrowed.tensor, expected)
    assert borrowed.tensor.untyped_storage().nbytes() == LARGE + 5
    assert not borrowed.view.readonly
    assert borrowed.tensor.data_ptr() % 64 == 0


def test_nothing_is_shared_before_the_trainer_has_mapped_it():
    announced = []
    worker = Lender(lambda number, _descriptor: announced.append(number))
    for _ in range(2):
        buffers = [worker.allocate(LARGE).view, memoryview(bytes(LARGE))]
        worker.lend(buffers)
        assert [buffer.nbytes for buffer in buffers] == [LARGE, LARGE]
    assert announced == [1]


def test_first_block_is_shared_if_its_mapping_was_taken_meanwhile():
    trainer, news, taken = Borrower(), [], []

    def look():
        taken.extend(worker.mapped(number) for number, descriptor in news if trainer.map(number, descriptor))
        news.clear()

    worker = Lender(lambda number, descriptor: news.append((number, os.dup(descriptor))), look)
    block = worker.allocate(LARGE)
    assert len(news) == 1
    block.tensor.fill_(7)
    buffers = [block.view]
    del block
    worker.lend(buffers)
    assert len(taken) == 1
    assert values(trainer.borrow(buffers[0])) == [7]


def test_block_that_came_back_since_the_last_look_is_used(machine):
    first = machine.lend(1)
    kept = machine.trainer.borrow(first)
    del kept
    machine.worker._look = machine.give_back
    assert machine.lend(2) == first


def test_memory_that_the_worker_keeps_is_sent_while_there_is_none_to_copy_it_to(machine):
    size_bytes = 200 * MIB  # another one takes another mapping
    block = machine.worker.allocate(size_bytes)
    block.view[-1] = 7
    kept, buffers = block.tensor, [block.view]
    del block
    machine.worker.lend(buffers)
    assert buffers[0].nbytes == size_bytes
    assert memoryview(buffers[0]).cast("B")[-1] == 7
    assert [number for number, _descriptor in machine.news] == [2]
    os.close(machine.news[0][1])
    del kept


def test_memory_is_used_again_after_it_was_returned_and_not_before(machine):
    first = machine.lend(1)
    kept = machine.trainer.borrow(first).tensor[5:7]
    assert machine.lend(2) != first
    assert kept.tolist() == [1, 1]
    assert machine.trainer.take_ended() == []
    del kept
    assert machine.give_back() == [first[:2]]
    assert machine.lend(3) == first
    assert machine.trainer.take_ended() == []


def test_memory_to_which_the_worker_refers_is_copied(machine):
    block = machine.worker.allocate(LARGE)
    block.tensor.fill_(1)
    kept, buffers = block.tensor[7:], [block.view]
    del block
    machine.worker.lend(buffers)
    borrowed = machine.trainer.borrow(buffers[0])
    kept.fill_(2)
    assert values(borrowed) == [1]
    borrowed.tensor.fill_(3)
    assert kept.unique().tolist() == [2]


def test_memory_twice_in_a_message_is_there_twice(machine):
    block = machine.worker.allocate(LARGE)
    block.tensor.fill_(1)
    buffers = [block.view, block.tensor.numpy().data, block.view[: 2 * MIB]]
    del block
    machine.worker.lend(buffers)
    borrowed = [machine.trainer.borrow(buffer) for buffer in buffers]
    borrowed[0].tensor.fill_(2)
    assert [values(block) for block in borrowed] == [[2], [1], [1]]
    assert [block.tensor.numel() for block in borrowed] == [LARGE, LARGE, 2 * MIB]


def test_other_memory_is_copied_once(machine):
    content = np.random.default_rng(0).bytes(LARGE + 5)
    middle = machine.worker.allocate(LARGE)
    middle.tensor.fill_(7)
    buffers = [
        memoryview(content),
        memoryview(bytearray(content)),
        middle.view[MIB : 2 * MIB],
        memoryview(b"small"),
    ]
    machine.worker.lend(buffers)
    assert buffers[3] == b"small"
    one, other, part = (machine.trainer.borrow(buffer) for buffer in buffers[:3])
    assert bytes(one.view) == bytes(other.view) == content
    assert values(part) == [7]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1 << 18, 1 << 21)), max_size=60), st.randoms())
def test_blocks_stay_whole_in_any_order(steps, chance):
    """Whatever is allocated, lent and dropped: every tensor keeps its content."""
    machine, there, here = Machine(), [], []
    for number, (kind, size_bytes) in enumerate(steps):
        if kind == 0 and there:
            del there[chance.randrange(len(there))]
        elif kind == 1:
            machine.give_back()
        elif kind == 2 and here:
            del here[chance.randrange(len(here))]
        elif kind < 6:
            block = machine.worker.allocate(size_bytes)
            block.tensor[:: size_bytes - 1] = number
            here.append((number, block.tensor))
            del block
        else:
            block = machine.worker.allocate(size_bytes)
            block.tensor[:: size_bytes - 1] = number
            buffers = [block.view]
            del block
            machine.worker.lend(buffers)
            if machine.news:
                machine.introduce(buffers)
            else:
                there.append((number, machine.trainer.borrow(buffers[0]).tensor))
        for value, tensor in there + here:
            assert {int(tensor[0]), int(tensor[-1])} == {value % 256}


def test_memory_follows_the_size_of_batches(machine, monkeypatch):
    """A giant batch does not stay, and neither does the memory of a consumer that has kept many."""
    monkeypatch.setattr(shared, "_MAX_UNUSED_LEASES", 8)
    kept = [machine.trainer.borrow(machine.lend(1, 16 * MIB)) for _ in range(8)]
    assert resident_bytes(machine) >= 128 * MIB
    kept.clear()
    for _ in range(20):
        block = machine.trainer.borrow(machine.lend(2, MIB))
        del block
        machine.give_back()
    assert resident_bytes(machine) < 8 * MIB


def test_free_memory_is_limited(machine, monkeypatch):
    monkeypatch.setattr(shared, "_MAX_KEPT_BYTES", 20 * MIB)
    kept = [machine.trainer.borrow(machine.lend(1, 8 * MIB)) for _ in range(8)]
    kept.clear()
    machine.give_back()
    machine.lend()
    assert resident_bytes(machine) < 32 * MIB


def resident_bytes(machine):
    """The memory that both sides have, by the kernel's count."""
    text = Path("/proc/self/smaps").read_text()
    total = 0
    for mapping in machine.worker._mappings:
        start = text.index(f"{mapping.address:x}-")
        total += 1024 * int(text[start:].split("Rss:", 1)[1].split()[0])
    return total


def test_blocks_are_freed_in_any_thread(machine):
    blocks = [machine.trainer.borrow(machine.lend(i)) for i in range(20)]
    random.Random(0).shuffle(blocks)
    threads = [threading.Thread(target=blocks[i::4].clear) for i in range(4)]
    del blocks[:]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del threads, thread
    gc.collect()
    assert len(machine.give_back()) == 20


def test_memory_outlives_the_worker_and_the_connection(machine):
    kept = machine.trainer.borrow(machine.lend(7)).tensor
    del machine.worker, machine.trainer
    gc.collect()
    assert kept.unique().tolist() == [7]
    kept.fill_(8)


def test_descriptors_are_closed():
    def count():
        return len(os.listdir("/proc/self/fd"))

    before = count()
    machine = Machine()
    kept = [machine.trainer.borrow(machine.lend(0, 40 * MIB)) for _ in range(5)]
    assert count() == before
    del machine, kept
    gc.collect()
    assert count() == before


def test_mappings_are_unmapped():
    def count():
        return Path("/proc/self/maps").read_text().count("memfd:rpcdataloader")

    before = count()
    machine = Machine()
    assert count() == before + 2
    block = machine.trainer.borrow(machine.lend())
    del machine
    gc.collect()
    assert count() == before + 1
    del block
    assert count() == before


@pytest.mark.parametrize("size_bytes", [1, 1 << 16, (1 << 18) - 1])
def test_small_blocks_are_sent(machine, size_bytes):
    assert machine.worker.allocate(size_bytes).view.nbytes == size_bytes
    assert machine.send(machine.worker.allocate(size_bytes))[0].nbytes == size_bytes


def test_without_memfd_blocks_are_ordinary_memory(monkeypatch):
    def refuse(*_args):
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", refuse)
    worker = Lender(lambda *_args: pytest.fail("announced"))
    buffers = [worker.allocate(LARGE).view]
    worker.lend(buffers)
    assert buffers[0].nbytes == LARGE


# Forks


def fork(function):
    """Run a function in a child; returns its process id."""
    pid = os.fork()
    if not pid:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def wait_for(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def test_child_reads_its_parents_blocks_as_long_as_it_lives(machine):
    blocks = [machine.trainer.borrow(machine.lend(1))]
    gate, opened = os.pipe()

    def read():
        os.close(opened)
        os.read(gate, 1)
        assert set(bytes(blocks[0].view)) == {1}  # torch's threads are not in the child

    child = fork(read)
    place = machine.trainer._used[1][0][0]
    blocks.clear()
    assert machine.give_back() == []  # the child has it
    other = machine.trainer.borrow(machine.lend(2))
    del other
    assert len(machine.give_back()) == 1  # which the child has not
    os.close(opened)
    assert wait_for(child) == 0
    os.close(gate)
    assert machine.give_back() == [(1, place)]


def test_worker_forked_by_the_dataset_does_not_lend(machine):
    block = machine.worker.allocate(LARGE)
    block.tensor.fill_(1)

    def collate():
        buffers = []
        for _ in range(3):
            own = machine.worker.allocate(LARGE)
            own.view[:] = bytes([2]) * LARGE
            buffers.append(own.view)
        del own
        machine.worker.lend(buffers)
        assert [buffer.nbytes for buffer in buffers] == [LARGE] * 3

    assert wait_for(fork(collate)) == 0
    assert values(block) == [1]


# Hostile workers


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (SharedBlock(2, 0, 64), "a block of shared memory 2, which it never gave"),
        (SharedBlock(1, 0, 1 << 40), "bytes 0 to 1099511627776 of shared memory 1, which has 268435456"),
        (SharedBlock(1, (1 << 28) - 64, 65), "which has 268435456"),
        (SharedBlock(1, (1 << 64) - 64, 128), "which has 268435456"),
        (SharedBlock(1, 1 << 28, 1), "which has 268435456"),
        (SharedBlock(1, 32, 64), "bytes 32 to 96 of shared memory 1"),
        (SharedBlock(1, 64, 0), "bytes 64 to 64 of shared memory 1"),
        (SharedBlock(1, 4096, 1), "bytes 4096 to 4097 of shared memory 1, which are in use"),
        (SharedBlock(1, 0, 4097), "which are in use"),
        (SharedBlock(1, 8192 - 64, 64), "which are in use"),
    ],
)
def test_block_that_is_not_the_workers_to_lend(machine, block, error):
    kept = machine.trainer.borrow(SharedBlock(1, 4096, 4096))
    with pytest.raises(RemoteProtocolError, match=error):
        machine.trainer.borrow(block)
    machine.trainer.borrow(SharedBlock(1, 0, 4096))
    del kept
    with pytest.raises(RemoteProtocolError, match="in use"):  # until it was returned
        machine.trainer.borrow(SharedBlock(1, 4096, 4096))


def test_memory_that_could_shrink_is_refused(machine, tmp_path):
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, MIB)
    half = os.dup(unsealed)
    fcntl.fcntl(half, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, MIB)
    for descriptor in (unsealed, half, file, create_memory(0)):
        with pytest.raises(RemoteProtocolError, match="shared memory 7 that is not sealed against shrinking"):
            machine.trainer.map(7, descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_number_that_was_given_before_is_refused(machine):
    with pytest.raises(RemoteProtocolError, match="shared memory 1 twice"):
        machine.trainer.map(1, create_memory(MIB))


def test_sealed_memory_cannot_be_cut():
    descriptor = create_memory(MIB)
    for change in (lambda: os.ftruncate(descriptor, 0), lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0)):
        with pytest.raises(PermissionError):
            change()
    os.close(descriptor)


def test_trainer_without_room_for_a_mapping_gets_the_bytes(machine, monkeypatch, caplog):
    def refuse(*_args):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shared, "map_memory", refuse)
    assert not machine.trainer.map(2, create_memory(MIB))
    assert "cannot map the memory of a worker, which sends batches instead" in caplog.text


# Hostile trainers


@pytest.mark.parametrize("blocks", [[(0, 0)], [(2, 0)], [(1, 64)], [(1, 0), (1, 0)], [(1, LARGE)]])
def test_return_of_what_was_not_lent(machine, blocks):
    assert machine.lend() == SharedBlock(1, 0, LARGE)
    kept = machine.worker.allocate(LARGE)
    with pytest.raises(RemoteProtocolError, match="returned a block of shared memory"):
        machine.worker.returned(blocks)
    del kept


@pytest.mark.parametrize("number", [0, 2])
def test_mapping_that_was_never_given(machine, number):
    with pytest.raises(RemoteProtocolError, match=f"mapped shared memory {number}, which it was never given"):
        machine.worker.mapped(number)
