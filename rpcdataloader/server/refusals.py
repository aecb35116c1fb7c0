"""Connections that cannot be served: their peers are told why, in clear, and close them."""

from __future__ import annotations

import contextlib
import os
import select
import socket

from rpcdataloader.server.processes import Loop
from rpcdataloader.wire.handshake import Refusal, encode_refusal

# What a peer is seen to do whose bytes are for another process, or for none.
PEER_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR

# Descriptors that come with a connection: its own, and that of its process's output. Spare ones: a refused connection
# keeps its own for a moment.
NUM_OF_CONNECTION, NUM_SPARE = 2, 16

# Seconds for a peer that was told to close its connection.
CLOSE_TIMEOUT = 10.0


def send_refusal(sock: socket.socket, error: Refusal) -> None:
    """Tell a peer why its connection is refused; reads nothing of it, and never waits."""
    with contextlib.suppress(OSError):
        sock.send(encode_refusal(error), socket.MSG_DONTWAIT)
        sock.shutdown(socket.SHUT_WR)


class Refusals:
    """Refused connections, until their peers close them: closing first would discard what they have not read yet.

    A process without room for descriptors can still refuse: spare ones make room for those of a connection.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._socks: set[socket.socket] = set()
        self._spare: list[int] = []
        self.keep_room()

    def keep_room(self) -> None:
        """Take spare descriptors, if there are any."""
        with contextlib.suppress(OSError):
            while len(self._spare) < NUM_SPARE:
                self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def make_room(self) -> None:
        """Let spare descriptors go, for those of a connection that is about to come."""
        for descriptor in self._spare[-NUM_OF_CONNECTION:]:
            os.close(descriptor)
        del self._spare[-NUM_OF_CONNECTION:]

    def add(self, sock: socket.socket, error: Refusal) -> None:
        """Refuse a connection, which is closed here some time later."""
        send_refusal(sock, error)
        self._socks.add(sock)
        self._loop.watch(sock.fileno(), lambda: self._drop(sock), PEER_GONE)
        self._loop.call_after(CLOSE_TIMEOUT, lambda: self._drop(sock))

    def _drop(self, sock: socket.socket) -> None:
        if sock in self._socks:
            self._socks.discard(sock)
            self._loop.unwatch(sock.fileno())
            sock.close()
            self.keep_room()

    def close(self) -> None:
        """Close all descriptors, in a fork or at the end."""
        while self._spare:
            os.close(self._spare.pop())
        for sock in self._socks:
            sock.close()
