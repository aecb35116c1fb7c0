"""Memory that holds a large dataset instance, and what others map of it."""

from __future__ import annotations

import os

import pytest

from rpcdataloader.wire.copies import Copied, Copies, map_copies


def mapped(*copies):
    blocks = map_copies(Copies(*copies))
    assert all(block.tensor.data_ptr() % 64 == 0 for block in blocks)  # for every dtype
    return [bytes(block.view) for block in blocks]


def test_only_memory_that_nobody_can_change_is_mapped(tmp_path):
    copied = Copied([memoryview(b"a" * 100), memoryview(b""), memoryview(b"b" * 70)])
    place = copied.place
    assert mapped(*place) == [b"a" * 100, b"", b"b" * 70]
    with pytest.raises(PermissionError):
        os.pwrite(place.descriptor, b"x", 0)
    with pytest.raises(OSError, match="another file is at descriptor"):
        mapped(*place._replace(inode=place.inode + 1))
    with pytest.raises(OSError, match=r"buffers of \(1000,\) bytes are not in memory of"):
        mapped(*place._replace(sizes=(1000,)))
    del copied
    with pytest.raises(OSError, match=r"No such file|another file"):
        mapped(*place)
    with open(tmp_path / "file", "wb+") as file:
        file.write(b"a" * 100)
        file.flush()
        with pytest.raises(OSError, match=r"another file|Invalid argument"):
            mapped(os.getpid(), file.fileno(), os.fstat(file.fileno()).st_ino, (100,))
