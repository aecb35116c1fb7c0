"""The file by which clients find a node server: ``launch --register``.

A server's file appears whole and under a name of its own, so that servers need no lock and touch no other file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import tempfile

from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.status import Registration

logger = logging.getLogger("rpcdataloader.server")


class Announcement:
    """Announces a server in ``directory`` until it is closed.

    Args:
        directory: Absolute path; created if it is missing, for its owner alone.
        registration: Content of the file; its time is replaced by that of the file system.

    Raises:
        ConnectError: The directory cannot be written.
    """

    def __init__(self, directory: str, registration: Registration) -> None:
        self._directory = directory
        self._registration = registration
        self._path = os.path.join(directory, registration.file_name(secrets.token_hex(4)))
        self._has_failed = False
        self._is_closed = False
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            self._write(is_first=True)
        except OSError as exc:
            raise ConnectError(f"cannot register in {directory}: {exc.strerror or exc}") from exc
        logger.info("registered as %s", self._path)

    def renew(self) -> None:
        """Show that the server still lives; call this every ``RENEWAL_PERIOD``. Logs problems."""
        try:
            try:
                os.utime(self._path)  # the clock of the file server
            except FileNotFoundError:
                logger.warning("%s was removed by another process: registered again", self._path)
                self._write()
            self._has_failed = False
        except OSError as exc:
            if not self._has_failed:
                logger.warning("cannot renew %s: %s", self._path, exc.strerror or exc)
            self._has_failed = True

    def close(self) -> None:
        """Tell clients that the server is leaving; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        except OSError as exc:
            logger.warning("cannot remove %s: %s", self._path, exc.strerror or exc)

    def _write(self, is_first: bool = False) -> None:
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self._directory)  # of mode 0600
        try:
            with open(descriptor, "wb") as file:
                if is_first:
                    # Time of the file server: all clients must see the servers in the order of their coming.
                    started = os.fstat(descriptor).st_mtime
                    self._registration = dataclasses.replace(self._registration, started=started)
                file.write(self._registration.encode())
                file.flush()
                os.fsync(descriptor)
            os.rename(temporary, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
