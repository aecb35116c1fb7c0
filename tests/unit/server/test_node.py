"""The loop of a node server, with clients that do as the test says."""

from __future__ import annotations

import socket
import time
from unittest.mock import Mock

from rpcdataloader.server.node import NodeServer, Stranger
from rpcdataloader.server.settings import ServerContext, ServerSettings
from rpcdataloader.wire.credentials import INSECURE
from rpcdataloader.wire.handshake import Preamble


def test_connections_that_come_and_go_before_a_busy_session_are_looked_at_by_one_timer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = NodeServer(listener, ServerContext(ServerSettings(), INSECURE, 1))
        server._clients = Mock(is_draining=False, **{"hand_over.return_value": False})
        server._children[server._clients.find.return_value.process.pid] = Mock(
            link=Mock(**{"recv.side_effect": BlockingIOError})
        )
        num_before = len(server._loop._timers.queue)
        for _ in range(3):
            peer, sock = socket.socketpair()
            with peer:
                peer.sendall(Preamble(b"1" * 16).encode())
                stranger = Stranger(sock, "", "", time.monotonic())
                server._unproved.add(stranger)
                server._look_at(stranger)
                server._drop(stranger, "its peer has gone")
        assert len(server._loop._timers.queue) == num_before + 1
        server.signals.close()
