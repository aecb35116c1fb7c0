"""The sockets of an address: connecting to one until a deadline, listening at one, and accepting."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import ipaddress
import os
import pickle
import selectors
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.handshake import UnavailableError
from rpcdataloader.wire.transport import TRAINER_SEND_BYTES, Deadline, Transport, peer_uid, shut_down, tune

# sockaddr_un holds 108 bytes, including the final zero.
MAX_UNIX_PATH = 107

# Errors while no server listens there (yet): retried until the deadline.
_NOT_YET = {
    socket.EAI_AGAIN,  # a silent name server may answer; a missing name will not appear soon
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENOTCONN,  # reset before its options were set
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
    errno.ENOENT,
    errno.EAGAIN,
}

# In words, while packets are dropped.
NO_ANSWER = "no answer (is the host up, does a firewall drop the port?)"

LISTEN_BACKLOG = 1024

# Seconds for the answer of a server that may be another program.
PROBE_TIMEOUT = 0.4

# Seconds to wait for another server that starts in the same folder; any program that can read it may hold its lock.
LOCK_TIMEOUT = 5.0

# Errors of this process or the system, which have no room; all others of accept(2) concern that one connection.
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

# The same of user code, which may also need a process.
SHORTAGES = {errno.EAGAIN, *EXHAUSTED}


def connect(
    address: Address,
    deadline: Deadline,
    *,
    retry: bool = False,
    tell: Callable[[str], None] = lambda _reason: None,
    find_host: Callable[[], str] = str,
) -> Transport:
    """Connect to ``address``.

    Args:
        deadline: Bounds all attempts on the resolved addresses together; resolution itself is the C library's, which
            takes as long as its own configuration says. Cancelling it ends the wait, and the connection.
        retry: Try again, with back-off, while no server listens there: it may still be starting.
        tell: Function that takes the reason of each failed attempt before the last.
        find_host: Function that gives the IP address to use, if the name of ``address`` is not to be resolved.

    Raises:
        UnavailableError: This process, or its machine, has no room for a connection now.
        ConnectError: No server answered before the deadline; the message says why.
    """
    pause = 0.05
    while True:
        try:
            return _connect_once(address, deadline, find_host() or address.host)
        except OSError as exc:
            if exc.errno in EXHAUSTED:
                raise UnavailableError(f"cannot connect to {address}: {_reason(exc)}") from exc
            is_full = exc.errno == errno.EAGAIN  # the queue of a Unix socket
            if not (retry or is_full) or not _may_pass(exc) or not deadline.pause(pause):
                raise ConnectError(f"cannot connect to {address}: {_reason(exc)}") from exc
            tell(_reason(exc))
        pause = min(2 * pause, 1.0)


def _connect_once(address: Address, deadline: Deadline, host: str) -> Transport:
    if address.is_unix:
        with short_path(address.path) as path:
            return Transport(_connect_socket(socket.AF_UNIX, path, deadline, 1), str(address))
    infos, errors = look_up(host, address.port), []
    try:
        while infos:
            family, _type, _proto, _name, sockaddr = infos.pop(0)
            try:
                return Transport(_connect_socket(family, sockaddr, deadline, 1 + len(infos)), str(address))
            except OSError as exc:
                errors.append(exc)
        # A machine without IPv6 cannot reach some of them, ever: what it says of the others counts.
        raise next(filter(_may_pass, errors), errors[0])
    finally:
        del errors  # their tracebacks refer to this frame


def _may_pass(error: OSError) -> bool:
    return isinstance(error, TimeoutError) or error.errno in _NOT_YET


def _connect_socket(family: int, address: Any, deadline: Deadline, num_left: int) -> socket.socket:
    """Connect, and leave an equal part of the time to each of the remaining addresses, including this one."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        remaining = deadline.remaining()
        # A timeout of 0 would mean non-blocking.
        sock.settimeout(None if remaining is None else max(remaining / num_left, 1e-3))
        deadline.when_cancelled(functools.partial(shut_down, sock))
        sock.connect(address)
        tune(sock, TRAINER_SEND_BYTES)
        if family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
            # No server listens there, and the kernel chose that very port for this end: TCP connects it to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        sock.close()
        raise
    return sock


