"""Measure what each part of the example gains, and print it as Markdown tables.

::

    python -m examples.recommender.measure                    # about 6 minutes on 2 cores
    python -m examples.recommender.measure --device cuda      # on a GPU, also with 1,000 features
    torchrun --nproc-per-node 2 -m examples.recommender.measure --parts overlap
    python -m tests.benchmark.link --overlap                  # the same over a link of known speed, as root

**loading**: batches of a file with 1,000 sparse features, in both forms, from this package's loader and from torch's,
each with two workers. A batch is received, and on a GPU copied there, and nothing is done with it.

**passes**: the same model before and after each pass, and compiled. A step is forward, backward and Adam, on a GPU with
the copies of its inputs. *Kernels* are those of a forward and a backward pass: on a GPU as torch.profiler counts them,
on a CPU calls of operators, those inside of others included, and of compiled loops.

**overlap**: two ranks with half of the tables each, with and without ``overlap_all_to_all``.

Measurements are interleaved, so that a machine that slows down slows all of them down. Figures are medians of the
rounds; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, RandomSampler

from rpcdataloader import RPCDataloader, RPCDataset

from . import data, passes, sharding
from .loading import ParquetRows, as_combined, as_dict
from .model import Recommender, trace
from .trainer import Ranks

Table = list[list[str]]


def print_table(header: list[str], rows: Table) -> None:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines), end="\n\n", flush=True)


def compare(actions: dict[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, float]]:
    """Let actions take turns; returns the median of each, and of its ratio to that of the first in the same round."""
    found = {name: [action()] for name, action in actions.items()}
    for _ in range(rounds - 1):
        for name, action in actions.items():
            found[name].append(action())
    first = next(iter(found.values()))
    return {
        name: (statistics.median(values), statistics.median(a / b for a, b in zip(values, first, strict=True)))
        for name, values in found.items()
    }


def measure_loading(args: argparse.Namespace, device: torch.device) -> None:
    """Print batches per second and the trainer's CPU time for both loaders and both forms."""
    with tempfile.TemporaryDirectory(prefix="recommender-") as folder:
        path = os.path.join(folder, "rows")
        data.write(path, *data.generate(8 * args.batch_size, args.wide, args.max_length, args.table_rows, seed=0))
        rows, remote = ParquetRows(path), RPCDataset("local:2", ParquetRows, path)
        table: Table = []
        for form, collate in ("dict of tensors", as_dict), ("combined", as_combined):

            def torchs(collate: Any = collate) -> Iterator[Any]:
                options = {"num_workers": 2, "collate_fn": collate, "pin_memory": device.type == "cuda"}
                for batch in DataLoader(rows, args.batch_size, sampler=endless(rows), **options):
                    yield {name: value.to(device, non_blocking=True) for name, value in batch.items()}

            def ours(collate: Any = collate) -> Iterator[Any]:
                options = {"num_workers": 2, "collate_fn": collate, "device": device}
                yield from RPCDataloader(remote, args.batch_size, sampler=endless(rows), **options)

            samples: dict[str, list[Load]] = {"torch": [], "rpcdataloader": []}
            for _ in range(args.rounds):
                for name, make in ("torch", torchs), ("rpcdataloader", ours):
                    samples[name].append(load(make(), args.seconds, device))
            for name, taken in samples.items():
                ratio = statistics.median(a.rate / b.rate for a, b in zip(taken, samples["torch"], strict=True))
                rate, cpu, tensors, copies, copying = map(statistics.median, zip(*taken, strict=True))
                gpu = [f"{copies:,.0f}", f"{copying:.2f}"] if device.type == "cuda" else []
                table.append([f"{form}, {name}", f"{tensors:,.0f}", f"{rate:,.1f}", f"{ratio:.1f}", f"{cpu:.1f}", *gpu])
    header = ["batch and loader", "tensors", "batches/s", "x torch", "trainer CPU ms/batch"]
    print(f"{args.wide:,} sparse features, batches of {args.batch_size} rows, two workers:\n")
    print_table(header + (["copies to the GPU", "ms of copies"] if device.type == "cuda" else []), table)


def endless(rows: ParquetRows) -> RandomSampler:
    return RandomSampler(rows, replacement=True, num_samples=10**7)


class Load(NamedTuple):
    """Batches per second, CPU ms per batch, tensors of a batch, copies of a batch to the GPU, and their ms."""

    rate: float
    cpu: float
    tensors: int
    copies: float
    copying: float


