"""What a GPU gets: bytes in pinned memory, steps of training, and batches of thousands of tensors.

::

    python -m tests.benchmark.gpu                        # about 9 minutes with a GPU and 16 cores
    python -m tests.benchmark.gpu --subjects training    # one part
    python -m tests.benchmark.gpu --subjects elsewhere   # which is measured only if named: about 2 minutes
    python -m tests.benchmark.gpu --device cpu --quick   # without a GPU: does it work?

It measures and prints, and asserts nothing. Progress goes to standard error, one Markdown table to standard output.
Without a GPU it says so and ends with status 2.

**receiving**: 64x3x224x224 float32 into pinned memory, one client, and nothing is done with them. ``bare`` sockets
receive into pageable memory that is used again, and are the limit.

**training**: ResNet-50 with autocast to bfloat16, channels-last, on uint8 images of 3x224x224 that are normalised on
the GPU. The limit is the same loop on a batch that never leaves the GPU. The images cost the workers next to nothing.

**features**: 1,000 sparse features, each of two tensors of 64 int64: in one copy, or in one for each tensor.

**elsewhere**: the same training on JPEGs that are read, decoded, cropped and flipped (see ``elsewhere.py``). Trainer
and torch's workers are pinned to 2 CPUs; our workers have the others, one each, at the far end of a link of 10 Gbit/s
where network namespaces can be made. With 16 CPUs, ours are to give at least 3 times what torch gives.

In the other parts, all workers are on this host, on all CPUs. Each measurement is a fresh trainer process; rounds are
interleaved. *CPU ms* is user and system time of the trainer with all its threads, without its workers, per batch.
*x torch* and *x limit* are medians of the ratios within a round; the smallest and the largest rate of the rounds stand
in brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from . import datasets
from .bare import receive
from .claims import Found, median_ratio
from .loaders import environment, node_server, serve
from .places import Places, two_places
from .processes import ChildError, ask_trainer, describe_machine, measure_rounds, stop_by_signals
from .table import format_number, format_ratio, format_spread, format_table
from .trainer import Phase, count_bytes, take
from .workloads import WORKLOADS

# No measurement begins later than this, so that the whole takes less than 10 minutes.
_LAST_START_SECONDS = 540.0

# Of the link in the part "elsewhere": 14 CPUs decode about half of what it carries.
_GIGABITS = 10.0
_NUM_FILES = 1024


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that is measured.

    Attributes:
        workload: Name of what is loaded.
        batch_size: Samples in a batch, with a GPU and without.
        contestants: In the order of the rounds.
        limit: That of them which shows what is possible; empty if none does.
    """

    workload: str
    batch_size: tuple[int, int]
    contestants: tuple[str, ...]
    limit: str = ""


SUBJECTS = {
    "receiving": Subject(
        "float32", (64, 64), ("ours", "ours-unix", "ours-device", "ours-unix-device", "torch", "bare"), "bare"
    ),
    "training": Subject("uint8", (256, 2), ("ours-device", "ours", "torch", "resident"), "resident"),
    "features": Subject("tensors", (1, 1), ("ours-device", "ours", "torch")),
    "elsewhere": Subject("jpeg", (128, 2), ("ours-device", "torch", "torch-malloc", "resident"), "resident"),
}

