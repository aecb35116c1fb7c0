"""The folders in which sessions keep the modules of their clients: named here, made by a session that gets modules, and
removed when that has ended, however it did.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile


class Folders:
    """The folders of a node server."""

    def __init__(self) -> None:
        self._ended: set[str] = set()

    def name(self) -> str:
        """A path that is used by one session alone; empty if there is no place for temporary files."""
        try:
            return os.path.join(tempfile.gettempdir(), f"rpcdataloader-{secrets.token_hex(16)}")
        except FileNotFoundError:
            return ""

    def remove(self, path: str, *, wait: bool = False) -> None:
        """Remove the folder of a session that has ended, if there is one.

        A program does it, as the client may have put any number of files there, at any depth. A worker that the session
        has left behind may write a file until the kernel has ended it: what could not be removed then goes with the
        next one.

        Args:
            wait: Until it is done; otherwise this returns at once.
        """
        self._ended = {folder for folder in {*self._ended, path} if _is_ours(folder)}
        if self._ended:
            command = 'exec >/dev/null 2>&1; rm -rf -- "$@"' + ("" if wait else " &")
            with contextlib.suppress(OSError):
                subprocess.run(["sh", "-c", command, "sh", *self._ended], stdin=subprocess.DEVNULL, check=False)


def _is_ours(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.getuid()
    except OSError:
        return False