def load(batches: Iterator[Any], seconds: float, device: torch.device) -> Load:
    """Take batches for some seconds after a warm-up."""
    for _ in range(4):
        batch = next(batches)
    copies = copying = 0.0
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(4):
                next(batches)
            torch.cuda.synchronize()
        moved = [event for event in profiled.events() if "Memcpy HtoD" in event.name]
        copies, copying = len(moved) / 4, sum(event.device_time_total for event in moved) / 4 / 1000
    start, cpu, number = time.perf_counter(), time.process_time(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        batch = next(batches)
        number += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    used = time.process_time() - cpu
    tensors = len(batch)
    del batch, batches
    gc.collect()  # workers end before others begin
    return Load(number / elapsed, used / number * 1000, tensors, copies, copying)


class Variant:
    """One way to compute a step.

    Args:
        module: The model, its graph, or either compiled.
        batch: In the form that it takes, in pinned memory if there is a GPU.
        device: Where it computes.
    """

    def __init__(self, module: Any, batch: dict[str, Tensor], device: torch.device) -> None:
        self.module, self.batch, self.device = module, batch, device
        self.optimizer = torch.optim.Adam(module.parameters())

    def forward(self) -> Tensor:
        inputs = {name: value.to(self.device, non_blocking=True) for name, value in self.batch.items()}
        clicks = inputs.pop("clicks")
        return F.binary_cross_entropy_with_logits(self.module(**inputs), clicks)

    def time_forward(self) -> float:
        return self._time(self.forward)

    def time_step(self) -> float:
        return self._time(self._step)

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def _time(self, action: Callable[[], Any]) -> float:
        """Milliseconds of an action; what it returns is kept until then."""
        self._wait()
        start = time.perf_counter()
        kept = action()
        self._wait()
        elapsed = time.perf_counter() - start
        del kept
        return elapsed * 1000

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def count_kernels(self) -> int:
        """Kernels of a forward and a backward pass; on a CPU calls of operators and of what was compiled."""
        on_gpu = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
            self.forward().backward()
            self._wait()
        events = profiled.events() or []
        if on_gpu:
            launched = [event.name for event in events if str(event.device_type).endswith("CUDA")]
            return sum(not name.startswith(("Memcpy", "Memset")) for name in launched)
        return sum(event.name.startswith("aten::") or "cpp_fused" in event.name for event in events)


def measure_passes(args: argparse.Namespace, device: torch.device) -> None:
    """Print inputs, nodes, kernels and times of a model before and after the passes."""
    for number in args.features:
        tables = {f"C{k + 1}": args.table_rows for k in range(number)}
        with tempfile.TemporaryDirectory(prefix="recommender-") as folder:
            path = os.path.join(folder, "rows")
            data.write(path, *data.generate(2 * args.batch_size, number, args.max_length, args.table_rows, seed=0))
            rows = ParquetRows(path).__getitems__(list(range(args.batch_size)))
        forms = [as_dict(rows), as_combined(rows)]
        if device.type == "cuda":
            forms = [{name: value.pin_memory() for name, value in form.items()} for form in forms]
        plain, combined = forms

        def make(*chosen: Callable[[Any], Any], tables: dict[str, int] = tables) -> Any:
            torch.manual_seed(0)
            found: Any = trace(Recommender(tables, data.NUM_DENSE).to(device))
            for apply in chosen:
                found = apply(found)
            return found

        def combine(module: Any, tables: dict[str, int] = tables) -> Any:
            return passes.combine_sparse_inputs(module, list(tables))

        both = combine, passes.fuse_horizontally
        modules = {
            "as it is": (make(), plain),
            "combined": (make(combine), combined),
            "combined and fused": (make(*both), combined),
        }
        shapes = {name: (len(batch) - 1, f"{len(graph.graph.nodes):,}") for name, (graph, batch) in modules.items()}
        if number <= args.compile_up_to:
            torch._inductor.config.cpp.enable_kernel_profile = True  # or the profiler does not see them
            for name, graph in ("as it is", make()), ("combined and fused", make(*both)):
                batch = modules[name][1]
                start = time.perf_counter()
                compiled = torch.compile(graph, dynamic=True, backend=args.backend)
                Variant(compiled, batch, device).time_step()
                title = f"{name}, compiled in {time.perf_counter() - start:.0f} s"
                modules[title], shapes[title] = (compiled, batch), (len(batch) - 1, "")
        variants = {name: Variant(*parts, device) for name, parts in modules.items()}
        for variant in variants.values():
            variant.time_step()
        forward = compare({name: variant.time_forward for name, variant in variants.items()}, args.steps)
        step = compare({name: variant.time_step for name, variant in variants.items()}, args.steps)
        print(f"{number:,} sparse features, batches of {args.batch_size} rows:\n")
        print_table(
            ["model", "inputs", "graph nodes", "kernels", "forward ms", "ratio", "step ms", "ratio"],
            [
                [
                    name,
                    f"{shapes[name][0]:,}",
                    shapes[name][1],
                    f"{variant.count_kernels():,}",
                    *(f"{forward[name][0]:.1f}", f"{forward[name][1]:.2f}"),
                    *(f"{step[name][0]:.1f}", f"{step[name][1]:.2f}"),
                ]
                for name, variant in variants.items()
            ],
        )


def measure_overlap(args: argparse.Namespace, device: torch.device) -> None:
    """Print times with and without ``overlap_all_to_all``, of the slower of the ranks."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    tables = {f"C{k + 1}": args.table_rows for k in range(args.overlap_features)}
    shards = sharding.split_features(list(tables), num_ranks)
    torch.manual_seed(0)
    hidden = (args.tower,) * 3
    model = Recommender(tables, data.NUM_DENSE, args.overlap_dim, hidden, shards, rank).to(device)
    # What exchange() gives: this rank's features, for the rows of all ranks.
    num_rows = args.batch_size * num_ranks
    batch = {
        "clicks": torch.randint(2, (args.batch_size,)).float(),
        "dense": torch.randn(args.batch_size, data.NUM_DENSE),
        "indices": torch.randint(args.table_rows, (len(shards[rank]) * num_rows,), dtype=torch.int32),
        "lengths": torch.ones(len(shards[rank]) * num_rows, dtype=torch.int32),
    }
    graph = passes.fuse_horizontally(passes.combine_sparse_inputs(trace(model), shards[rank]))
    modules = {"all-to-all": graph, "request and wait": passes.overlap_all_to_all(graph)}
    variants = {name: Variant(module, batch, device) for name, module in modules.items()}

    def slowest(measure: Callable[[], float]) -> Callable[[], float]:
        def together() -> float:
            dist.barrier()
            found = torch.tensor(measure())
            dist.all_reduce(found, dist.ReduceOp.MAX)
            return found.item()

        return together

    widths = [args.overlap_dim * len(shard) for shard in shards]
    pooled = torch.randn(num_rows, widths[rank], device=device)

    def travel() -> float:
        start = time.perf_counter()
        sharding.all_to_all(pooled, widths)
        return (time.perf_counter() - start) * 1000

    for variant in variants.values():
        variant.time_step()
    alone = compare({"alone": slowest(travel)}, args.steps)["alone"][0]
    forward = compare({name: slowest(variant.time_forward) for name, variant in variants.items()}, args.steps)
    step = compare({name: slowest(variant.time_step) for name, variant in variants.items()}, args.steps)
    if rank == 0:
        sent = pooled.numel() * pooled.element_size() * (num_ranks - 1) / num_ranks / 1e6
        print(
            f"{num_ranks} ranks, {len(tables)} features of width {args.overlap_dim}, {args.batch_size} rows each, a "
            f"tower of 3 x {args.tower}; each rank sends {sent:.1f} MB, which takes {alone:.0f} ms alone:\n"
        )
        print_table(
            ["model", "forward ms", "ratio", "step ms", "ratio"],
            [
                [
                    name,
                    *(text for times in (forward, step) for text in (f"{times[name][0]:.0f}", f"{times[name][1]:.2f}")),
                ]
                for name in variants
            ],
        )


PARTS = {"loading": measure_loading, "passes": measure_passes, "overlap": measure_overlap}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.recommender.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where models compute (default: %(default)s)")
    add("--parts", nargs="+", choices=PARTS, default=["loading", "passes"], help="(default: loading passes)")
    add("--features", nargs="+", type=int, help="for the passes (default: 26 200, and 1000 on a GPU)")
    add("--compile-up-to", type=int, default=26, help="compile models of so many features (default: %(default)s)")
    add("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    add("--batch-size", type=int, default=256, help="rows of a batch and rank (default: %(default)s)")
    add("--max-length", type=int, default=3, help="most ids in a list (default: %(default)s)")
    add("--table-rows", type=int, default=1000, help="rows of each table (default: %(default)s)")
    add("--wide", type=int, default=1000, help="features for loading (default: %(default)s)")
    add("--rounds", type=int, default=5, help="rounds of loading (default: %(default)s)")
    add("--seconds", type=float, default=2.0, help="of each measurement of loading (default: %(default)s)")
    add("--steps", type=int, default=20, help="rounds of forward passes and of steps (default: %(default)s)")
    add("--overlap-features", type=int, default=64, help="sparse features for the overlap (default: %(default)s)")
    add("--overlap-dim", type=int, default=64, help="width of their embeddings (default: %(default)s)")
    add("--tower", type=int, default=1024, help="width of the dense tower for the overlap (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU for --device cuda")
    if "overlap" in args.parts and "WORLD_SIZE" not in os.environ:
        parser.error(
            "the overlap needs ranks: torchrun --nproc-per-node 2 -m examples.recommender.measure --parts overlap"
        )
    args.features = args.features or ([26, 200, 1000] if args.device == "cuda" else [26, 200])
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(1)
    # torch's workers send a descriptor for each tensor.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with Ranks(args.device) as ranks:
        for part in args.parts:
            PARTS[part](args, ranks.device)
    if ranks.rank == 0:
        where = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
        cores = len(os.sched_getaffinity(0))
        print(
            f"torch {torch.__version__}, {cores} CPU cores, {where}; load average at the end {os.getloadavg()[0]:.1f}."
        )


if __name__ == "__main__":
    main()
