"""rpcdataloader: dataset loading and preprocessing on other machines, behind torch's ``DataLoader``.

Names are imported on first use: the node server sets up its environment before torch is imported.
"""

from __future__ import annotations

import os
import sys

# ``python -m rpcdataloader.launch`` has put the current folder first in the path. Nothing is imported from there before
# it is judged (``search_current_folder``), not even what follows; the two above are there when Python starts.
if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv and sys.orig_argv[-1] != "-m":
    _module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    if _module.partition(".")[0] == __name__:
        sys.path[:] = [entry for entry in sys.path if entry != os.getcwd()]

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpcdataloader.client.rpc import rpc_async
    from rpcdataloader.client.worker import RRef
    from rpcdataloader.diagnosis.verdict import Diagnosis
    from rpcdataloader.fetch.seeding import get_sample_seed, set_random_seeds
    from rpcdataloader.loader.costs import CostBatchSampler, measure_costs
    from rpcdataloader.loader.dataloader import RPCDataloader
    from rpcdataloader.loader.dataset import RPCDataset
    from rpcdataloader.loader.sampler import ResumableDistributedSampler
    from rpcdataloader.server.run import run_worker

__version__ = "0.1.0"

__all__ = [
    "CostBatchSampler",
    "Diagnosis",
    "RPCDataloader",
    "RPCDataset",
    "RRef",
    "ResumableDistributedSampler",
    "__version__",
    "get_sample_seed",
    "measure_costs",
    "rpc_async",
    "run_worker",
    "set_random_seeds",
]

# Before the script changes anything in its modules.
importlib.import_module("rpcdataloader.host.sources").watch("rpcdataloader.host.snapshots")

_MODULES = {
    "CostBatchSampler": "rpcdataloader.loader.costs",
    "Diagnosis": "rpcdataloader.diagnosis.verdict",
    "RPCDataloader": "rpcdataloader.loader.dataloader",
    "RPCDataset": "rpcdataloader.loader.dataset",
    "RRef": "rpcdataloader.client.worker",
    "ResumableDistributedSampler": "rpcdataloader.loader.sampler",
    "get_sample_seed": "rpcdataloader.fetch.seeding",
    "measure_costs": "rpcdataloader.loader.costs",
    "rpc_async": "rpcdataloader.client.rpc",
    "run_worker": "rpcdataloader.server.run",
    "set_random_seeds": "rpcdataloader.fetch.seeding",
}


def _name_package(record: logging.LogRecord) -> bool:
    """Name the package in messages of a script without logging, where Python prints warnings bare."""
    if not logging.getLogger(record.name).hasHandlers():
        record.msg = f"rpcdataloader: {record.msg}"
    return True


# A logger's filters see no records of the loggers below it.
for _name in ("client", "loader", "pools", "server", "worker"):
    logging.getLogger(f"rpcdataloader.{_name}").addFilter(_name_package)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        text = f"module {__name__!r} has no attribute {name!r}"
        if meant := next((other for other in _MODULES if other.lower() == name.lower()), None):
            # An import statement replaces an AttributeError by words of its own, without advice before Python 3.12.
            raise ImportError(f"{text}: write {meant}")
        raise AttributeError(text)
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
