"""The node server that a trainer runs for itself. Started by :mod:`rpcdataloader.client.local_server`, ends with it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys

# As in launch: before torch and numpy are imported.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

from rpcdataloader.server.run import run_server  # noqa: E402
from rpcdataloader.server.settings import ServerSettings  # noqa: E402
from rpcdataloader.wire import plain  # noqa: E402
from rpcdataloader.wire.credentials import Credentials  # noqa: E402


def main() -> None:
    """Read settings from standard input, whose end of file later means that the trainer has gone; serve until then."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    fields = plain.load(sys.stdin.readline().encode())
    settings = ServerSettings(host=f"unix:{fields['path']}", grace=0.0)
    credentials = Credentials(fields["token"].encode(), "the embedded pool")
    # Sessions and workers have an empty standard input of their own in that place.
    lifeline = os.dup(sys.stdin.fileno())
    try:
        run_server(settings, credentials, embedded=True, ready=functools.partial(print, flush=True), lifeline=lifeline)
    finally:
        # The trainer removes it too, unless it was killed.
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(settings.unix_path))
    # The trainer waits for this at its own end, and an interpreter that takes torch apart needs a third of a second.
    os._exit(0)
