"""The trainer's own node server, started by :mod:`rpcdataloader.client.local_server` and ending with it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys

# Before torch and numpy are imported, as in launch.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

from rpcdataloader.server.run import run_server  # noqa: E402
from rpcdataloader.server.settings import ServerSettings  # noqa: E402
from rpcdataloader.wire import plain  # noqa: E402
from rpcdataloader.wire.credentials import Credentials  # noqa: E402


def main() -> None:
    """Read settings from standard input and serve until its end of file: the trainer has gone."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    fields = plain.load(sys.stdin.readline().encode())
    settings = ServerSettings(host=f"unix:{fields['path']}", grace=0.0)
    credentials = Credentials(fields["token"].encode(), "the embedded pool")
    # Sessions and workers get an empty standard input instead.
    lifeline = os.dup(sys.stdin.fileno())
    try:
        run_server(settings, credentials, embedded=True, ready=functools.partial(print, flush=True), lifeline=lifeline)
    finally:
        # The trainer removes it too, unless it was killed.
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(settings.unix_path))
    # The trainer waits for this process at its own end, and tearing torch down takes a third of a second.
    os._exit(0)
