"""Which runs there are: links, loaders, formats and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from examples.storage_formats.errors import StudyError


@dataclass(frozen=True)
class Link:
    """What lies between workers and storage.

    Attributes:
        latency: Seconds that a request waits.
        rate: Bytes per second of one connection.
        total: Bytes per second of all connections.
    """

    latency: float
    rate: float
    total: float

    @classmethod
    def parse(cls, text: str) -> Link:
        """From ``LATENCY:RATE:TOTAL``, such as ``0.01:20e6:100e6``."""
        try:
            link = cls(*map(float, text.split(":")))
        except (TypeError, ValueError) as error:
            raise StudyError(f"a link is LATENCY:RATE:TOTAL, such as 0.01:20e6:100e6, but not {text!r}") from error
        if not (0 <= link.latency < math.inf and 0 < link.rate <= link.total < math.inf):
            raise StudyError(f"a link has a latency of 0 or more, a rate above 0 and a total no less, but not {text!r}")
        return link

    def __str__(self) -> str:
        return f"{self.latency * 1e3:g} ms, {self.rate / 1e6:g} MB/s per connection, {self.total / 1e6:g} MB/s in all"


@dataclass(frozen=True)
class Loader:
    """How samples are loaded.

    Attributes:
        kind: ``"torch"``, ``"rpc"`` (this package) or ``"tensorflow"``.
        workers: Workers of each rank; of tensorflow, parallel reads, and 0 for as many as it chooses itself.
    """

    kind: str
    workers: int

    @classmethod
    def parse(cls, text: str) -> Loader:
        kind, _, number = text.partition(":")
        if kind not in ("torch", "rpc", "tensorflow") or not number.isdecimal() or (kind == "rpc" and number == "0"):
            raise StudyError(f"a loader is torch:WORKERS, rpc:WORKERS or tensorflow:READS, but not {text!r}")
        return cls(kind, int(number))

    def __str__(self) -> str:
        if self.kind == "tensorflow":
            return f"tf.data, {self.workers or 'automatic'} reads"
        return f"{'torch' if self.kind == 'torch' else 'this loader'}, {self.workers}"


@dataclass(frozen=True)
class Format:
    """How samples are stored and read.

    Attributes:
        kind: ``"objects"`` (one by one), ``"threads"`` (all of a batch at once), ``"files"`` (objects through a mount),
            ``"webdataset"`` or ``"tfrecord"``.
        shard: Samples per shard; 0 for single objects.
    """

    kind: str
    shard: int = 0

    @classmethod
    def parse(cls, text: str) -> Format:
        kind, _, shard = text.partition("-")
        if kind in ("objects", "threads", "files") and not shard:
            return cls(kind)
        if kind in ("webdataset", "tfrecord") and shard.isdecimal() and int(shard):
            return cls(kind, int(shard))
        raise StudyError(f"a format is objects, threads, files, webdataset-SHARD or tfrecord-SHARD, but not {text!r}")

    def __str__(self) -> str:
        return f"{self.kind}-{self.shard}" if self.shard else self.kind


@dataclass(frozen=True)
class Run:
    """One measured epoch.

    Attributes:
        link: None for a storage of the user's, which is used as it is.
        ranks: Training processes.
        step: Seconds that a training step takes; 0 for no training steps.
        num_samples: Samples of the epoch, of all ranks.
    """

    link: Link | None
    ranks: int
    step: float
    loader: Loader
    format: Format
    num_samples: int = 0

    @property
    def needs_mount(self) -> bool:
        return self.format.kind == "files" or self.loader.kind == "tensorflow"

    @property
    def is_possible(self) -> bool:
        """Whether the library has a reader, and each worker a shard."""
        if self.loader.kind == "tensorflow":
            return self.format.kind == "tfrecord"
        return self.num_shards >= self.ranks * max(self.loader.workers, 1) or not self.format.shard

    @property
    def num_shards(self) -> int:
        return self.num_samples // self.format.shard if self.format.shard else 0


def multiply(links, ranks, steps, loaders, formats) -> list[Run]:
    """All combinations; ``links`` holds None for a storage of the user's."""
    return [Run(*parts) for parts in product(links, ranks, steps, loaders, formats)]


def default_runs(links: list[Link | None], shards: list[int], step: float) -> list[Run]:
    """The runs of the published table: what adds something to it, of all combinations.

    Args:
        links: The first is used for all comparisons, the others only with many workers.
        shards: The sizes of shards; the first is the one of which there are enough for 64 workers.
        step: Of the network.
    """
    sharded = [f"{kind}-{shard}" for kind in ("webdataset", "tfrecord") for shard in shards]
    few = ["objects", "threads", f"webdataset-{shards[0]}", f"tfrecord-{shards[0]}"]
    groups = [
        (links[:1], 1, step, ["torch:0", "torch:4", "torch:16", "rpc:4", "rpc:16"], ["objects", "threads", *sharded]),
        (links[:1], 1, step, ["rpc:64"], few),
        (links[:1], 1, step, ["torch:4", "torch:16"], ["files"]),
        (links[:1], 1, step, ["tensorflow:0", "tensorflow:16"], [f"tfrecord-{shard}" for shard in shards]),
        (links[:1], 1, 0.0, ["rpc:16"], ["objects", few[-1]]),
        (links[:1], 4, step, ["torch:4", "rpc:16"], few),
        (links[1:], 1, step, ["rpc:16", "rpc:64"], few),
    ]
    return [
        run
        for group_links, ranks, seconds, loaders, formats in groups
        for run in multiply(
            group_links, [ranks], [seconds], list(map(Loader.parse, loaders)), list(map(Format.parse, formats))
        )
    ]


def size_epochs(runs: list[Run], shards: list[int], per_worker: int, longest: int) -> list[Run]:
    """Give each run an epoch that is long enough for its workers, and whole for every shard size and number of ranks.

    A short epoch measures its end, at which fewer and fewer workers have something to do.
    """
    unit = math.lcm(*shards, *(run.ranks for run in runs))
    sized = []
    for run in runs:
        wanted = min(longest, per_worker * max(1, run.ranks * run.loader.workers))
        num_samples = unit * max(1, math.ceil(wanted / unit))
        sized.append(replace(run, num_samples=num_samples))
    return sized
