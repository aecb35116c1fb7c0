"""What runs against a cluster; prints results as JSON.

``python -m tests.platform.engines.trainings NAME ray|dask ADDRESS``
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.pools import dask_pool, ray_pool


def parent_of(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Noisy(Dataset):
    """Random samples, each with the process ids of the node server and the worker that it comes from."""

    def __init__(self, length: int, pause: float = 0.0) -> None:
        self.length = length
        self.pause = pause

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.pause)
        return index, torch.randn(4), parent_of(os.getppid()), os.getpid()


def loader_of(workers: Any, length: int, pause: float = 0.0, **options: Any) -> RPCDataloader:
    generator = torch.Generator().manual_seed(7)
    return RPCDataloader(RPCDataset(workers, Noisy, length, pause), batch_size=4, generator=generator, **options)


def digest(batches: Any) -> str:
    """Of all that a batch has, but for where it comes from."""
    found = hashlib.sha256()
    for indices, values, _servers, _workers in batches:
        found.update(indices.numpy().tobytes() + values.numpy().tobytes())
    return found.hexdigest()


class Ray:
    """What a training needs of an engine."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self.pool = ray_pool

    def num_taken(self) -> int:
        """CPUs that the engine's own view shows as used."""
        return int(self._ray.cluster_resources()["CPU"] - self._ray.available_resources().get("CPU", 0))

    def kill_node_of(self, server: int) -> None:
        """Kill the node that this node server is on, as if its machine were lost."""
        actor = parent_of(server)
        for pid in parent_of(actor), actor, server:  # of the first, the raylet
            os.kill(pid, signal.SIGKILL)


class Dask:
    def __init__(self, client: Any) -> None:
        self.client = client
        self.pool = lambda *args, **options: dask_pool(client, *args, **options)

    def num_taken(self) -> int:
        return sum(self.client.run(lambda dask_worker: dask_worker.state.executing_count).values())

    def kill_node_of(self, server: int) -> None:
        worker = parent_of(server)
        for pid in worker, server:
            os.kill(pid, signal.SIGKILL)


Engine = Ray | Dask


@contextlib.contextmanager
def connect(engine: str, address: str) -> Iterator[Any]:
    if engine == "ray":
        import ray

        with ray.init(address=address, log_to_driver=False):
            yield Ray()
    else:
        from distributed import Client

        with Client(address) as client:
            yield Dask(client)


def lose_node(engine: Engine) -> Any:
    """An epoch in which a node is lost and replaced."""
    from tests.conftest import wait_until  # not in the workers, which import this module

    with engine.pool(2, 2) as workers:
        wait_until(lambda: engine.num_taken() == 4, 150)
        loader = loader_of(workers, 100_000, 0.01)
        iterator = iter(loader)
        batches = list(itertools.islice(iterator, 20))
        servers = {int(pid) for batch in batches for pid in batch[2]}
        assert len(servers) == 2
        shown = [is_shown(workers.token, pid) for server in servers for pid in (server, parent_of(server))]
        statuses = [ask_status(workers, token) for token in (workers.token, "another secret of 30 characters")]
        lost, before = min(servers), set(workers)
        engine.kill_node_of(lost)
        waits, began = [], time.monotonic()
        replaced = None
        while replaced is None or time.monotonic() < replaced + 1.0:
            asked = time.monotonic()
            batches.append(next(iterator))
            waits.append(time.monotonic() - asked)
            # A worker whose node server was killed has another parent before it ends.
            if replaced is None and any(map(is_server, {int(pid) for pid in batches[-1][2]} - servers)):
                replaced = time.monotonic()
        after = set(workers)
        wait_until(lambda: engine.num_taken() == 4, 150)
        del iterator
    wait_until(lambda: engine.num_taken() == 0, 150)
    return {
        "same": digest(batches) == digest(itertools.islice(iter(loader_of("inline", 100_000)), len(batches))),
        "longest wait": round(max(waits), 2),
        "replaced after": round(replaced - began, 1),
        "addresses": [len(before), len(after), len(before & after)],
        "secret shown": any(shown),
        "statuses": statuses,
    }


