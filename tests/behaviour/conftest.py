"""Fixtures of the tests that need servers with options of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.plan import engine
from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.support.quick import QuickServer, quick_server
from tests.support.training import Points, collate
from tests.support.zygote import Script, Zygote


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    """No pass says that it waits or has waited, as every pass does on a busy machine, unless the test sets a limit."""
    logger = logging.getLogger("rpcdataloader.diagnosis")
    logger.setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "REPORT_AFTER", 60.0)
        yield
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def server(zygote: Zygote) -> Iterator[QuickServer]:
    """A node server with four workers, for tests that do it no harm."""
    with quick_server(zygote, "--num-workers", "4", "--max-connections", "64") as server:
        yield server


@pytest.fixture(scope="session")
def wide_servers(zygote: Zygote) -> Iterator[list[QuickServer]]:
    """Two node servers with eight workers each, for tests that do them no harm."""
    with contextlib.ExitStack() as stack:
        options = ("--num-workers", "8", "--max-connections", "64")
        yield [stack.enter_context(quick_server(zygote, *options)) for _ in range(2)]


@pytest.fixture
def serve(zygote: Zygote, clean_client: None) -> Iterator[Callable[..., QuickServer]]:  # noqa: ARG001  # ends after
    """Start node servers that end with the test: ``serve("--grace", "1", before="node.PROOF_TIMEOUT = 1")``."""
    with contextlib.ExitStack() as stack:
        yield lambda *options, before="": stack.enter_context(quick_server(zygote, *options, before=before))


_CLIENT = """
import os, sys, time
os.environ.update({})
from rpcdataloader import rpc_async
print(*rpc_async(sys.argv[1], lambda: (os.getpid(), os.getppid())).wait(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def start_client(zygote: Zygote) -> Iterator[Callable[..., tuple[Script, int, int]]]:
    """Start clients in processes of their own, with these variables; gives the script, and its worker and session."""
    scripts = []

    def start(server: QuickServer, **variables: str) -> tuple[Script, int, int]:
        script = zygote.start(_CLIENT.format(variables), server.address)
        scripts.append(script)
        wait_until(lambda: script.output.endswith("\n"), 20, "the client's first call")
        worker, session = map(int, script.output.split())
        return script, worker, session

    yield start
    for script in scripts:
        with contextlib.suppress(ProcessLookupError):
            script.kill()
        script.wait()


@pytest.fixture
def call(shared_server: QuickServer) -> Callable[..., Any]:
    """Run a function on the shared server and wait for its result."""

    def call(func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return rpc_async(shared_server.address, func, args, **options).wait()

    return call


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """A named pipe: whoever opens one end waits until somebody opens the other."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    return path


class Gone:
    """A named pipe that objects hold open, to see when the last one is gone."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # Or there would be an end of file before the first one has come.
        self._writers = [os.open(path, os.O_WRONLY)]

    def nobody_has_it(self) -> bool:
        """Whether there is no such object any more; from the first call on, this process does not count."""
        while self._writers:
            os.close(self._writers.pop())
        return bool(select.select([self._reader], [], [], 0)[0])

    def close(self) -> None:
        self.nobody_has_it()
        os.close(self._reader)


@pytest.fixture
def gone(tmp_path: Path) -> Iterator[Gone]:
    """For ``Holder`` of tests/support."""
    with contextlib.closing(Gone(tmp_path / "gone")) as found:
        yield found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Where bombs leave their trace."""
    return tmp_path / "trace"


@pytest.fixture
def workers(shared_server: QuickServer) -> str:
    return shared_server.address


@pytest.fixture
def other_secret(tmp_path: Path) -> Path:
    """A token file with another secret than that of the tests."""
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("another secret of sixteen characters")
    return path


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node servers that are not there are waited for only shortly."""
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(3 * TIMEOUT_SCALE))


@pytest.fixture(params=["RPCDataset", "ordinary dataset"])
def make_loader(request: pytest.FixtureRequest, shared_server: QuickServer) -> Callable[..., Any]:
    """Make loaders of ten samples that say where they come from, of a kind of dataset."""

    def make(**options: Any) -> Any:
        options = {"batch_size": 3, "collate_fn": collate, **options}
        if request.param == "RPCDataset":
            return RPCDataloader(RPCDataset(shared_server.address, Points, 10), **options)
        return RPCDataloader(Points(10), workers=shared_server.address, **options)

    return make


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address where no server listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield "{}:{}".format(*sock.getsockname())


@pytest.fixture
def silent_port() -> Iterator[str]:
    """An address where packets are dropped, as by a firewall: of a listener whose queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield "{}:{}".format(*listener.getsockname())


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Make this process a rank, as launchers do."""

    def become(rank: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return become
