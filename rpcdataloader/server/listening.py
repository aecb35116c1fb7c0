"""A node server's listening socket, and its connections."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import is_listening, look_up, short_path
from rpcdataloader.wire.transport import peer_uid, tune

LISTEN_BACKLOG = 1024

# accept(2)'s errors when this process or the system has no room; all others concern that one connection.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def listen_tcp(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first free one of ``ports``.

    Args:
        host: Name or address of the interface; ``"::"`` includes IPv4, where the system can.
        ports: Candidates in order; 0 lets the kernel choose.

    Raises:
        ConnectError: The host does not resolve to an interface of this machine, or every port is in use.
    """
    try:
        infos = look_up(host, 0, socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise ConnectError(f"cannot listen on {host}: the host name does not resolve ({exc.strerror})") from exc
    family, _type, _proto, _name, sockaddr = infos[0]
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    for port in ports:
        address = sockaddr[0], port, *sockaddr[2:]
        try:
            return socket.create_server(address, family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=is_dual)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise ConnectError(f"cannot listen on {host} port {port}: {os.strerror(exc.errno or 0)}") from exc
    tried = str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
    raise ConnectError(
        f"cannot listen on {host}: port {tried} in use; choose another, a range FIRST-LAST, or 0 for any"
    )


def listen_unix(path: str) -> socket.socket:
    """Listen on a Unix socket that only this user may connect to; replaces a socket file without a listener.

    Raises:
        ConnectError: The path is in use, or cannot be created.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as short:
            if not is_listening(short) and Path(path).is_socket():
                os.unlink(short)  # of a server that was killed
            # The mode applies from the first moment on, unlike after a chmod.
            before = os.umask(0o177)
            try:
                sock.bind(short)
            finally:
                os.umask(before)
            sock.listen(LISTEN_BACKLOG)
    except OSError as exc:
        sock.close()
        reason = exc.strerror or str(exc)
        if exc.errno == errno.EADDRINUSE:
            reason = "in use by another server" if Path(path).is_socket() else "something else has that name"
        raise ConnectError(f"cannot listen on unix:{path}: {reason}") from exc
    return sock


def accept(listener: socket.socket) -> tuple[socket.socket, str, str] | None:
    """Accept one waiting connection, if there is one.

    Returns:
        The socket, the peer's host or user, and that with the port, for a log: ``"10.0.0.7:51234"``, ``"uid:1000"``.

    Raises:
        ConnectError: This process has no descriptor left.
    """
    try:
        sock, address = listener.accept()
    except OSError as exc:
        if exc.errno in _EXHAUSTED:
            raise ConnectError(exc.strerror) from exc
        return None
    try:
        tune(sock)
        if sock.family == socket.AF_UNIX:
            user = f"uid:{peer_uid(sock)}"
            return sock, user, user
        host = str(address[0]).removeprefix("::ffff:")  # IPv4, on a listener for both
        return sock, host, str(Address(host, address[1]))
    except OSError:
        sock.close()
        return None


def resolve(host: str) -> None:
    """Check that ``host`` resolves.

    Raises:
        ConnectError: The host does not resolve.
    """
    try:
        look_up(host, 0)
    except socket.gaierror as exc:
        raise ConnectError(
            f"the address for clients, {host}, does not resolve here ({exc.strerror}); "
            "give one that does with --advertise"
        ) from exc
