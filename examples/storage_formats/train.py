"""A training process, started by torchrun: measures runs one after the other, and prints a line of JSON for each.

``python -m torch.distributed.run -m examples.storage_formats.train FILE``, where FILE holds a :class:`Job` as JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from examples.storage_formats.errors import SampleError, UnavailableError
from examples.storage_formats.network import Network, calibrate, take_step
from examples.storage_formats.plan import Format, Link, Loader, Run
from examples.storage_formats.readers import Sample, make_dataset
from examples.storage_formats.samples import Manifest
from examples.storage_formats.storage import Location
from rpcdataloader import RPCDataloader, RPCDataset


@dataclass(frozen=True)
class Job:
    """Runs of one storage and number of ranks.

    Attributes:
        location: Where the samples are.
        manifest: What is there.
        runs: What to measure.
        workers: Addresses of node servers.
        batch_size: Samples per batch and rank.
        mount: Folder of the bucket, if a run needs one.
    """

    location: Location
    manifest: Manifest
    runs: list[Run]
    workers: list[str]
    batch_size: int
    mount: str | None = None

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        data = json.loads(text)
        return cls(
            **{
                **data,
                "location": Location(**data["location"]),
                "manifest": Manifest(**data["manifest"]),
                "runs": [load_run(run) for run in data["runs"]],
            }
        )


def load_run(data: dict[str, Any]) -> Run:
    link = data["link"] and Link(**data["link"])
    return Run(**{**data, "link": link, "loader": Loader(**data["loader"]), "format": Format(**data["format"])})


@dataclass
class Result:
    """What a run was like.

    Attributes:
        seconds: From the call of ``iter`` to the end of the last step of the last rank.
        samples_per_second: Of all ranks.
        waiting: Share of the time in which the ranks waited for the loader.
        reads: Samples that were being read, on average; None where the reader does not tell.
        measured_step: Seconds that a step took, on average.
    """

    seconds: float
    samples_per_second: float
    waiting: float
    reads: float | None
    measured_step: float


def main(path: str) -> None:
    job = Job.loads(Path(path).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    depths: dict[float, int] = {}
    for run in job.runs:
        if run.step and run.step not in depths:
            # One of them, and not each for itself: the ranks have the same network.
            depth = torch.tensor(calibrate(run.step, job.batch_size) if dist.get_rank() == 0 else 0)
            dist.broadcast(depth, 0)
            depths[run.step] = int(depth)
        result = measure(job, run, depths.get(run.step, 0))
        if dist.get_rank() == 0:
            print(json.dumps(asdict(result)), flush=True)
    dist.destroy_process_group()


def measure(job: Job, run: Run, depth: int) -> Result:
    """Run one epoch, and check that all its samples came."""
    batches = make_loader(job, run)
    seen: list[int] = []
    waited = read = stepped = 0.0
    num_steps = 0
    dist.barrier()
    begin = asked = time.perf_counter()
    with training(depth) as step:
        for sample in batches:
            waited += time.perf_counter() - asked
            labels = sample.label.tolist()
            for image, label in zip(sample.image.numpy(), labels, strict=True):
                if not job.manifest.check_image(label, image):
                    raise SampleError(f"sample {label} came with an image whose checksum is wrong: {run}")
            seen += labels
            read += float(sample.seconds.sum())
            stepping = time.perf_counter()
            step(sample)
            num_steps += 1
            asked = time.perf_counter()
            stepped += asked - stepping
            del sample  # its memory is for the next one
    seconds = gather(time.perf_counter() - begin)
    check_samples(run, job.manifest.number, list(chain.from_iterable(gather(seen))))
    return Result(
        seconds=max(seconds),
        samples_per_second=run.num_samples / max(seconds),
        waiting=sum(gather(waited)) / sum(seconds),
        reads=None if math.isnan(read) else sum(gather(read)) / max(seconds),
        measured_step=sum(gather(stepped)) / sum(gather(num_steps)),
    )


def make_loader(job: Job, run: Run) -> Iterable[Sample]:
    if run.loader.kind == "tensorflow":
        from examples.storage_formats.tensorflow_reader import read_batches

        keys = islice(cycle(job.manifest.shard_keys(run.format)), run.num_shards)
        paths = [f"{job.mount}/{job.location.prefix}{key}" for key in keys]
        return read_batches(paths, dist.get_rank(), run.ranks, job.batch_size, run.loader.workers)
    what = (job.location, job.manifest, run.format, run.num_samples, job.mount)
    # Shards are split by their readers.
    indices: Any = range(run.num_samples)
    sampler: DistributedSampler | None = None if run.format.shard else DistributedSampler(indices)
    options: dict[str, Any] = {"batch_size": job.batch_size, "sampler": sampler, "num_workers": run.loader.workers}
    if run.loader.kind == "torch":
        return DataLoader(make_dataset(*what), **options)
    if sampler is not None:  # a stream cannot be asked again
        options["retry_on"] = UnavailableError
    return RPCDataloader(RPCDataset(job.workers, make_dataset, *what), **options)


@contextlib.contextmanager
def training(depth: int) -> Iterator[Callable[[Sample], None]]:
    """Gives a function that takes a step, or does nothing without a depth; ranks may take different numbers of them."""
    if not depth:
        yield lambda _: None
        return
    model = DistributedDataParallel(Network(depth))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with model.join():
        yield lambda sample: take_step(model, optimizer, sample.image, sample.label)


def check_samples(run: Run, stored: int, seen: list[int]) -> None:
    """All samples of the epoch, and no other, have come to one rank or another."""
    wanted, got = Counter(index % stored for index in range(run.num_samples)), Counter(seen)
    if wanted != got:
        missing, unexpected = sorted((wanted - got).elements()), sorted((got - wanted).elements())
        raise SampleError(
            f"{len(missing)} samples did not come {missing[:10]}, and {len(unexpected)} came more often than they "
            f"should {unexpected[:10]}: {run}"
        )


def gather(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Exception as error:
        # The command shows the first of them; torchrun's own report is about exit statuses.
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        raise
