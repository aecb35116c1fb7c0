"""Files and paths that other users of a machine cannot have made or changed.

Files, such as secrets, are judged when they are open, since the path could lead to another file by then.

The folder in which a command starts is judged before modules are imported from there.

Paths of the trainer are judged on a node: safe if other users of the node cannot have put modules there, now or later.
A path is judged by all folders and symbolic links that lead to it. Each must belong to this user or root and be
writable by no other user; or it must be the trainer's own, whose modules the trainer uses itself. A sticky folder, such
as ``/tmp``, is safe to pass through: other users cannot rename or remove what is in it.

A folder is the trainer's own if both sides see the same inode of the same file system. Within a machine, device numbers
identify file systems. Between machines, only those of network file systems have a common identity, their source.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping

from rpcdataloader.host.resources import machine_id, read

# Root mounts these, and their servers number the inodes. Users mount FUSE file systems, with any source.
_SHARED_KINDS = {"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "wekafs"}

# A tunnel's end: another file system on each machine.
_LOOPBACK = ("127.", "localhost:", "[::1]:")

_MAX_LINKS = 40  # as in the kernel


class UnsafeFileError(Exception):
    """The file cannot be trusted; the text continues its name: ``"belongs to user 1000"``."""


def check_file(status: os.stat_result, forbidden: int, *, any_owner: bool = False) -> None:
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


def read_safely(
    path: str | os.PathLike[str], max_bytes: int, forbidden: int, *, any_owner: bool = False, follow: bool = True
) -> bytes:
    """The content of a file, up to one byte more than ``max_bytes``.

    Args:
        max_bytes: Longest valid content.
        follow: Accept a symbolic link as path.

    Raises:
        UnsafeFileError: See :func:`check_file`.
        OSError: The file cannot be read.
    """
    # Non-blocking: opening a named pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    try:
        check_file(os.fstat(descriptor), forbidden, any_owner=any_owner)
        return os.read(descriptor, max_bytes + 1)
    finally:
        os.close(descriptor)


def identify(paths: Iterable[str]) -> dict[str, str]:
    """Identities, by path, of all folders and links that lead to absolute ``paths``, as far as these exist."""
    file_systems = _file_systems()
    found: dict[str, str] = {}
    for path in paths:
        try:
            for part, status in parts_of(path):
                found[part] = _identity(status, file_systems)
        except OSError:
            continue
    return found


def find_flaw(path: str, trusted: Mapping[str, str]) -> str | None:
    """Reason to distrust an absolute path, such as the owner of a folder on the way; None if it is safe.

    Args:
        trusted: The trainer's result of :func:`identify`.

    Raises:
        OSError: The path does not exist.
    """
    file_systems = _file_systems()
    parts = list(parts_of(path))
    for number, (part, status) in enumerate(parts, 1):
        if trusted.get(part) == _identity(status, file_systems):
            continue
        owner, whose = _name_user(status.st_uid), "it" if part == path else part
        if status.st_uid not in (os.geteuid(), 0):
            return f"{whose} belongs to {owner}"
        is_passed = status.st_mode & stat.S_ISVTX and number < len(parts)
        if not (stat.S_ISLNK(status.st_mode) or is_passed) and _is_writable_by_others(part, status):
            return f"{whose} is writable by others than {owner} (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def search_current_folder() -> str | None:
    """Let a command import modules from the current folder, as ``python -m`` does, unless other users can write there.

    Absolute paths in ``PYTHONPATH`` are the user's own choice. A relative or empty one means the current folder.

    Returns:
        The folder, and the reason to distrust it, in words; None if it is safe.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None
    try:
        flaw = find_flaw(folder, {})
    except OSError as exc:  # its path leads elsewhere by now
        flaw = f"it cannot be judged ({exc.strerror})"
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if flaw is not None or folder == os.sep:  # the root has no modules
        relative = {folder, *(os.path.abspath(entry) for entry in named if not os.path.isabs(entry))}
        sys.path[:] = [entry for entry in sys.path if entry in named or os.path.abspath(entry) not in relative]
    is_searched = flaw is None and folder != os.sep and not getattr(sys.flags, "safe_path", False)
    if (is_searched or folder in named) and not {"", folder} & {*sys.path}:
        sys.path.insert(0, folder)
    return flaw and f"{folder} is not used, as {flaw}"


def parts_of(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what leads to an absolute path, in order, and the path itself; without the root, which all programs trust.

    Raises:
        OSError: A part is missing.
    """
    here, names, num_links = os.sep, path.split(os.sep)[::-1], 0
    while names:
        name = names.pop()
        if name == os.pardir:
            here = os.path.dirname(here)
        elif name not in ("", os.curdir):
            part = os.path.join(here, name)
            status = os.lstat(part)
            yield part, status
            if not stat.S_ISLNK(status.st_mode):
                here = part
                continue
            num_links += 1
            if num_links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(part)
            here = os.sep if os.path.isabs(target) else here
            names += target.split(os.sep)[::-1]


def _file_systems() -> dict[int, str]:
    """Identities of the mounted network file systems, by device number."""
    found = {}
    # Not splitlines: names of folders may have what it takes for the end of a line.
    for line in filter(None, read("/proc/self/mountinfo").split("\n")):
        place, _, mounted = line.partition(" - ")
        kind, source, *_options = mounted.split(" ")
        if kind in _SHARED_KINDS and not source.startswith(_LOOPBACK):
            major, _, minor = place.split(" ")[2].partition(":")
            found[os.makedev(int(major), int(minor))] = f"{kind} {source}"
    return found


def _identity(status: os.stat_result, file_systems: Mapping[int, str]) -> str:
    file_system = file_systems.get(status.st_dev) or f"{machine_id()} {status.st_dev}"
    return f"{file_system} {status.st_ino}"


def _name_user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def _is_writable_by_others(part: str, status: os.stat_result) -> bool:
    if not status.st_mode & stat.S_IWGRP:
        return bool(status.st_mode & stat.S_IWOTH)
    # With an access control list, this bit may stand for other users, too.
    return bool(status.st_mode & stat.S_IWOTH) or not is_private(status.st_gid) or _has_acl(part)


def is_private(gid: int) -> bool:
    """Whether a group consists of this user alone. Many distributions make such a group for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (group.gr_name, gid) == (user.pw_name, user.pw_gid) and not {*group.gr_mem} - {user.pw_name}


def _has_acl(part: str) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(part)
    except OSError:  # the file system has none
        return False
