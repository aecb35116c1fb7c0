"""Reading files that are trusted, such as secrets: only those that others cannot have written, or read.

The open file is judged and not the path, which could lead to another file by then.
"""

from __future__ import annotations

import enum
import os
import stat


class Flaw(enum.Enum):
    """Why a file is not to be trusted."""

    KIND = enum.auto()
    OWNER = enum.auto()
    MODE = enum.auto()


class UnsafeFileError(Exception):
    """The file is not to be trusted; the text goes on after its name: ``"belongs to user 1000"``."""

    def __init__(self, flaw: Flaw, text: str) -> None:
        super().__init__(text)
        self.flaw = flaw


def check(status: os.stat_result, forbidden: int, *, any_owner: bool = False) -> None:
    """Judge a file.

    Args:
        forbidden: Bits of the mode that must not be set.
        any_owner: It need not belong to this user, or to root.

    Raises:
        UnsafeFileError: It is no regular file, or one of others.
    """
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFileError(Flaw.KIND, "is not a regular file")
    if os.name != "posix":  # there, permission bits mean nothing
        return
    if not any_owner and status.st_uid not in (os.geteuid(), 0):
        raise UnsafeFileError(Flaw.OWNER, f"belongs to user {status.st_uid}")
    if status.st_mode & forbidden:
        raise UnsafeFileError(Flaw.MODE, f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o})")


def read(
    path: str | os.PathLike[str], max_bytes: int, forbidden: int, *, any_owner: bool = False, follow: bool = True
) -> bytes:
    """The content of a file, and one byte more than ``max_bytes`` at most.

    Args:
        max_bytes: The content is no longer than that.
        follow: The path may be a symbolic link.

    Raises:
        UnsafeFileError: As :func:`check` does.
        OSError: It cannot be read.
    """
    # Not blocking: opening a named pipe would wait for its writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    descriptor = os.open(path, flags)
    try:
        check(os.fstat(descriptor), forbidden, any_owner=any_owner)
        return os.read(descriptor, max_bytes + 1)
    finally:
        os.close(descriptor)
