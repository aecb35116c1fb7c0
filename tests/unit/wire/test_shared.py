from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.host import forks
from rpcdataloader.wire import shelf
from rpcdataloader.wire.frames import SharedBlock
from rpcdataloader.wire.memory import create_memory
from rpcdataloader.wire.shared import Borrower, Lender
from tests.support.forks import status_of_fork

MIB = 1 << 20
LARGE = 3 * MIB


class Machine:
    """A worker and a trainer, and what they tell each other."""

    def __init__(self):
        self.trainer = Borrower()
        self.news = []
        self.worker = Lender(lambda number, descriptor: self.news.append((number, os.dup(descriptor))))
        self.introduce(self.lend())

    def introduce(self, sent):
        """Let the trainer map what the worker has announced, which it has sent meanwhile."""
        assert isinstance(sent, memoryview)
        for number, descriptor in self.news:
            assert self.trainer.map(number, descriptor)
            self.worker.mapped(number)
        self.news.clear()

    def lend(self, value=0, size_bytes=LARGE):
        """What takes the place of a block in a message, to which the worker refers nowhere else."""
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
    """The least and the largest."""
    return sorted({int(value) for value in block.tensor.aminmax()})


def test_block_of_the_worker_is_a_block_of_the_trainer(machine):
    block = machine.worker.allocate(LARGE + 5)
    assert block.view.nbytes == block.tensor.numel() == LARGE + 5
    block.tensor.copy_(torch.arange(LARGE + 5) % 251)
    expected, buffers = block.tensor.clone(), [block.view, memoryview(b"small")]
    del block
    machine.worker.lend(buffers)
    assert type(buffers[0]) is SharedBlock
    assert buffers[1] == b"small"
    assert buffers[0].nbytes == 0
    borrowed = machine.trainer.borrow(buffers[0])
    assert torch.equal(borrowed.tensor, expected)
    assert borrowed.tensor.untyped_storage().nbytes() == LARGE + 5
    assert not borrowed.view.readonly
    assert borrowed.tensor.data_ptr() % 64 == 0


def test_block_may_fill_its_mapping(machine):
    machine.introduce(machine.lend(1, 1 << 26))
    borrowed = machine.trainer.borrow(machine.lend(2, 1 << 26))
    assert values(borrowed) == [2]
    assert borrowed.tensor.numel() == 1 << 26


def test_nothing_is_shared_before_the_trainer_has_mapped_it():
    announced = []
    worker = Lender(lambda number, _descriptor: announced.append(number))
    for _ in range(2):
        buffers = [worker.allocate(LARGE).view, memoryview(bytes(LARGE))]
        worker.lend(buffers)
        assert [buffer.nbytes for buffer in buffers] == [LARGE, LARGE]
    assert announced == [1]


@pytest.fixture(params=[0, 64])
def unused_leases(request, monkeypatch):
    """After how many leases without their use the kernel gets pages back."""
    monkeypatch.setattr(shelf, "MAX_UNUSED_LEASES", request.param)
    monkeypatch.setattr(shelf, "_TURNS", 0)


@pytest.mark.usefixtures("unused_leases")
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
            tensor = machine.worker.allocate(size_bytes).tensor
            tensor[0] = tensor[-1] = number
            here.append((number, tensor))
        else:
            sent = machine.lend(number, size_bytes)
            if machine.news:
                machine.introduce(sent)
            else:
                there.append((number, machine.trainer.borrow(sent).tensor))
        for value, tensor in there + here:
            assert {int(tensor[0]), int(tensor[-1])} == {value}


@pytest.mark.parametrize("is_registered", [False, True])
def test_pages_that_are_long_unused_go_unless_a_device_reads_them(machine, monkeypatch, is_registered):
    """It would go on to read the old ones."""
    machine.worker.mapped(1, is_registered=is_registered)
    monkeypatch.setattr(shelf, "MAX_UNUSED_LEASES", 0)
    monkeypatch.setattr(shelf, "_TURNS", 0)
    address = machine.trainer.borrow(machine.lend(7)).tensor.data_ptr()
    for _ in range(3):
        machine.give_back()
        machine.trainer.borrow(machine.lend(8, MIB))
    assert ctypes.string_at(address + 2 * MIB, 1) == bytes([7 * is_registered])


