"""The contestants: how each one is served (in the harness) and built (in the trainer).

Imports of contestants are inside functions: two of them have the same name, and the harness needs neither.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .original import install
from .processes import PACKAGE, read_line, running
from .workloads import WORKLOADS

NUM_WORKERS = 2
_NUM_READY = 4
_START_TIMEOUT = 60.0
_TESTS = Path(__file__).resolve().parent.parent
_REPOSITORY = _TESTS.parent

# In the order of the rounds, with what tables call them.
LOADERS = {
    "ours-tcp": "ours, TCP",
    "ours-local": "ours, this machine",
    "torch": "torch DataLoader",
    "torch-malloc": "torch, malloc as in ours",
    "original": "original 0.2.1",
    "bare": "bare sockets",
    "bare-made": "bare sockets, batches made",
    "ready": "list of ready batches",
}

# For glibc, what our workers choose in their process (``keep_freed_memory``): it keeps freed memory.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


@contextlib.contextmanager
def environment(loader: str = "") -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with a secret while it lasts, and the environment of a loader's servers and trainer."""
    package = install(_REPOSITORY / ".bench") if loader == "original" else _REPOSITORY
    with tempfile.TemporaryDirectory(prefix="rpcdl-bench-") as folder:
        token = Path(folder, "token")
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe(32))
        yield (
            Path(folder),
            {
                **{name: value for name, value in os.environ.items() if not name.startswith("RPCDATALOADER_")},
                "PYTHONPATH": f"{package}{os.pathsep}{_TESTS}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "RPCDATALOADER_TOKEN_FILE": str(token),
                **(_MALLOC if loader == "torch-malloc" else {}),
            },
        )


@contextlib.contextmanager
def run_servers(module: str, args: Sequence[str], count: int, env: dict[str, str], folder: Path) -> Iterator[list[str]]:
    """Run so many times a module of this package that tells its address when it is ready; gives these."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(running(f"{PACKAGE}.{module}", args, env, folder)) for _ in range(count)]
        yield [read_line(child, "ready ", _START_TIMEOUT) for child in children]


@contextlib.contextmanager
def node_server(num_workers: int, env: dict[str, str], folder: Path, *host: str) -> Iterator[tuple[str, int]]:
    """Run one of ours on a free port, or at these options; gives its address and its process."""
    args = ["--num-workers", str(num_workers), "--log-level", "warning", *(host or ("--port", "0"))]
    with running("rpcdataloader.launch", args, env, folder) as server:
        yield read_line(server, "rpcdataloader ready ", _START_TIMEOUT).split()[0], server.pid


@contextlib.contextmanager
def serve(loader: str, workload: str, num_workers: int, env: dict[str, str], folder: Path) -> Iterator[list[str]]:
    """Run the servers of a loader, if it has any; gives their addresses."""
    with contextlib.ExitStack() as stack:
        if loader.startswith("ours-unix"):
            yield [stack.enter_context(node_server(num_workers, env, folder, "--host", f"unix:{folder}/ours"))[0]]
        elif loader.startswith("ours") and loader != "ours-local":
            yield [stack.enter_context(node_server(num_workers, env, folder))[0]]
        elif loader.startswith("bare"):
            args = [workload, "made" if loader == "bare-made" else "ready"]
            yield stack.enter_context(run_servers("bare", args, num_workers, env, folder))
        elif loader == "original":
            yield stack.enter_context(run_servers("original", [], num_workers, env, folder))
        else:
            yield []


def build(loader: str, name: str, addresses: list[str]) -> Iterable[Any]:
    """Return what the trainer iterates over.

    Args:
        name: Of the workload.
        addresses: Of the servers.
    """
    from torch.utils.data import DataLoader, Subset

    from . import datasets
    from .bare import receive

    workload = WORKLOADS[name]
    factory = getattr(datasets, workload.dataset)
    options: dict[str, Any] = {"batch_size": workload.batch_size}
    if workload.collate is not None:
        options["collate_fn"] = getattr(datasets, workload.collate)
    if loader.startswith("torch"):
        return DataLoader(factory(*workload.args), num_workers=NUM_WORKERS, **options)
    if loader == "ready":  # each is handed out again and again: a loader that costs nothing
        dataset = Subset(factory(*workload.args), range(_NUM_READY * workload.batch_size))
        return itertools.cycle(list(DataLoader(dataset, **options)))
    if loader.startswith("bare"):
        return receive(addresses, workload.batch_bytes)
    # Not by an import statement, which type checkers would take to mean the package of this repository.
    package: Any = importlib.import_module("rpcdataloader")
    if hasattr(package, "Diagnosis") == (loader == "original"):
        raise ImportError(f"{package.__file__} is the wrong package of two with this name")
    if loader.startswith("ours"):
        options["num_workers"] = NUM_WORKERS
    if loader == "ours-local":
        return package.RPCDataloader(factory(*workload.args), **options)
    return package.RPCDataloader(package.RPCDataset(addresses, factory, *workload.args), **options)
