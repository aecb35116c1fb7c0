"""A worker of the original on a free port of loopback; writes ``ready HOST:PORT`` once it listens.

The original neither tells which port 0 became nor when it listens. The one change made to it is to say so.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

# Not by an import statement, which type checkers would take to mean the package of this repository.
rpc: Any = importlib.import_module("rpcdataloader.rpc")

_create_server = rpc._create_server


def _create_server_and_tell(*args: Any, **kwargs: Any) -> socket.socket:
    sock: socket.socket = _create_server(*args, **kwargs)
    print(f"ready 127.0.0.1:{sock.getsockname()[1]}", flush=True)
    return sock


if __name__ == "__main__":
    rpc._create_server = _create_server_and_tell
    rpc.run_worker("127.0.0.1", 0)
