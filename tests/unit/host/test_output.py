"""Output whose reader may be slow, stop, or go."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from rpcdataloader.host.output import MAX_WAITING_BYTES, Output


@contextlib.contextmanager
def replaced(kind, tmp_path):
    """Replace descriptor 2, which pytest captures again between fixtures and tests; gives the end to read."""
    with contextlib.ExitStack() as stack:
        kept = os.dup(2)
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 2)
        if kind == "file":
            read, write = os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT), os.open(tmp_path / "log", os.O_WRONLY)
        elif kind == "socket":
            read, write = (sock.detach() for sock in socket.socketpair())
        else:
            read, write = os.openpty() if kind == "terminal" else os.pipe()
        os.dup2(write, 2)
        os.close(write)
        if kind == "closed pipe":
            os.close(read)
        else:
            stack.callback(os.close, read)
            os.set_blocking(read, False)
        yield read


@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal", "file", "closed pipe"])
def test_output_never_waits_and_says_what_it_has_left_out(kind, tmp_path):
    with replaced(kind, tmp_path) as read:
        check(read, kind)


def check(read, kind):
    output = Output(2)
    line = "0123456789" * 20 + "\n"
    num_lines = 2 * MAX_WAITING_BYTES // len(line)
    for _ in range(num_lines):
        output.write(line)
    output.finish(0.01)
    assert output.is_waiting == (kind in ("pipe", "socket", "terminal"))
    if kind != "closed pipe":
        text = b""
        while True:
            output.flush()
            try:
                data = os.read(read, 65536)
            except BlockingIOError:
                data = b""
            if not data:
                break
            text += data
        lines = text.decode().splitlines()
        num_written = lines.count(line.strip())
        assert num_written > 3 * num_lines / 8 if kind != "file" else num_written == num_lines
        if kind != "file":
            left_out = f"rpcdataloader: left {num_lines - num_written} lines out here, as they were not read in time"
            assert lines[num_written:] == [left_out]
    assert os.get_blocking(2)  # its starter may use it, too
    os.close(output.fileno())
