"""A process that sends one ready batch over TCP loopback, again and again, to whoever connects.

Argument: bytes of the batch. Writes ``ready HOST:PORT`` once it listens.
"""

from __future__ import annotations

import contextlib
import socket
import sys


def main(batch_bytes: int) -> None:
    batch = memoryview(bytes([0xA5]) * batch_bytes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"ready 127.0.0.1:{server.getsockname()[1]}", flush=True)
        sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, contextlib.suppress(ConnectionError):
        while True:
            sock.sendall(batch)


if __name__ == "__main__":
    main(int(sys.argv[1]))
