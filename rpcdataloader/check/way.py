"""The way to a first batch from a node server, step by step, up to the first that fails.

All steps are those of a training script: the same connections, secret and certificates, and a session with the script's
folder and modules. Each has a limit of seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rpcdataloader.client.discovery import ask_status
from rpcdataloader.client.rpc import rpc_async
from rpcdataloader.errors import AuthenticationError, RemoteProtocolError, RPCError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import is_local, look_up
from rpcdataloader.wire.credentials import client_credentials
from rpcdataloader.wire.handshake import TlsError, UnavailableError
from rpcdataloader.wire.status import NodeStatus
from rpcdataloader.wire.tls import client_tls
from rpcdataloader.wire.transport import Deadline

# Seconds for a name server, for a connection with its handshake, and for a session, which may have to import torch.
_RESOLVE_TIMEOUT, _ASK_TIMEOUT, _SESSION_TIMEOUT = 5.0, 5.0, 60.0

# Bytes to measure a link with: enough to fill its buffers, and no more than a slow one carries in seconds.
_FIRST_BYTES, _MOST_BYTES, _SECONDS = 1 << 20, 256 << 20, 0.5


class Failure(Exception):
    """A question failed, and those after it cannot be asked; the arguments are its name, and what to say."""


class Step(NamedTuple):
    """An answer."""

    level: str  # ``ok``, ``note`` or ``FAILED``
    name: str
    text: str
    num_workers: int = 0  # that the node offers; of the step ``room``


class Place(NamedTuple):
    """What a session has of the script."""

    has_folder: bool
    file: str | None  # of the module; None if it is not found
    digest: str | None  # of that file
    error: str | None  # why it cannot be looked for


def take(address: Address, module: str | None) -> Iterator[Step]:
    """Take all steps to a node server, up to the first that fails.

    Args:
        module: Name of the dataset's module; None to look for none.
    """
    try:
        yield from _resolve(address)
        status, text, differences = _ask(address)
        yield Step("ok", "server", text)
        yield from (Step("note", "versions", difference) for difference in differences)
        yield _look_at_room(status)
        yield from _look_at_session(address, module)
    except Failure as failure:
        yield Step("FAILED", *failure.args)


def _resolve(address: Address) -> Iterator[Step]:
    if address.is_unix:
        return
    found: list[Any] = []

    def resolve() -> None:
        try:
            found.append(sorted({str(info[4][0]) for info in look_up(address.host, address.port)}))
        except OSError as error:
            found.append(error)

    # Not joined at the end: what resolves names cannot be interrupted.
    thread = threading.Thread(target=resolve, name="rpcdl-check", daemon=True)
    thread.start()
    thread.join(_RESOLVE_TIMEOUT)
    if not found:
        raise Failure("name", f"no name server has told within {_RESOLVE_TIMEOUT:g} s where {address.host} is")
    (addresses,) = found
    if isinstance(addresses, OSError):
        why = addresses.strerror or str(addresses)
        raise Failure("name", f"{address.host} does not resolve ({why}): is it spelled right, and known here?")
    if addresses == [address.host]:
        return
    level, more = "ok", ""
    if all(map(is_local, addresses)) and address.host != "localhost":
        level, more = "note", ", which is this machine itself, for other machines, too: see /etc/hosts"
    yield Step(level, "name", f"{address.host} is {' and '.join(addresses)}{more}")


def _ask(address: Address) -> tuple[NodeStatus, str, list[str]]:
    """Its status, what it is in words, and which of its versions differ."""
    try:
        credentials, tls = client_credentials(address), client_tls()
    except (RPCError, ValueError) as error:
        raise Failure("secret", str(error)) from None
    try:
        status, channel = ask_status(address, credentials, tls, Deadline(_ASK_TIMEOUT))
    except TlsError as error:
        raise Failure("TLS", str(error)) from None
    except AuthenticationError as error:
        raise Failure("TLS" if isinstance(error.__cause__, TlsError) else "secret", str(error)) from None
    except UnavailableError as error:
        raise Failure("room", str(error)) from None
    except RemoteProtocolError as error:
        raise Failure("versions" if " on both sides" in str(error) else "program", str(error)) from None
    except (RPCError, TimeoutError) as error:
        raise Failure("port" if str(error).startswith("cannot connect") else "program", str(error)) from None
    peer, how = channel.peer, "with TLS" if tls is not None and not address.is_unix else "without TLS"
    text = f"rpcdataloader {peer.rpcdataloader}, Python {peer.python_version}, torch {peer.torch}, {how}"
    return status, text, channel.differences


def _look_at_room(status: NodeStatus) -> Step:
    used = sum(len(client.workers) for client in status.clients)
    if status.max_connections is not None and used >= status.max_connections:
        holders = ", ".join(sorted({f"{client.host} (process {client.pid})" for client in status.clients}))
        raise Failure("room", f"all {status.max_connections} connections are in use, by {holders}")
    text = (
        f"{status.num_workers} workers on {status.cpus} CPUs with a load of {status.load_average:.1f}; {used} "
        f"connections in use; {status.memory_available_bytes / 1e9:.1f} GB of memory free"
    )
    more = "; other programs keep it busy" if status.load_average > status.cpus else ""
    return Step("ok", "room", text + more, status.num_workers)


def _call(address: Address, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a function of this package returns there."""
    try:
        return rpc_async(str(address), function, args, timeout=_SESSION_TIMEOUT).wait()
    except Exception as error:
        raise Failure(name, f"{type(error).__name__}: {error}") from None


def look_around(folder: str, module: str | None) -> Place:
    """What this process, a worker, has of the script."""
    file = digest = error = None
    if module is not None:
        try:
            spec = importlib.util.find_spec(module)
            file = spec.origin if spec else None
        except Exception as exc:  # a package above it fails to import
            error = f"{type(exc).__name__}: {exc}"
        if file and os.path.isfile(file):
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return Place(os.path.isdir(folder), file, digest, error)


def _look_at_session(address: Address, module: str | None) -> Iterator[Step]:
    folder, start = os.getcwd(), time.perf_counter()
    there: Place = _call(address, "session", look_around, folder, module)
    yield Step("ok", "session", f"a worker answers after {time.perf_counter() - start:.1f} s")
    if not there.has_folder:
        yield Step("note", "folder", f"{folder} is not there: relative paths lead nowhere")
    if module is None:
        return
    here = look_around(folder, module)
    remedy = "put it on a file system that both see, install it there, or give the loader py_modules"
    if there.error is not None:
        raise Failure("module", f"{module} cannot be imported there ({there.error}): {remedy}")
    if there.file is None:
        more = f"; here it is {here.file}: {remedy}" if here.file else ", nor here: is the name right?"
        raise Failure("module", f"{module} is not there{more}")
    if here.digest and here.digest != there.digest:
        yield Step("note", "module", f"{module} is another file there: {there.file}, and {here.file} here")
    else:
        yield Step("ok", "module", f"{module} is {there.file}")


def make_bytes(size: int) -> torch.Tensor:
    """A tensor of ``size`` bytes in memory of its own, not the kernel's page of zeros."""
    return torch.ones(size, dtype=torch.uint8)


def measure_link(address: Address) -> float:
    """Bytes per second that a worker there can send to this process.

    Raises:
        Failure: It does not answer.
    """
    size = _FIRST_BYTES
    while True:
        start = time.perf_counter()
        _call(address, "link", make_bytes, size)
        seconds = time.perf_counter() - start
        if seconds >= _SECONDS or size >= _MOST_BYTES:
            return size / seconds
        size = min(_MOST_BYTES, max(4 * size, int(size * _SECONDS / seconds)))