def look_up(host: str, port: int, flags: int = 0) -> list[tuple[int, int, int, str, Any]]:
    """``getaddrinfo`` with every failure as a ``gaierror``."""
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
    except UnicodeError:
        # A part between two dots is empty, or longer than 63 characters.
        raise socket.gaierror(socket.EAI_NONAME, "not a valid host name") from None


def _reason(exc: OSError) -> str:
    if isinstance(exc, socket.gaierror):
        return f"the host name does not resolve ({exc.strerror})"
    if isinstance(exc, TimeoutError):
        return NO_ANSWER
    if exc.errno == errno.ECONNREFUSED:
        return (
            "connection refused (is `python -m rpcdataloader.launch` running there, on that port, and with --host if "
            "that is another machine?)"
        )
    if exc.errno == errno.ENOENT:
        return f"{exc.strerror} (is `python -m rpcdataloader.launch` running on this machine?)"
    return exc.strerror or str(exc)


def is_original(host: str, port: int) -> bool:
    """Whether a server that has closed a connection without an answer is one of CEA-LIST/RPCDataloader.

    It takes the first 8 bytes for the length of a pickle, for which it has no memory. Asked to call ``bool()``, it
    answers with the number of buffers, the length of a pickle, and that pickle, which is not read here.
    """
    request = pickle.dumps((bool, (), None, False), protocol=4)
    with contextlib.suppress(OSError), socket.create_connection((host, port), PROBE_TIMEOUT) as sock:
        sock.sendall(struct.pack("L", len(request)) + request)
        answer = sock.recv(17, socket.MSG_WAITALL)
        return len(answer) == 17 and struct.unpack("LLc", answer)[::2] == (0, b"\x80")
    return False


def is_listening(path: str) -> bool:
    """Whether a server listens on a Unix socket, even one that is stuck."""
    with short_path(path) as short, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(short)
        except BlockingIOError:  # its queue is full
            return True
        except (ConnectionRefusedError, FileNotFoundError):  # the former for any file that is no socket
            return False
    return True


# Most addresses of a family that are tried.
_MAX_PROBES = 8


def first_that_listens(addresses: Mapping[int, Sequence[Any]], timeout: float) -> int | None:
    """The first family of addresses of which one takes a connection; None if none does within ``timeout`` seconds."""
    taken: set[int] = set()
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as waiting:
        for family, address in [(family, each) for family, some in addresses.items() for each in some[:_MAX_PROBES]]:
            with contextlib.suppress(OSError):  # this machine has no addresses of that family
                probe = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.setblocking(False)
                if (error := probe.connect_ex(address)) == errno.EINPROGRESS:
                    waiting.register(probe, selectors.EVENT_WRITE, family)
                elif not error:
                    taken.add(family)
        deadline = Deadline(timeout)
        while families := {key.data for key in waiting.get_map().values()}:
            # One that may still answer comes before one that has, if it is preferred.
            if next(family for family in addresses if family in taken | families) in taken:
                break
            if not (ready := waiting.select(deadline.remaining())):
                break
            for key, _events in ready:
                waiting.unregister(key.fileobj)
                if not cast(socket.socket, key.fileobj).getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    taken.add(key.data)
    return next((family for family in addresses if family in taken), None)


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """A name of ``path`` that fits into a socket address: through a descriptor of its folder, if it is too long."""
    if len(os.fsencode(path)) <= MAX_UNIX_PATH:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # perhaps it may not be read
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def is_local(address: str) -> bool:
    """Whether an IP address is one that other machines cannot reach: a loopback or link-local one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_loopback or found.is_link_local


def leads_here(name: str) -> bool:
    """Whether a host name resolves to addresses that other machines cannot reach, and to no other."""
    try:
        infos = look_up(name, 0)
    except OSError:
        return False
    return all(is_local(str(info[4][0])) for info in infos)


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
        with _alone_in(os.path.dirname(path) or "."), short_path(path) as short:
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


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Keep others out of this block that use the same folder, if it may be read and its file system has locks."""
    deadline = Deadline(LOCK_TIMEOUT)
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if deadline.pause(0.01):
                        continue
                break
        yield


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
        if exc.errno in EXHAUSTED:
            raise ConnectError(exc.strerror) from exc
        return None
    sock.settimeout(None)  # user code that was preloaded may have set a default timeout
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
