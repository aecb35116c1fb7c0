"""The contestants: how each one is served (in the harness) and built (in the trainer).

Imports of contestants are inside functions: two of them have the same name, and the harness needs neither.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .original import install
from .processes import PACKAGE, running
from .workloads import WORKLOADS, Workload

NUM_WORKERS = 2
_NUM_READY = 4
_START_TIMEOUT = 60.0
_TESTS = Path(__file__).resolve().parent.parent
_REPOSITORY = _TESTS.parent

Servers = contextlib.AbstractContextManager[list[str]]


@dataclass(frozen=True, slots=True)
class Loader:
    """One contestant.

    Attributes:
        title: For the table.
        serve: Starts its servers; entered, gives their addresses. Takes workload, environment, folder for files.
        build: Called in the trainer with workload and addresses; returns what the trainer iterates over.
        find: Finds its package, and may fetch it first.
        loads: Whether it loads anything; otherwise its rate means nothing, and only its busy trainer is shown.
    """

    title: str
    serve: Callable[[Workload, dict[str, str], Path], Servers]
    build: Callable[[Workload, list[str]], Iterable[Any]]
    find: Callable[[], Path] = lambda: _REPOSITORY
    loads: bool = True

    def make_environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of its servers and its trainer; ``folder`` holds the secret."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("RPCDATALOADER_")}
        env["PYTHONPATH"] = f"{self.find()}{os.pathsep}{_TESTS}"
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        token = folder / "token"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(secrets.token_urlsafe(32))
        env["RPCDATALOADER_TOKEN_FILE"] = str(token)
        return env


@contextlib.contextmanager
def run_servers(module: str, args: Sequence[str], count: int, env: dict[str, str], folder: Path) -> Iterator[list[str]]:
    """Run so many times a module of this package that tells its address when it is ready; gives these."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(running(f"{PACKAGE}.{module}", args, env, folder)) for _ in range(count)]
        yield [child.read_line("ready ", _START_TIMEOUT).split()[0] for child in children]


def _get_workload(workload: Workload) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class of the dataset and the arguments of the loader."""
    from . import datasets

    arguments: dict[str, Any] = {"batch_size": workload.batch_size}
    if workload.collate is not None:
        arguments["collate_fn"] = getattr(datasets, workload.collate)
    return getattr(datasets, workload.dataset), arguments


@contextlib.contextmanager
def node_server(num_workers: int, env: dict[str, str], folder: Path, *host: str) -> Iterator[tuple[str, int]]:
    """Run one of ours on a free port, or at these options; gives its address and its process."""
    args = ["--num-workers", str(num_workers), *(host or ("--port", "0"))]
    with running("rpcdataloader.launch", args, env, folder) as server:
        yield server.read_line("rpcdataloader ready ", _START_TIMEOUT).split()[0], server.pid


@contextlib.contextmanager
def _serve_ours(_workload: Workload, env: dict[str, str], folder: Path) -> Iterator[list[str]]:
    with node_server(NUM_WORKERS, env, folder) as (address, _pid):
        yield [address]


@contextlib.contextmanager
def _serve_ours_here(_workload: Workload, env: dict[str, str], folder: Path) -> Iterator[list[str]]:
    with node_server(NUM_WORKERS, env, folder, "--host", f"unix:{folder}/ours") as (address, _pid):
        yield [address]


def _build_ours(workload: Workload, addresses: list[str]) -> Iterable[Any]:
    from rpcdataloader import RPCDataloader, RPCDataset

    factory, arguments = _get_workload(workload)
    dataset = RPCDataset(addresses, factory, *workload.args)
    return RPCDataloader(dataset, num_workers=NUM_WORKERS, **arguments)


def _serve_nobody(_workload: Workload, _env: dict[str, str], _folder: Path) -> Servers:
    return contextlib.nullcontext([])


def _build_torch(workload: Workload, _addresses: list[str]) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    factory, arguments = _get_workload(workload)
    return DataLoader(factory(*workload.args), num_workers=NUM_WORKERS, **arguments)


def _serve_original(_workload: Workload, env: dict[str, str], folder: Path) -> Servers:
    return run_servers("original", [], NUM_WORKERS, env, folder)


def _build_original(workload: Workload, addresses: list[str]) -> Iterable[Any]:
    # Not by an import statement, which type checkers would take to mean the package of this repository.
    rpcdataloader: Any = importlib.import_module("rpcdataloader")
    if hasattr(rpcdataloader, "errors") or not hasattr(rpcdataloader, "rpc"):
        raise ImportError(f"{rpcdataloader.__file__} is not the original")
    factory, arguments = _get_workload(workload)
    dataset = rpcdataloader.RPCDataset(addresses, factory, *workload.args)
    return rpcdataloader.RPCDataloader(dataset, **arguments)


def _serve_bare(mode: str) -> Callable[[Workload, dict[str, str], Path], Servers]:
    def serve(workload: Workload, env: dict[str, str], folder: Path) -> Servers:
        (name,) = (name for name, known in WORKLOADS.items() if known is workload)
        return run_servers("bare_sender", [name, mode], NUM_WORKERS, env, folder)

    return serve


def _build_bare(workload: Workload, addresses: list[str]) -> Iterable[Any]:
    from .bare import BareLoader

    return BareLoader(addresses, workload.batch_bytes)


def _build_ready(workload: Workload, _addresses: list[str]) -> Iterable[Any]:
    """Batches that were made beforehand, each handed out again and again: a loader that costs nothing."""
    from torch.utils.data import DataLoader, Subset

    factory, arguments = _get_workload(workload)
    dataset = Subset(factory(*workload.args), range(_NUM_READY * workload.batch_size))
    return itertools.cycle(list(DataLoader(dataset, **arguments)))


def _find_original() -> Path:
    return install(_REPOSITORY / ".bench")


# In the order of the rounds.
LOADERS = {
    "ours-tcp": Loader("ours, TCP", _serve_ours, _build_ours),
    "ours-unix": Loader("ours, Unix socket", _serve_ours_here, _build_ours),
    "torch": Loader("torch DataLoader", _serve_nobody, _build_torch),
    "original": Loader("original 0.2.1", _serve_original, _build_original, find=_find_original),
    "bare": Loader("bare sockets", _serve_bare("ready"), _build_bare),
    "bare-made": Loader("bare sockets, batches made", _serve_bare("made"), _build_bare),
    "ready": Loader("list of ready batches", _serve_nobody, _build_ready, loads=False),
}
