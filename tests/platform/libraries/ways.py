"""The ways to load a dataset: each in a process of its own, whose threads and open files are those of that way alone.

``main("of_polars", "Groups", "torch fork", SOURCE, ADDRESS, LIMIT)``, of a script, for where multiprocessing starts
processes that run it again. It prints the batches of two epochs, as JSON; a batch that takes ``LIMIT`` seconds is an
error.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import sys

import torch
from torch.utils.data import DataLoader

from rpcdataloader import RPCDataloader, RPCDataset


def loader_of(way, dataset, source, address, **options):
    """A loader of ``dataset(source)``."""
    match way.split():
        case "torch", method:
            return DataLoader(dataset(source), num_workers=2, multiprocessing_context=method, **options)
        case "instance", "node":
            return RPCDataloader(dataset(source), workers=address, **options)
        case "instance", method:
            return RPCDataloader(dataset(source), num_workers=2, multiprocessing_context=method, **options)
        case "built", "node":
            return RPCDataloader(RPCDataset(address, dataset, source), **options)
        case "built", "workers":
            return RPCDataloader(RPCDataset(address, dataset, source, build="worker"), **options)
    raise ValueError(way)


def main(module, name, way, source, address, limit):
    """Print the batches."""
    torch.set_num_threads(2)  # as in a training
    multiprocessing.set_forkserver_preload(["rpcdataloader.loader.dataloader"])  # or each process would import torch
    dataset = getattr(importlib.import_module(f"tests.platform.libraries.{module}"), name)
    loader = loader_of(way, dataset, source, address, batch_size=4, timeout=float(limit))
    logging.getLogger("rpcdataloader.diagnosis").setLevel("ERROR")  # it may have waited
    json.dump([_plain(batch) for _epoch in range(2) for batch in loader], sys.stdout)


def _plain(batch):
    """A batch as lists, whose numbers are exact."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), batch.tolist()
    return [_plain(part) for part in batch]
