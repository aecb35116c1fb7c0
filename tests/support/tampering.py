"""What stands between a client and a node server and does them harm; and an object that shows when it was loaded."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import TIMEOUT_SCALE
from tests.support.datasets import note
from tests.support.peers import HEADER_SIZE, PREAMBLE_SIZE, MessageType


class Bomb:
    """An object whose pickle writes a line when it is loaded."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return note, (self.path, "loaded")


def num_loaded(path: Path) -> int:
    """How often bombs of this path were loaded."""
    return len(path.read_text().splitlines()) if path.exists() else 0


@dataclass(frozen=True)
class Frame:
    """One message as it travels."""

    header: bytes
    body: bytes
    blocks: bytes

    @property
    def type(self) -> int:
        return self.header[4]

    def encode(self) -> bytes:
        return self.header + self.body + self.blocks


def recv_exactly(sock: socket.socket, size: int) -> bytes:
    """``size`` bytes, or EOFError."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def recv_frame(sock: socket.socket) -> Frame:
    """The next message, or EOFError."""
    header = recv_exactly(sock, HEADER_SIZE)
    payload_size, num_blocks = struct.unpack_from("<QI", header, 16)
    digest_size = 32 if num_blocks and header[4] in (MessageType.CALL, MessageType.BUILD) else 0
    body = recv_exactly(sock, 8 * num_blocks + digest_size + payload_size)
    sizes = struct.unpack_from(f"<{num_blocks}Q", body)
    return Frame(header, body, recv_exactly(sock, sum(sizes)))


class Proxy:
    """Passes on everything between clients and a server, but for what ``tamper`` makes of it.

    Args:
        target: Address of the server, ``host:port``.
        tamper: Called with the direction (``"up"`` to the server, ``"down"`` to the client), the number of the
            connection from 0, the number of the message in this direction from 0, and the message; returns what to
            send in its place. Messages 0 and 1 are HELLO and AUTH.
    """

    def __init__(self, target: str, tamper: Callable[..., Any]) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._tamper = tamper
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in [self._listener, *self._socks]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._socks]:
            sock.close()

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._socks += [client, server]
                self._start(self._pump, "up", number, client, server)
                self._start(self._pump, "down", number, server, client)
                number += 1

    def _pump(self, direction: str, connection: int, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._pass_on(direction, connection, source, sink)
        # The end of one side is passed on to the other.
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, direction: str, connection: int, source: socket.socket, sink: socket.socket) -> None:
        if direction == "up":
            sink.sendall(recv_exactly(source, PREAMBLE_SIZE))
        for number in itertools.count():
            frame = recv_frame(source)
            for piece in self._tamper(direction, connection, number, frame):
                sink.sendall(piece if isinstance(piece, bytes) else piece.encode())


class EncryptedProxy(Proxy):
    """The same for what it cannot read: ``tamper`` gets the direction and some bytes, and returns others."""

    def _pass_on(self, direction: str, _connection: int, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            sink.sendall(self._tamper(direction, data))


class Impostor:
    """Listens, and lets ``act`` deal with every connection."""

    def __init__(self, act: Callable[[socket.socket], object]) -> None:
        self._act = act
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(20 * TIMEOUT_SCALE)
                with sock, contextlib.suppress(OSError, EOFError):
                    self._act(sock)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass


def dial(address: str, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    """A raw connection to ``host:port`` that says ``data``."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), source_address=(source, 0))
    sock.settimeout(20 * TIMEOUT_SCALE)
    sock.sendall(data)
    return sock


def read_to_the_end(sock: socket.socket) -> bytes:
    """What comes until the server closes; it must, or the socket's limit of time is an error."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            data += piece
    return data


def read_frames(sock: socket.socket) -> list[Frame]:
    """All messages until the end."""
    frames = []
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            frames.append(recv_frame(sock))
    return frames