@pytest.mark.parametrize("num_blocks", [20, 128])
def test_batches_of_any_number_of_blocks_find_their_memory_again(machine, num_blocks):
    batches, num_faults = [], []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(num_blocks):
            block = machine.worker.allocate(300 << 10)
            block.view[::4096] = bytes(75)  # each page
            buffers = [block.view]
            del block
            machine.worker.lend(buffers)
            if machine.news:
                machine.introduce(buffers[0])
            else:
                batches.append(machine.trainer.borrow(buffers[0]))
            del buffers
        del batches[: max(0, len(batches) - 2 * num_blocks)]
        machine.give_back()
        num_faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(num_faults[4:]) < num_blocks  # of 75 pages each


def test_pages_of_free_memory_go_when_told(machine):
    address = machine.trainer.borrow(machine.lend(7)).tensor.data_ptr()
    machine.worker.give_back()
    assert ctypes.string_at(address, 1) == b"\7"  # it is lent
    machine.give_back()
    machine.worker.give_back()
    assert ctypes.string_at(address, 1) == b"\0"


# Forks


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

    assert status_of_fork(collate) == 0
    assert values(block) == [1]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_of_two_threads_wait_for_the_same_child(machine):
    other = Machine()
    lent = [each.trainer.borrow(each.lend()) for each in (machine, other)]
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    child.start()
    lent.clear()
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda each: [each.give_back() for _ in range(1000)], (machine, other)))
    assert found == [[[]] * 1000] * 2
    child.kill()
    child.join()
    child.close()
    assert [len(each.give_back()) for each in (machine, other)] == [1, 1]


class Child:
    """A forked child that calls a function with the descriptor that it needs, and then stays until it is killed."""

    def __init__(self, function):
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                ours.close()
                function(theirs.fileno())
                theirs.send(b"!")
                theirs.recv(1)
            finally:
                os._exit(1)
        theirs.close()
        self._ours = ours

    def __enter__(self):
        assert self._ours.recv(1)

    def __exit__(self, *_):
        self._ours.close()
        os.waitpid(self._pid, 0)


def close_all_but(descriptor):
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 1 << 12)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_block_stays_for_a_child_that_closes_its_descriptors(machine):
    """As daemons do."""
    lent = machine.trainer.borrow(machine.lend())
    with Child(close_all_but):
        del lent
        assert machine.give_back() == []
    assert len(machine.give_back()) == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_block_stays_for_a_child_whose_end_cannot_be_seen(machine):
    """As there are no descriptors as it is forked."""
    lent = machine.trainer.borrow(machine.lend())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        child = os.fork()
        if child == 0:
            os._exit(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del lent
    assert machine.give_back() == []
    os.waitpid(child, 0)
    assert machine.give_back() == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_block_stays_that_another_thread_drops_during_the_fork(machine, monkeypatch):
    lent, returned = [machine.trainer.borrow(machine.lend())], []
    after = forks._in_parent[forks.Part.SHARED_MEMORY]

    def drop():
        lent.clear()
        returned.extend(machine.give_back())
        after()

    monkeypatch.setitem(forks._in_parent, forks.Part.SHARED_MEMORY, drop)
    with Child(lambda _descriptor: None):
        assert lent == returned == machine.give_back() == []
    assert len(machine.give_back()) == 1


def test_mapping_may_come_while_a_fork_looks_for_blocks(machine):
    thread = Thread(target=lambda: machine.trainer.map(2, create_memory(LARGE)))

    class Meanwhile(list):
        def __bool__(self):
            thread.start()
            thread.join(0.1)  # in vain, if it has to wait
            return False

    machine.trainer._mappings[1].used = Meanwhile()
    assert not machine.trainer.has_blocks
    thread.join()
    assert set(machine.trainer._mappings) == {1, 2}


# Hostile workers


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (SharedBlock(2, 0, 64), "a block of shared memory 2, which it never gave"),
        (SharedBlock(1, 0, 1 << 40), "bytes 0 to 1099511627776 of shared memory 1, which has 33554432"),
        (SharedBlock(1, (1 << 25) - 64, 65), "which has 33554432"),
        (SharedBlock(1, (1 << 64) - 64, 128), "which has 33554432"),
        (SharedBlock(1, 1 << 25, 1), "which has 33554432"),
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
    other = os.dup(unsealed)
    fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, MIB)
    for descriptor in (unsealed, other, file, create_memory(0)):
        with pytest.raises(RemoteProtocolError, match="shared memory 7 that is not sealed against shrinking"):
            machine.trainer.map(7, descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_number_that_was_given_before_is_refused(machine):
    with pytest.raises(RemoteProtocolError, match="shared memory 1 twice"):
        machine.trainer.map(1, create_memory(MIB))


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