TITLES = {
    "ours": "ours, TCP, pin_memory",
    "ours-unix": "ours, Unix socket, pin_memory",
    "ours-device": "ours, TCP, device=",
    "ours-unix-device": "ours, Unix socket, device=",
    "torch": "torch DataLoader, pin_memory",
    "torch-malloc": "torch, pin_memory, malloc as in ours",
    "bare": "bare sockets",
    "resident": "a batch on the GPU",
}


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement, for the trainer process; ``images`` is a folder of JPEGs, or empty."""

    subject: str
    contestant: str
    addresses: list[str]
    device: str
    num_workers: int
    batch_size: int
    seconds: float
    images: str


def _count_bytes(subject: str, batch_size: int) -> int:
    """Return the size of a batch."""
    workload = WORKLOADS[SUBJECTS[subject].workload]
    return workload.batch_bytes // workload.batch_size * batch_size


# --- the trainer


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        num_outputs = 4 * width
        self.path = nn.Sequential(
            *_convolution(num_inputs, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, num_outputs, 1),
        )  # fmt: skip
        changes = stride > 1 or num_inputs != num_outputs
        self.shortcut = nn.Sequential(*_convolution(num_inputs, num_outputs, 1, stride)) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.shortcut(x), inplace=True)


def _convolution(num_inputs: int, num_outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(num_inputs, num_outputs, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(num_outputs)]


def build_resnet50(num_classes: int = 1000) -> nn.Module:
    """ResNet-50, with its stride in the 3x3 convolution."""
    blocks: list[nn.Module] = []
    num_channels = 64
    for width, depth in (64, 3), (128, 4), (256, 6), (512, 3):
        for number in range(depth):
            blocks.append(Bottleneck(num_channels, width, 2 if number == 0 and width > 64 else 1))
            num_channels = 4 * width
    stem = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_channels, num_classes)]
    return nn.Sequential(*stem, *blocks, *head)


class Training:
    """A step of training on a batch of uint8 images, wherever they are."""

    def __init__(self, device: torch.device, batch_size: int) -> None:
        torch.backends.cudnn.benchmark = True
        self._device = device
        self._network = build_resnet50().to(device=device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a wrong stub
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01, momentum=0.9)
        self._labels = torch.randint(1000, (batch_size,), device=device)

    def __call__(self, images: torch.Tensor) -> None:
        images = images.to(self._device, non_blocking=True)
        values = ((images.float() - 120.0) / 58.0).contiguous(memory_format=torch.channels_last)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(self._network(values), self._labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def _make_step(task: Task, device: torch.device) -> Callable[[Any], None]:
    if task.subject in ("training", "elsewhere"):
        return Training(device, task.batch_size)
    if task.subject == "features" and not task.contestant.endswith("device"):

        def move_each(batch: dict[str, torch.Tensor]) -> None:
            for tensor in batch.values():
                tensor.to(device, non_blocking=True)

        return move_each
    return lambda _batch: None


def _make_batches(task: Task, device: torch.device) -> Iterator[Any]:
    workload = WORKLOADS[SUBJECTS[task.subject].workload]
    factory, args = getattr(datasets, workload.dataset), workload.args
    if task.images:
        factory, args = datasets.Files, (task.images,)
    options: dict[str, Any] = {"batch_size": task.batch_size, "num_workers": task.num_workers}
    if workload.collate is not None:
        options["collate_fn"] = getattr(datasets, workload.collate)
    has_device = device.type != "cpu"
    if task.contestant == "bare":
        return receive(task.addresses, _count_bytes(task.subject, task.batch_size))
    if task.contestant == "resident":
        batch = torch.stack([factory(*args)[0]] * task.batch_size)
        return itertools.repeat(batch.to(device))
    if task.contestant.startswith("torch"):
        return iter(DataLoader(factory(*args), pin_memory=has_device, **options))
    # The other contestants do without.
    from rpcdataloader import RPCDataloader, RPCDataset

    if task.contestant.endswith("device"):
        options["device"] = device
    else:
        options["pin_memory"] = has_device
    return iter(RPCDataloader(RPCDataset(task.addresses, factory, *args), **options))


def _check(task: Task, batch: Any, device: torch.device) -> None:
    """That a batch is what was ordered."""
    size, expected = count_bytes(batch), _count_bytes(task.subject, task.batch_size)
    if size != expected:
        raise ValueError(f"a batch of {size} bytes, where {expected} were expected")
    if device.type == "cpu" or task.contestant == "bare":
        return
    tensors = batch.values() if isinstance(batch, dict) else [batch]
    on_device = task.contestant.endswith(("device", "resident"))
    if not all(tensor.device.type == device.type if on_device else tensor.is_pinned() for tensor in tensors):
        raise ValueError(f"a batch that is not {'on the device' if on_device else 'pinned'}")


def measure(**fields: Any) -> Phase:
    """Take batches, first to warm up."""
    task = Task(**fields)
    device = torch.device(task.device)
    finish: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    batches, step = _make_batches(task, device), _make_step(task, device)
    first = next(batches)
    _check(task, first, device)
    step(first)
    del first
    # What workers make ahead is ready at the same time, and would be counted.
    ahead = 2 * task.num_workers if task.images else 1
    take(map(step, batches), task.seconds / 2, min_batches=ahead, finish=finish)
    return take(map(step, batches), task.seconds, finish=finish)


# --- the harness


@dataclass(frozen=True, slots=True)
class Divided:
    """What the part "elsewhere" needs: two places, a folder of JPEGs, and words for the reader."""

    places: Places
    images: str
    note: str


@contextlib.contextmanager
def _divide() -> Iterator[Divided]:
    """Divide the CPUs, and write the images; both last as long as the block."""
    num_here = 2 if len(os.sched_getaffinity(0)) > 3 else 1
    with two_places(num_here) as (places, reason), tempfile.TemporaryDirectory(prefix="rpcdl-images-") as images:
        places.limit(_GIGABITS)
        datasets.write_files(Path(images), _NUM_FILES)
        where = f"{places.between} ({reason})" if reason else places.between
        shares = f"CPUs of trainer and torch: {num_here}, of ours: {len(places.elsewhere)}"
        yield Divided(places, images, f"{shares}, behind {where}")


def _ask(args: argparse.Namespace, subject: str, contestant: str, batch_size: int, divided: Divided | None) -> Phase:
    """Start servers and trainer, wait for the figures, stop both."""
    num_workers = args.num_workers
    with contextlib.ExitStack() as stack:
        folder, env = stack.enter_context(environment(contestant))
        addresses = []
        if divided is None:
            server = serve(contestant, SUBJECTS[subject].workload, num_workers, env, folder)
            addresses = stack.enter_context(server)
        else:
            places = divided.places
            num_workers = len(places.elsewhere if contestant.startswith("ours") else places.here)
            if contestant.startswith("ours"):
                with places.entered_elsewhere():
                    node = node_server(num_workers, env, folder, *places.server_options)
                    addresses = [stack.enter_context(node)[0]]
            stack.enter_context(places.entered_here())
        images = divided.images if divided else ""
        task = Task(subject, contestant, addresses, args.device, num_workers, batch_size, args.seconds, images)
        return Phase(**ask_trainer("gpu.measure", asdict(task), env, folder, 120 + 10 * args.seconds))


def make_table(found: Found, batch_sizes: dict[str, int]) -> str:
    """Return a row for each subject and contestant that was tried."""
    rows = []
    for (subject, contestant), rounds in found.items():
        cells = ["failed", *"----"]
        if rounds:
            rates = [figures.rate for figures in rounds.values()]
            size = statistics.median(rates) * _count_bytes(subject, batch_sizes[subject]) / 1e9
            cpu = statistics.median(figures.cpu for figures in rounds.values())
            cells = [format_spread(rates), "-" if contestant == "resident" else format_number(size)]
            cells.append(format_number(cpu * 1e3))
            for reference in ("torch", SUBJECTS[subject].limit):
                cells.append(format_ratio(median_ratio(found, subject, contestant, reference, "rate")))
        rows.append([subject, TITLES[contestant], *cells])
    return format_table(["subject", "loader", "batches/s", "GB/s", "CPU ms", "x torch", "x limit"], rows, 2)


def main() -> int:
    """Run as the harness; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.gpu", description="Measure what a GPU gets.")
    parser.add_argument("--device", help="cuda, or cpu to see that it works (default: cuda)", default="cuda")
    parser.add_argument("--num-workers", type=int, default=16, help="of every loader (default: 16)")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each, interleaved (default: 2)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each, after a warm-up (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round of 0.2 s with two workers: does it work?")
    default = [name for name in SUBJECTS if name != "elsewhere"]
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=default, help="some, or elsewhere")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds, args.num_workers = 1, 0.2, 2
    stop_by_signals()
    has_device = args.device != "cpu"
    if has_device and not torch.cuda.is_available():
        print("no GPU: this needs a CUDA device. With --device cpu --quick it shows that it works.", file=sys.stderr)
        return 2
    start = time.monotonic()
    batch_sizes = {name: SUBJECTS[name].batch_size[0 if has_device else 1] for name in args.subjects}

    planned = {name: SUBJECTS[name].contestants for name in args.subjects}
    with contextlib.ExitStack() as stack:
        divided = stack.enter_context(_divide()) if "elsewhere" in args.subjects else None

        def measure_in_time(subject: str, contestant: str) -> Phase:
            if time.monotonic() - start > _LAST_START_SECONDS:
                raise ChildError("there is no time left")
            return _ask(args, subject, contestant, batch_sizes[subject], divided if subject == "elsewhere" else None)

        found = measure_rounds(planned, args.rounds, measure_in_time, lambda one: f"{one.rate:.1f} batches/s")
    print(make_table(found, batch_sizes))
    device = torch.cuda.get_device_name(args.device) if has_device else "no GPU, so these figures mean nothing"
    print(
        f"\nMedian of up to {args.rounds} interleaved rounds of {args.seconds:g} s, {args.num_workers} workers, "
        f"{describe_machine()}, {device}."
    )
    if divided is not None:
        print(f"elsewhere: {divided.note}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
