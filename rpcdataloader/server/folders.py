"""The folders in which sessions keep the modules of their clients: named here, made by a session that gets modules, and
removed when that has ended, however it did.
"""

from __future__ import annotations

import os
import shutil
import tempfile


class Folders:
    """The folders of a node server."""

    def __init__(self) -> None:
        self._ended: set[str] = set()

    def name(self, session: str) -> str:
        """A path that is used by one session alone; empty if there is no place for temporary files.

        Args:
            session: Its id, which is random.
        """
        try:
            return os.path.join(tempfile.gettempdir(), f"rpcdataloader-{session}")
        except FileNotFoundError:
            return ""

    def remove(self, path: str) -> None:
        """Remove the folder of a session that has ended, if there is one.

        A worker that the session has left behind may write a file until the kernel has ended it: what could not be
        removed then goes with the next one.
        """
        self._ended.add(path)
        for folder in self._ended:
            shutil.rmtree(folder, ignore_errors=True)
        self._ended = {folder for folder in self._ended if os.path.lexists(folder)}