def is_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"rpcdataloader.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def is_shown(secret: str, pid: int) -> bool:
    return any(secret.encode() in Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def ask_status(workers: Any, token: str) -> int:
    """Ask the node servers from a process outside of the engine; gives its exit status."""
    environment = {**os.environ, "RPCDATALOADER_WORKERS": str(workers), "RPCDATALOADER_TOKEN": token}
    command = [sys.executable, "-m", "rpcdataloader.status"]
    return subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode


def grow(engine: Engine) -> Any:
    """A pool that takes a node which comes in the middle of an epoch: when a line has been printed."""
    with engine.pool((1, 4), 2) as workers:
        iterator = iter(loader_of([next(iter(workers)), workers], 1_000_000, 0.005))
        servers: set[int] = set()
        while len(servers) < 3:
            servers |= {int(pid) for pid in next(iterator)[2]}
        print("grow", flush=True)
        while len(servers) < 4:
            servers |= {int(pid) for pid in next(iterator)[2]}
        found = engine.num_taken()
        del iterator
    return found


def follow(engine: Engine) -> Any:
    """A pool that grows to two nodes for a loop that does nothing, and gives one back when the loop has become slow."""
    with engine.pool((1, 2), 2) as workers:
        loader = loader_of(workers, 1_000_000, 0.005, num_workers="auto")
        iterator = iter(loader)
        batches: list[Any] = []
        while engine.num_taken() < 4:
            batches += itertools.islice(iterator, 10)
        began = time.monotonic()
        while engine.num_taken() > 2:
            batches.append(next(iterator))
            time.sleep(0.1)  # a training step
        seconds = time.monotonic() - began
        del iterator
    same = digest(batches) == digest(itertools.islice(iter(loader_of("inline", 1_000_000)), len(batches)))
    return {"same": same, "seconds": round(seconds, 1)}


def end(engine: Engine) -> Any:
    """A pool whose trainer does not leave the block by itself."""
    with engine.pool(2, 2) as workers:
        loader = loader_of(workers, 1_000_000, 0.01)
        batches = list(itertools.islice(loader, 20))
        print(json.dumps(sorted({int(pid) for batch in batches for pid in batch[2]})), flush=True)
        for _batch in loader:
            pass


def fail(engine: Engine) -> Any:
    """Pools that do not come to be."""
    errors = []
    for num_cpus, options in (2, {"launch": ["--no-such-option"]}), (64, {"timeout": 1.0}):
        try:
            with engine.pool(1, num_cpus, **options):
                pass
        except Exception as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
    return errors


def load_share(workers: Any, rank: int, partition: Any = "auto") -> dict[str, Any]:
    sampler: Any = DistributedSampler(Noisy(400), 2, rank, shuffle=False)
    loader = loader_of(workers, 400, 0.005, sampler=sampler, partition=partition)
    batches = list(loader)
    return {
        "indices": [int(index) for batch in batches for index in batch[0]],
        "servers": sorted({int(pid) for batch in batches for pid in batch[2]}),
        "workers": sorted({int(pid) for batch in batches for pid in batch[3]}),
    }


def train_rank(config: dict[str, Any]) -> None:
    import ray.train
    import torch.distributed

    share = load_share(config["workers"], ray.train.get_context().get_world_rank())
    shares: list[Any] = [None, None]
    torch.distributed.all_gather_object(shares, share)
    if share is not None:
        Path(config["path"]).write_text(json.dumps(shares))


def ranks(engine: Engine) -> Any:
    """Two ranks inside of the engine, each with its share."""
    with engine.pool(2, 2) as workers:
        if isinstance(engine, Dask):
            hosts = [name for name, tasks in engine.client.processing().items() if not tasks]
            tasks = [
                engine.client.submit(load_share, workers, rank, (rank, 2), workers=[hosts[rank]], pure=False)
                for rank in range(2)
            ]
            return engine.client.gather(tasks)
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        path = Path(os.environ["HOME"]) / "shares.json"
        TorchTrainer(
            train_rank,
            train_loop_config={"workers": workers, "path": str(path)},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=os.environ["HOME"]),
        ).fit()
        return json.loads(path.read_text())


def main(name: str, engine: str, address: str) -> None:
    with connect(engine, address) as connected:
        print(json.dumps(globals()[name](connected)), flush=True)


if __name__ == "__main__":
    from tests.platform.engines import trainings  # so that classes are those of a module, wherever they are sent

    trainings.main(*sys.argv[1:])
