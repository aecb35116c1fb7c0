"""Which datasets forks may inherit: those that hold maps, but no files and threads, whatever else they hold."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rpcdataloader.server.datasets import open_files, why_not_shared


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "numbers"
    np.arange(1 << 16, dtype=np.int32).tofile(path)
    return path


@pytest.fixture
def descriptor(path):
    """One that a library holds, which is no object."""
    opened = []
    yield lambda: opened.append(os.open(path, os.O_RDONLY))
    for each in opened:
        os.close(each)


def mapped_by_python(path):
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def pieces(path):
    """The kernel puts each map below the one before, and makes one of them."""
    size = 1 << 16
    with path.open("rb") as file:
        offsets = range(3 * size, -1, -size)
        return [mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=offset) for offset in offsets]


def loaded(path):
    torch.save({"x": torch.arange(1000)}, path)
    return torch.load(path, mmap=True)


MAPS = {
    "memmap": lambda path: np.memmap(path, np.int32, "r"),
    "pieces": pieces,
    "array": lambda path: np.asarray(np.memmap(path, np.int32, "r"))[5:],
    "mmap": mapped_by_python,
    "buffer": lambda path: np.frombuffer(mapped_by_python(path), np.int32),
    "tensor": lambda path: torch.from_numpy(np.memmap(path, np.int32, "c")),
    "tensors": lambda path: [*torch.from_numpy(np.memmap(path, np.int32, "c")).split(1000)],
    "file of torch": lambda path: torch.from_file(str(path), shared=True, size=1000),
    "checkpoint": loaded,
}

MEMORY = {
    "nothing": lambda: None,
    "value": lambda: multiprocessing.Value("q", 0),
    "anonymous map": lambda: mmap.mmap(-1, 4096),
    "tensor": lambda: torch.zeros(100).share_memory_(),
}


@pytest.mark.parametrize("kind", MAPS)
def test_maps_of_files_are_shared(path, kind):
    files = open_files()
    assert why_not_shared(SimpleNamespace(part=MAPS[kind](path)), files) is None


@pytest.mark.parametrize("kind", MAPS)
def test_a_file_is_found_beside_a_map_of_it(path, kind):
    files = open_files()
    part = MAPS[kind](path)
    with path.open("rb") as file:
        assert "it holds files open" in why_not_shared(SimpleNamespace(part=part, file=file), files)


@pytest.mark.parametrize("kind", MEMORY)
@pytest.mark.parametrize("is_object", [True, False])
def test_a_file_is_found_beside_memory_that_processes_share(path, descriptor, kind, is_object):
    files = open_files()
    dataset = SimpleNamespace(part=MEMORY[kind](), file=open(path, "rb") if is_object else descriptor())  # noqa: SIM115
    reason = why_not_shared(dataset, files)
    assert reason.startswith("it holds files open," if is_object else f"it holds {path} open,")
    assert ("or another thread" in reason) != is_object
    if is_object:
        dataset.file.close()
        assert why_not_shared(dataset, files) is None


def test_a_file_is_found_beside_an_older_map_of_it(path):
    older = np.memmap(path, np.int32, "r")
    files = open_files()
    with path.open("rb") as file:
        assert why_not_shared(SimpleNamespace(part=older, file=file), files) is not None
    assert why_not_shared(SimpleNamespace(part=older), files) is None


def test_a_file_that_was_open_before_is_no_reason(path):
    with path.open("rb") as file:
        assert why_not_shared(SimpleNamespace(file=file), open_files()) is None


def test_a_map_of_a_file_that_has_no_name_is_shared():
    files = open_files()
    with tempfile.TemporaryFile() as file:
        np.arange(1000).tofile(file)
        dataset = SimpleNamespace(part=np.memmap(file, np.int64, "r"))
    assert why_not_shared(dataset, files) is None


@pytest.mark.parametrize("number", [10, 30_000])
def test_threads_are_found_behind_long_lists(number):
    is_over = threading.Event()
    dataset = SimpleNamespace(samples=[(f"path {k}", [k]) for k in range(number)])
    dataset.pool = {"threads": {threading.Thread(target=is_over.wait, daemon=True)}}
    dataset.main = threading.main_thread()
    (thread,) = dataset.pool["threads"]
    assert why_not_shared(dataset, open_files()) is None
    thread.start()
    assert "it holds threads" in why_not_shared(dataset, open_files())
    is_over.set()
    thread.join()
    assert why_not_shared(dataset, open_files()) is None


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as reader, open(writing, "wb", 0) as writer:
        yield reader, writer


def test_a_pipe_that_is_read_from_is_found(pipe):
    reader, writer = pipe
    assert "a connection or a pipe" in why_not_shared(SimpleNamespace(file=reader), open_files())
    assert why_not_shared(SimpleNamespace(file=writer), open_files()) is None
    reader.close()
    assert why_not_shared(SimpleNamespace(file=reader), open_files()) is None


@pytest.mark.parametrize("descriptor", range(3))
def test_a_standard_file_that_is_a_pipe_is_no_reason(pipe, descriptor):
    reader, _writer = pipe
    before = os.dup(descriptor)
    os.dup2(reader.fileno(), descriptor)
    try:
        assert why_not_shared(SimpleNamespace(file=reader), open_files()) is None
    finally:
        os.dup2(before, descriptor)
        os.close(before)
