"""Reading trusted files, such as secrets: only those that other users cannot have written, or read.

The checks judge the open file, since the path could lead to another file by then.
"""

from __future__ import annotations

import os
import stat


class UnsafeFileError(Exception):
    """The file cannot be trusted; the text continues its name: ``"belongs to user 1000"``."""


def check(status: os.stat_result, forbidden: int, *, any_owner: bool = False) -> None:
    """Judge a file.

    Args:
        forbidden: Bits of the mode that must be clear.
        any_owner: Accept a file of another user than this one or root.

    Raises:
        UnsafeFileError: The file is not regular, belongs to another user, or is open to other users.
    """
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFileError("is not a regular file")
    if not any_owner and status.st_uid not in (os.geteuid(), 0):
        raise UnsafeFileError(f"belongs to user {status.st_uid}")
    if status.st_mode & forbidden:
        raise UnsafeFileError(f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o}): run chmod 600")


def read(
    path: str | os.PathLike[str], max_bytes: int, forbidden: int, *, any_owner: bool = False, follow: bool = True
) -> bytes:
    """The content of a file, up to one byte more than ``max_bytes``.

    Args:
        max_bytes: Longest valid content.
        follow: Accept a symbolic link as path.

    Raises:
        UnsafeFileError: See :func:`check`.
        OSError: The file cannot be read.
    """
    # Non-blocking: opening a named pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    try:
        check(os.fstat(descriptor), forbidden, any_owner=any_owner)
        return os.read(descriptor, max_bytes + 1)
    finally:
        os.close(descriptor)
