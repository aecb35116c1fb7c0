"""One rank of a training job: goes through its loaders in turn, and notes every batch."""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DistributedSampler

from rpcdataloader import RPCDataloader, RPCDataset
from tests.chaos.datasets import Images, Records, StatefulRecords, Traps


@dataclass(frozen=True)
class Job:
    """What a trainer is told."""

    folder: str  # for what trainers write, and the file ``stop``: with it, they end after the epoch
    traps: str  # folder
    workers: str  # for the map-style dataset: addresses, or a register
    stream_workers: str  # for the iterable-style one: addresses, as their number belongs to what it delivers
    world_size: int = 1
    rank: int = 0
    seed: int = 0
    images: int = 480  # samples of the map-style dataset in each epoch, of all ranks
    records: int = 240  # samples of the iterable-style one; 0 to leave it out
    batch_size: int = 4
    seconds: float = 0.005  # time that a sample takes to load
    num_epochs: int = 10**9
    task_timeout: float | None = 2.0  # for workers that hang
    max_retries: int = 20  # the adversary may well come across the same batch three times
    persistent_workers: bool = False
    stateful: bool = False

    def of_rank(self, rank: int) -> Job:
        return replace(self, rank=rank)

    @property
    def notes(self) -> Path:
        """Where it notes batches."""
        return Path(self.folder, f"rank{self.rank}")

    def source(self) -> str:
        """A script that does it."""
        return f"from tests.chaos.trainer import Job, train\ntrain(Job(**{asdict(self)!r}))\n"


def digest(batch: dict[str, Any]) -> str:
    """Of the names, types, shapes and bits."""
    found = hashlib.sha256()
    for name, value in batch.items():
        found.update(f"{name} {value.dtype} {tuple(value.shape)} {value.stride()} ".encode())
        found.update(value.numpy().tobytes())
    return found.hexdigest()[:24]


def make_loaders(job: Job) -> dict[str, RPCDataloader[Any]]:
    options: dict[str, Any] = {
        "batch_size": job.batch_size,
        "task_timeout": job.task_timeout,
        "persistent_workers": job.persistent_workers,
        "max_retries": job.max_retries,
        "reconnect_timeout": 60,
    }
    traps = Traps(Path(job.traps))
    images = RPCDataset(job.workers, Images, job.images, job.seconds, traps)
    sampler: DistributedSampler[Any] = DistributedSampler(images, job.world_size, job.rank, seed=job.seed)
    generator = torch.Generator().manual_seed(job.seed)
    loaders = {"images": RPCDataloader(images, sampler=sampler, generator=generator, **options)}
    if job.records:
        kind = StatefulRecords if job.stateful else Records
        records = RPCDataset(job.stream_workers, kind, job.records, job.seconds, traps)
        generator = torch.Generator().manual_seed(job.seed + 1)
        loaders["records"] = RPCDataloader(records, num_workers=2, generator=generator, **options)
    return loaders


def batches(job: Job) -> Iterator[tuple[str, int, int, Any]]:
    """Name of the loader, epoch, number, batch."""
    loaders = make_loaders(job)
    for epoch in range(job.num_epochs):
        loaders["images"].sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for name, loader in loaders.items():
            for number, batch in enumerate(loader):
                yield name, epoch, number, batch
        if agree(job, os.path.exists(f"{job.folder}/stop")):
            return


def agree(job: Job, flag: bool) -> bool:
    """Whether rank 0 says so; as long as a step of training, all ranks wait for each other."""
    if job.world_size == 1:
        return flag
    agreed = torch.tensor(float(flag and job.rank == 0))
    torch.distributed.all_reduce(agreed)
    return bool(agreed)


def train(job: Job) -> None:
    """Until the number of epochs is reached, or somebody asks for the end."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(name)s %(message)s")
    os.environ["RPCDATALOADER_CONNECT_TIMEOUT"] = "5"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if job.world_size > 1:
        rendezvous = f"file://{job.folder}/rendezvous"
        torch.distributed.init_process_group("gloo", rendezvous, rank=job.rank, world_size=job.world_size)
    with open(job.notes, "w", buffering=1) as notes:
        for name, epoch, number, batch in batches(job):
            now = time.monotonic()
            samples = ",".join(map(str, batch["id"].tolist()))
            notes.write(f"{now:.4f} {name} {epoch} {number} {digest(batch)} {samples}\n")
            agree(job, False)
    if job.world_size > 1:
        torch.distributed.destroy_process_group()
