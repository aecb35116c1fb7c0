"""Huge pages: a fork copies one entry for each, instead of 512.

A process that has imported torch has 40,000 pages. A fork copies an entry of each, and parent and child fault where
they write to them; this is most of the cost of a gate, a session or a worker before it runs anything.
"""

from __future__ import annotations

import ctypes

_MADV_COLLAPSE = 25  # of asm-generic/mman-common.h, since Linux 6.1
_libc = ctypes.CDLL(None)


def collapse_pages() -> None:
    """Move this process's memory into huge pages; does nothing if the kernel does not allow it.

    Only anonymous memory in which a huge page has been used already, so that memory hardly grows.
    """
    try:
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") as file:
            size_bytes = int(file.read())
        with open("/proc/self/maps") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        span, mode, _offset, _device, _inode, *path = line.split(maxsplit=5)
        if mode != "rw-p" or path not in ([], ["[heap]"]):
            continue
        first, end = (int(address, 16) for address in span.split("-"))
        first, end = -(-first // size_bytes) * size_bytes, end // size_bytes * size_bytes
        if first < end:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)
