"""Starting a node server and serving with it: shared by ``launch`` and ``run_worker``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

from rpcdataloader.errors import ConnectError
from rpcdataloader.host.output import Output
from rpcdataloader.host.resources import machine_id
from rpcdataloader.host.sources import recorder
from rpcdataloader.server.node import NodeServer
from rpcdataloader.server.processes import num_threads
from rpcdataloader.server.settings import DEFAULT_PORT, ServerContext, ServerSettings
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import local_identity
from rpcdataloader.wire.connecting import is_local, listen_tcp, listen_unix, look_up
from rpcdataloader.wire.credentials import Credentials, load_credentials
from rpcdataloader.wire.register import Registration, ServerEntry

logger = logging.getLogger("rpcdataloader.server")

# Modules that clients make sessions and workers run, and that this part of the package does not use itself. Importing
# them in each worker would delay the first batch by 15 ms.
_CALLED = ("rpcdataloader.fetch.remote", "rpcdataloader.host.environment")


def run_worker(host: str, port: int) -> None:
    """Run a node server in this process until SIGTERM, SIGINT or SIGHUP, like ``python -m rpcdataloader.launch``.

    Sessions and workers are forked from this process, which should have no other threads and nothing to do afterwards:
    these signals are ignored then. It may be a daemonic ``multiprocessing.Process``.

    Args:
        host: Address or name to listen on, or ``unix:/path``.
        port: Port to listen on; 0 for any free one. Ignored for a Unix socket.

    Raises:
        ValueError: An argument is out of range.
        AuthenticationError: No usable secret is set.
        ConnectError: The port is in use, or the host is not an address of this machine.
    """
    given = DEFAULT_PORT if host.startswith("unix:") else str(port)
    run_server(ServerSettings(host=host, port=given), load_credentials(), log=Output(2))


def run_server(
    settings: ServerSettings,
    credentials: Credentials,
    *,
    ready: Callable[[str], None] = lambda _line: None,
    log: Output,
    lifeline: int | None = None,
) -> None:
    """Serve until told to stop, by SIGTERM, SIGINT or SIGHUP; they are ignored from then on.

    Args:
        ready: Function that takes the ready line once clients can connect.
        log: Log of the node server, which also gets the lines that workers print.
        lifeline: See :class:`NodeServer`.

    Raises:
        AuthenticationError: The files for TLS cannot be used.
        ConnectError: The port is in use, a host does not resolve, or the directory to register in cannot be written.
        ImportError: A module to preload is missing.
    """
    # A new connection takes three descriptors, and a worker's one: a thousand, the usual limit, is soon used up. A
    # higher limit costs nothing here; select(2), which workers or their programs may use, fails above a thousand.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tls = settings.tls
    if tls is not None:
        tls.load("server")  # each connection does so again; here errors come before anything is started
    _preload([*_CALLED, *settings.preload])
    recorder.look()  # what it has imported, however late a client comes
    listener, address = _listen(settings)
    # With --advertise, something may lead from there to a loopback address.
    is_alone = not settings.advertise and (settings.is_unix or is_local(listener.getsockname()[0]))
    made = _identity(settings)
    # Looking up versions takes milliseconds: once here instead of in every fork.
    local_identity("server")
    # A collection that visits all objects of torch takes 0.1 s, and copies 50 MB in a fork.
    gc.collect()
    gc.freeze()
    life, held = multiprocessing.Pipe(duplex=False)
    try:
        context = ServerContext(settings, credentials, settings.workers, life, log, tls=tls, open_files=soft)
        server = NodeServer(listener, context, held, lifeline)
        with server.signals.heard(), contextlib.ExitStack() as failed:
            if settings.register:
                entry = ServerEntry(
                    address, context.num_workers, context.node, os.getpid(), machine_id(), is_local=is_alone
                )
                server.registration = Registration(settings.register, entry)
                failed.callback(server.registration.close)
            if credentials.insecure and tls is None and not settings.is_unix:
                logger.warning(
                    "no secret is required: every user who reaches %s, other users of this machine included, can run "
                    "code as you",
                    address,
                )
            how = "" if tls is None else " over TLS"
            others = "; other machines cannot connect without --host" if is_alone and not settings.is_unix else ""
            bound = address if settings.is_unix else Address(*listener.getsockname()[:2])
            name = "" if bound == address else f" as {address}"
            logger.info("listening on %s%s%s, offering %d workers%s", bound, name, how, context.num_workers, others)
            ready(f"rpcdataloader ready {address} num_workers={context.num_workers} pid={os.getpid()}")
            failed.pop_all()
            server.serve()  # whose drain closes the registration
    finally:
        listener.close()
        life.close()
        held.close()
        # Another server may have taken this one's place while it drained.
        with contextlib.suppress(OSError):
            if made is not None and _identity(settings) == made:
                os.unlink(settings.unix_path)


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        before = num_threads()
        try:
            with _output_to_log():
                importlib.import_module(module)
        except ImportError as exc:
            raise ImportError(f"cannot preload {module}: {exc}") from exc
        if num_threads() > before:
            logger.warning("preloading %s started threads, which workers do not inherit and may miss", module)


@contextlib.contextmanager
def _output_to_log() -> Iterator[None]:
    """Keep what modules, C libraries and programs print off standard output, which is for the ready line alone."""
    with contextlib.ExitStack() as opened, contextlib.redirect_stdout(sys.stderr):
        if sys.__stdout__ is not None:
            before = os.dup(1)
            opened.callback(os.close, before)
            opened.callback(os.dup2, before, 1)
            os.dup2(2, 1)
        yield


def _identity(settings: ServerSettings) -> tuple[int, int, int] | None:
    """Identity of the socket file, with the time of its making, since inode numbers are reused."""
    if not settings.is_unix:
        return None
    status = os.stat(settings.unix_path)
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _listen(settings: ServerSettings) -> tuple[socket.socket, Address]:
    if settings.is_unix:
        return listen_unix(settings.unix_path), Address(path=settings.unix_path)
    advertised = settings.advertised_host()
    try:
        look_up(advertised, 0)
    except socket.gaierror as exc:
        raise ConnectError(
            f"the address for clients, {advertised}, does not resolve here ({exc.strerror}); "
            "give one that does with --advertise"
        ) from exc
    listener = listen_tcp(settings.host, settings.ports)
    return listener, Address(host=advertised, port=listener.getsockname()[1])
