"""Memory in huge pages: what was used, with what is in it, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest

from rpcdataloader.host.resources import collapse_pages

SIZE = 8 << 20


def figures(memory):
    """Bytes that are resident, and in huge pages, of the mapping that a block of memory lies in."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        first, end = (int(text, 16) for text in entry.split()[0].split("-"))
        if first <= address < end:
            return tuple(1024 * int(re.search(rf"^{name}: +(\d+)", entry, re.MULTILINE)[1]) for name in FIELDS)
    raise AssertionError("no such mapping")


FIELDS = ("Rss", "AnonHugePages")


@pytest.fixture
def make_block():
    """Make blocks of memory whose mappings have other neighbours than each other."""
    return lambda: mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1)
    or not Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").exists(),
    reason="this kernel cannot collapse pages",
)
def test_used_memory_moves_into_huge_pages_and_unused_memory_stays_unused(make_block):
    used, unused = make_block(), make_block()
    unused.madvise(mmap.MADV_DONTDUMP)  # or it could be one mapping with the other
    pattern = os.urandom(mmap.PAGESIZE) * (SIZE // mmap.PAGESIZE)
    used[:] = pattern
    assert figures(used)[1] == 0
    collapse_pages()
    assert figures(used)[1] >= SIZE / 2
    assert used[:] == pattern
    assert figures(unused) == (0, 0)


def test_kernel_without_huge_pages_is_no_error(monkeypatch):
    def refuse(path, **_options):
        raise FileNotFoundError(path)

    monkeypatch.setattr("builtins.open", refuse)
    collapse_pages()
