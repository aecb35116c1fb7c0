"""Listening sockets of a server, over TCP and Unix sockets, and taking connections from them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence

from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.connecting import look_up, short_path
from rpcdataloader.wire.transport import peer_uid, tune

LISTEN_BACKLOG = 1024

# What accept(2) says when this process or the system has no room; everything else concerns that one connection.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def listen_tcp(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first of ``ports`` that is free.

    Args:
        host: Name or address of the interface; ``"::"`` takes IPv4 as well, where the system can.
        ports: Candidates in order; 0 lets the kernel choose.

    Raises:
        ConnectError: The host does not resolve to an interface of this machine, or every port is in use.
    """
    try:
        infos = look_up(host, 0, socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise ConnectError(f"cannot listen on {host}: the host name does not resolve ({exc.strerror})") from exc
    family, _type, _proto, _name, sockaddr = infos[0]
    for port in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            sock.bind((sockaddr[0], port, *sockaddr[2:]))
            sock.listen(LISTEN_BACKLOG)
        except OSError as exc:
            sock.close()
            if exc.errno == errno.EADDRINUSE and port != ports[-1]:
                continue
            if exc.errno == errno.EADDRINUSE:
                tried = str(port) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
                raise ConnectError(
                    f"cannot listen on {host}: port {tried} in use; choose another, a range FIRST-LAST, or 0 for any"
                ) from exc
            raise ConnectError(f"cannot listen on {host} port {port}: {exc.strerror or exc}") from exc
        return sock
    raise ValueError("no port to listen on")


def listen_unix(path: str) -> socket.socket:
    """Listen on a Unix socket that only this user may connect to. A socket file nobody listens on is replaced.

    Raises:
        ConnectError: The path is in use, or cannot be created.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as short:
            _remove_stale(short)
            # The mode is there from the first moment on, and not only after a chmod.
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
            reason = "in use by another server" if _is_socket(path) else "there is something else of that name"
        raise ConnectError(f"cannot listen on unix:{path}: {reason}") from exc
    return sock


def _is_socket(path: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.stat(path).st_mode)
    return False


def _remove_stale(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a server that is stuck has a full queue, and is there all the same
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            # What any file that is no socket answers, too.
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)
        except (FileNotFoundError, BlockingIOError):
            pass


def accept(listener: socket.socket) -> tuple[socket.socket, str] | None:
    """Take one waiting connection; gives the socket and a text that tells who connected.

    Returns None when there is none (any more).

    Raises:
        ConnectError: This process has no descriptor left for it.
    """
    try:
        sock, peer = listener.accept()
    except OSError as exc:
        if exc.errno in _EXHAUSTED:
            raise ConnectError(exc.strerror) from exc
        return None
    try:
        tune(sock)
        return sock, f"uid {peer_uid(sock)}" if sock.family == socket.AF_UNIX else str(peer[0])
    except OSError:
        sock.close()
        return None


def peer_name(sock: socket.socket) -> str:
    """Who is at the other end of a connection, for a log: ``"10.0.0.7:51234"``, ``"[::1]:51234"``, ``"uid:1000"``."""
    try:
        if sock.family == socket.AF_UNIX:
            return f"uid:{peer_uid(sock)}"
        host, port, *_ = sock.getpeername()
    except OSError:  # it has gone
        return ""
    host = host.removeprefix("::ffff:")  # that of IPv4, on a listener for both
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> None:
    """Check that ``host`` resolves.

    Raises:
        ConnectError: It does not.
    """
    try:
        look_up(host, 0)
    except socket.gaierror as exc:
        raise ConnectError(
            f"the address that clients shall use, {host}, does not resolve here ({exc.strerror}); "
            "give one that does with --advertise"
        ) from exc
