"""Other programs at the address of a node server; each takes a stack that ends it, and gives its address."""

from __future__ import annotations

import contextlib
import http.server
import pickle
import socket
import struct
import threading
from typing import Any


def serve_files(stack: contextlib.ExitStack) -> Any:
    server = stack.enter_context(
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    )
    threading.Thread(target=server.serve_forever).start()
    stack.callback(server.shutdown)
    return server.server_address


def run_original(stack: contextlib.ExitStack) -> Any:
    """As far as a client sees it: it takes 8 bytes for the length of a pickle, and runs what is in that."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    listener.settimeout(10)

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as client, contextlib.suppress(MemoryError):
                    memory = bytearray(*struct.unpack("L", client.recv(8, socket.MSG_WAITALL)))
                    client.recv_into(memory, 0, socket.MSG_WAITALL)
                    function, args, kwargs, _rref = pickle.loads(memory)
                    answer = pickle.dumps((function(*args, **(kwargs or {})), None), protocol=5)
                    client.sendall(struct.pack("LL", 0, len(answer)) + answer)

    thread = threading.Thread(target=run)
    thread.start()
    stack.callback(thread.join)
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
    return listener.getsockname()


def run_sshd(stack: contextlib.ExitStack) -> Any:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def run() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as client:
            client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            client.recv(65536)

    thread = threading.Thread(target=run)
    thread.start()
    stack.callback(thread.join)
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
    return listener.getsockname()
