"""Memory maps of files travel as a path; what would become another content is an error."""

from __future__ import annotations

import numpy as np
import pytest

from rpcdataloader.errors import SerializationError
from rpcdataloader.wire.pickling import dumps, dumps_reply, loads

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


def test_changes_go_to_the_file_where_those_of_the_original_do(path):
    array = np.memmap(path, np.int32, "w+", shape=SHAPE)
    array[:] = 5
    found = loads(dumps(array).payload, [])
    found[3] = 6
    assert array[3, 3] == 6


def remove(_array, path):
    path.unlink()


def cut(_array, path):
    path.write_bytes(b"other")


def forget_the_name(array, _path):
    array.filename = None


def change_a_private_page(array, _path):
    array[100, 100] = 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (remove, "memory map of .*numbers: No such file or directory; .*RPCDataset"),
        (change_a_private_page, "memory map of .*numbers has changes that are not in the file .*RPCDataset"),
        (forget_the_name, "a file without name: .*RPCDataset"),
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
