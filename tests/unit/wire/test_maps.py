"""Memory maps of files travel as a path; what would become another content is an error."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch

from rpcdataloader.errors import SerializationError
from rpcdataloader.wire import picklers
from rpcdataloader.wire.pickling import dumps, dumps_reply, loads
from tests.support.comparison import assert_same

SHAPE = 300, 400


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "numbers"
    np.arange(8 + 300 * 400, dtype=np.int32).tofile(path)
    return path


VIEWS = {
    "whole": lambda whole: whole,
    "rows": lambda whole: whole[17:220],
    "every other": lambda whole: whole[::2, ::3],
    "reversed": lambda whole: whole[::-1],
    "transposed": lambda whole: whole.T,
    "columns": lambda whole: whole[:, 30:333],
    "plain": np.asarray,
    "plain rows": lambda whole: np.asarray(whole)[5:],
    "one row as many": lambda whole: np.broadcast_to(whole[7], SHAPE),
    "of another map": lambda whole: np.frombuffer(whole.base if isinstance(whole.base, mmap.mmap) else whole, "u1"),
    "of its bytes": lambda whole: np.frombuffer(memoryview(whole.reshape(-1)), np.uint8),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", ["r", "c", "r+"])
@pytest.mark.parametrize("in_band", [False, True])
def test_a_map_is_opened_from_its_file(path, mode, view, in_band):
    array = VIEWS[view](np.memmap(path, np.int32, mode, 32, SHAPE))
    encoded = dumps({"tokens": array}, in_band=in_band)
    assert encoded.size_bytes < 1000
    found = loads(encoded.payload, [])["tokens"]
    np.testing.assert_array_equal(found, array)
    assert (found.dtype, found.strides, found.flags.writeable) == (array.dtype, array.strides, array.flags.writeable)
    assert type(found) is type(array)
    np.memmap(path, np.int32, "r+")[:] += 1  # it is the file, and no copy
    np.testing.assert_array_equal(found, array)


def bfloats(path):
    return torch.from_file(str(path), size=100_000, dtype=torch.bfloat16)


def loaded(path):
    torch.save({"x": torch.arange(100_000), "y": torch.ones(100_000)}, path)
    return torch.load(path, mmap=True)["y"]


def mapped_by_python(path):
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.int32)[9:]


@pytest.mark.parametrize(
    "make",
    [
        bfloats,
        loaded,
        lambda path: loaded(path)[100:][::2],
        lambda path: torch.from_file(str(path), shared=True, size=80_000, dtype=torch.int32).view(200, 400).T,
        lambda path: torch.from_numpy(np.memmap(path, np.int32, "c", 32, SHAPE)),
        mapped_by_python,
    ],
)
@pytest.mark.parametrize("in_band", [False, True])
def test_large_tensors_and_arrays_in_a_map_of_any_kind_are_opened_from_their_file(path, make, in_band, monkeypatch):
    monkeypatch.setattr(picklers, "MIN_SOUGHT_BYTES", 1 << 16)
    value = make(path)
    encoded = dumps({"weights": value}, in_band=in_band)
    assert encoded.size_bytes < 1000
    assert_same(loads(encoded.payload, [])["weights"], value)


def test_memory_that_processes_share_is_no_file(monkeypatch):
    monkeypatch.setattr(picklers, "MIN_SOUGHT_BYTES", 1 << 16)
    for value in torch.ones(100_000), torch.ones(100_000).share_memory_(), np.frombuffer(mmap.mmap(-1, 1 << 20), "u1"):
        assert dumps(value).size_bytes > 100_000


def test_changes_go_to_the_file_where_those_of_the_original_do(path):
    array = np.memmap(path, np.int32, "w+", shape=SHAPE)
    array[:] = 5
    found = loads(dumps(array).payload, [])
    found[3] = 6
    assert array[3, 3] == 6


def test_pickle_of_a_map_is_another_once_its_file_was_replaced(path, tmp_path):
    def replace():
        other = tmp_path / "other"
        (np.memmap(path, np.int32, "r") + 1).tofile(other)
        other.replace(path)

    def pickled(mode):
        return bytes(dumps(np.memmap(path, np.int32, mode, 32, SHAPE)).payload)

    for mode in "r", "c", "r+":
        before = pickled(mode)
        assert pickled(mode) == before
        replace()
        assert pickled(mode) != before
    before = pickled("r+")
    np.memmap(path, np.int32, "r+")[:] += 1
    os.utime(path, ns=(0, 0))
    assert pickled("r+") == before  # the node sees that


def remove(_array, path):
    path.unlink()


def cut(_array, path):
    path.write_bytes(b"other")


def change_a_private_page(array, _path):
    array[100, 100] = 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (remove, r"memory map of .*numbers \(deleted\): No such file or directory; .*RPCDataset"),
        (change_a_private_page, "memory map of .*numbers has changes that are not in the file, .*RPCDataset"),
    ],
)
def test_a_map_that_others_cannot_open_is_an_error(path, change, text):
    array = np.memmap(path, np.int32, "c", 32, SHAPE)
    change(array, path)
    with pytest.raises(SerializationError, match=text):
        dumps({"tokens": array})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (remove, "memory map of .*numbers cannot be opened on .*: No such file .*RPCDataset"),
        (cut, "it has 5 bytes here, and 480032 at the client; .*RPCDataset"),
    ],
)
def test_a_node_without_the_file_says_so(path, change, text):
    array = np.memmap(path, np.int32, "r", 32, SHAPE)
    encoded = dumps(array)
    change(array, path)
    with pytest.raises(SerializationError, match=text):
        loads(encoded.payload, [])


def test_small_parts_and_what_workers_send_are_memory(path):
    array = np.memmap(path, np.int32, "r", 32, SHAPE)
    for encoded in dumps(array[:2]), dumps_reply(array):
        assert encoded.size_bytes > 2000
