"""What a GPU gets: bytes in pinned memory, steps of training, and batches of thousands of tensors.

::

    python -m tests.benchmark.gpu                        # about 6 minutes with a GPU and 16 cores
    python -m tests.benchmark.gpu --subjects training    # one part
    python -m tests.benchmark.gpu --device cpu --quick   # without a GPU: does it work?

It measures and prints, and asserts nothing. Progress goes to standard error, one Markdown table to standard output.
Without a GPU it says so and ends with status 2.

**receiving**: 64x3x224x224 float32 into pinned memory, one client, and nothing is done with them. ``bare`` sockets
receive into pageable memory that is used again, and are the limit.

**training**: ResNet-50 with autocast to bfloat16, channels-last, on uint8 images of 3x224x224 that are normalised on
the GPU. The limit is the same loop on a batch that never leaves the GPU. The images cost the workers next to nothing.

**features**: 1,000 sparse features, each of two tensors of 64 int64: in one copy, or in one for each tensor.

All workers are on this host. Each measurement is a fresh trainer process; rounds are interleaved. *CPU ms* is user and
system time of the trainer with all its threads, without its workers, per batch. *x torch* and *x limit* are medians of
the ratios within a round; the smallest and the largest rate of the rounds stand in brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from . import datasets
from .bare import BareLoader
from .loaders import LOADERS, PACKAGE
from .processes import Child, ChildError, running

# No measurement begins later than this, so that the whole takes less than 8 minutes.
_LAST_START_SECONDS = 400.0
_START_TIMEOUT = 60.0
_IMAGE_VALUES = 3 * 224 * 224


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that is measured.

    Attributes:
        factory: Name of a class in ``datasets.py``, with its arguments.
        batch_size: Samples in a batch, with a GPU and without.
        sample_bytes: Of its tensors.
        collate: Name of a function in ``datasets.py``; None for the default collation.
        contestants: In the order of the rounds.
        limit: That of them which shows what is possible; empty if none does.
    """

    factory: tuple[str, tuple[object, ...]]
    batch_size: tuple[int, int]
    sample_bytes: int
    collate: str | None
    contestants: tuple[str, ...]
    limit: str = ""


SUBJECTS = {
    "receiving": Subject(
        ("Images", ("float32",)), (64, 64), 4 * _IMAGE_VALUES, None,
        ("ours", "ours-unix", "ours-device", "torch", "bare"), "bare",
    ),
    "training": Subject(
        ("Images", ("uint8",)), (256, 2), _IMAGE_VALUES, None, ("ours-device", "ours", "torch", "resident"), "resident"
    ),
    "features": Subject(
        ("Features", (2000, 64)), (1, 1), 2000 * 64 * 8, "get_only", ("ours-device", "ours", "torch")
    ),
}  # fmt: skip

TITLES = {
    "ours": "ours, TCP, pin_memory",
    "ours-unix": "ours, Unix socket, pin_memory",
    "ours-device": "ours, TCP, device=",
    "torch": "torch DataLoader, pin_memory",
    "bare": "bare sockets",
    "resident": "a batch on the GPU",
}


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement, for the trainer process."""

    subject: str
    contestant: str
    addresses: list[str]
    device: str
    num_workers: int
    batch_size: int
    seconds: float

    @property
    def batch_bytes(self) -> int:
        """Of the tensors of a batch."""
        return self.batch_size * SUBJECTS[self.subject].sample_bytes


@dataclass(frozen=True, slots=True)
class Figures:
    """Batches taken in a row, in how many seconds, for how much CPU time of the trainer."""

    num_batches: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.num_batches / self.seconds


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
    if task.subject == "training":
        return Training(device, task.batch_size)
    if task.subject == "features" and task.contestant != "ours-device":

        def move_each(batch: dict[str, torch.Tensor]) -> None:
            for tensor in batch.values():
                tensor.to(device, non_blocking=True)

        return move_each
    return lambda _batch: None


def _make_batches(task: Task, device: torch.device) -> Iterator[Any]:
    subject = SUBJECTS[task.subject]
    name, args = subject.factory
    factory = getattr(datasets, name)
    options: dict[str, Any] = {"batch_size": task.batch_size, "num_workers": task.num_workers}
    if subject.collate is not None:
        options["collate_fn"] = getattr(datasets, subject.collate)
    has_device = device.type != "cpu"
    if task.contestant == "bare":
        return iter(BareLoader(task.addresses, task.batch_bytes))
    if task.contestant == "resident":
        batch = torch.stack([factory(*args)[0]] * task.batch_size)
        return itertools.repeat(batch.to(device))
    if task.contestant == "torch":
        return iter(DataLoader(factory(*args), pin_memory=has_device, **options))
    # The other contestants do without.
    from rpcdataloader import RPCDataloader, RPCDataset

    if task.contestant == "ours-device":
        options["device"] = device
    else:
        options["pin_memory"] = has_device
    return iter(RPCDataloader(RPCDataset(task.addresses, factory, *args), **options))


def _check(task: Task, batch: Any, device: torch.device) -> None:
    """That a batch is what was ordered."""
    tensors = [batch] if isinstance(batch, torch.Tensor) else list(batch.values()) if isinstance(batch, dict) else []
    size = sum(tensor.nbytes for tensor in tensors) if tensors else len(batch)
    if size != task.batch_bytes:
        raise ValueError(f"a batch of {size} bytes, where {task.batch_bytes} were expected")
    if device.type == "cpu":
        return
    on_device = task.contestant in ("ours-device", "resident")
    if not all(tensor.device.type == device.type if on_device else tensor.is_pinned() for tensor in tensors):
        raise ValueError(f"a batch that is not {'on the device' if on_device else 'pinned'}")


def _get_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _take(batches: Iterator[Any], step: Callable[[Any], None], seconds: float, finish: Callable[[], None]) -> Figures:
    num_batches = 0
    cpu_start, start = _get_cpu_seconds(), time.perf_counter()
    while time.perf_counter() - start < seconds:
        step(next(batches))
        num_batches += 1
    finish()
    return Figures(num_batches, time.perf_counter() - start, _get_cpu_seconds() - cpu_start)


def measure(task: Task) -> Figures:
    """Take batches, first to warm up."""
    device = torch.device(task.device)
    finish: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    batches, step = _make_batches(task, device), _make_step(task, device)
    first = next(batches)
    _check(task, first, device)
    step(first)
    del first
    _take(batches, step, task.seconds / 2, finish)
    return _take(batches, step, task.seconds, finish)


def _train(text: str) -> None:
    # torch's loader keeps a descriptor open for each tensor that its workers send.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures = measure(Task(**json.loads(text)))
    print("figures", json.dumps(asdict(figures)), flush=True)


# --- the harness


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.gpu", description="Measure what a GPU gets.")
    parser.add_argument("--device", help="cuda, or cpu to see that it works (default: cuda)", default="cuda")
    parser.add_argument("--num-workers", type=int, default=16, help="of every loader (default: 16)")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each, interleaved (default: 2)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each, after a warm-up (default: 6)")
    parser.add_argument("--quick", action="store_true", help="one round of 0.2 s with two workers: does it work?")
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS), help="some of them")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # in the trainer
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds, args.num_workers = 1, 0.2, 2
    if args.rounds < 1 or args.seconds <= 0 or args.num_workers < 1:
        parser.error("--rounds, --seconds and --num-workers must be positive")
    return args


@contextlib.contextmanager
def _serving(task: Task, env: dict[str, str], folder: Path) -> Iterator[list[str]]:
    """Run the servers of a contestant; gives their addresses."""
    if task.contestant in ("torch", "resident"):
        yield []
        return
    with contextlib.ExitStack() as stack:

        def start(module: str, args: list[str]) -> Child:
            return stack.enter_context(running(module, args, env, folder))

        if task.contestant == "bare":
            children = [start(f"{PACKAGE}.bare_sender", [str(task.batch_bytes)]) for _ in range(task.num_workers)]
            yield [child.read_line("ready ", _START_TIMEOUT).split()[0] for child in children]
            return
        where = [f"unix:{folder}/ours"] if task.contestant == "ours-unix" else ["127.0.0.1", "--port", "0"]
        server = start("rpcdataloader.launch", ["--host", *where, "--num-workers", str(task.num_workers)])
        yield server.read_line("rpcdataloader ready ", _START_TIMEOUT).split()[:1]


def _measure(task: Task) -> Figures:
    """Start servers and trainer, wait for the figures, stop both.

    Raises:
        ChildError: One of the processes failed.
    """
    timeout = 120 + 10 * task.seconds
    with tempfile.TemporaryDirectory(prefix="rpcdl-bench-") as name:
        folder = Path(name)
        env = LOADERS["ours-tcp"].make_environment(folder)
        with _serving(task, env, folder) as addresses:
            given = json.dumps({**asdict(task), "addresses": addresses})
            with running(f"{PACKAGE}.gpu", ["--measure", given], env, folder) as trainer:
                figures = json.loads(trainer.read_line("figures ", timeout))
                trainer.wait(timeout)
    return Figures(**figures)


# By subject and contestant: the figures of each round that succeeded.
Found = dict[tuple[str, str], dict[int, Figures]]


def _format(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _ratio(rounds: dict[int, Figures], references: dict[int, Figures]) -> str:
    ratios = [figures.rate / references[number].rate for number, figures in rounds.items() if number in references]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def make_table(found: Found, batch_bytes: dict[str, int]) -> str:
    """One row for each subject and contestant that was tried.

    Args:
        batch_bytes: Of each subject.
    """
    lines = [
        "| subject | loader | batches/s | GB/s | CPU ms | x torch | x limit |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (subject, contestant), rounds in found.items():
        cells = [subject, TITLES[contestant]]
        if rounds:
            rates = [figures.rate for figures in rounds.values()]
            spread = f" ({_format(min(rates))} to {_format(max(rates))})" if len(rates) > 1 else ""
            cpu = statistics.median(figures.cpu_seconds / figures.num_batches for figures in rounds.values())
            cells += [
                _format(statistics.median(rates)) + spread,
                _format(statistics.median(rates) * batch_bytes[subject] / 1e9) if contestant != "resident" else "-",
                _format(cpu * 1e3),
                _ratio(rounds, found.get((subject, "torch"), {})),
                _ratio(rounds, found.get((subject, SUBJECTS[subject].limit), {})),
            ]
        else:
            cells += ["failed", "-", "-", "-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _run(args: argparse.Namespace) -> None:
    start = time.monotonic()
    has_device = args.device != "cpu"
    found: Found = {}
    batch_bytes: dict[str, int] = {}
    num_left_out = 0
    for number in range(args.rounds):
        for name in args.subjects:
            subject = SUBJECTS[name]
            batch_size = subject.batch_size[0 if has_device else 1]
            for contestant in subject.contestants:
                if time.monotonic() - start > _LAST_START_SECONDS:
                    num_left_out += 1
                    continue
                task = Task(name, contestant, [], args.device, args.num_workers, batch_size, args.seconds)
                batch_bytes[name] = task.batch_bytes
                rounds = found.setdefault((name, contestant), {})
                print(
                    f"{name}, round {number + 1} of {args.rounds}, {contestant}", end=": ", file=sys.stderr, flush=True
                )
                try:
                    rounds[number] = _measure(task)
                    print(f"{rounds[number].rate:.1f} batches/s", file=sys.stderr)
                except ChildError as error:
                    print(f"failed\n{error}", file=sys.stderr)
    print(make_table(found, batch_bytes))
    device = torch.cuda.get_device_name(args.device) if has_device else "no GPU, so these figures mean nothing"
    print(
        f"\nMedian of up to {args.rounds} interleaved rounds of {args.seconds:g} s, {args.num_workers} workers, "
        f"{len(os.sched_getaffinity(0))} CPUs, {device}, torch {torch.__version__}"
        f"{f'; {num_left_out} measurements were left out for lack of time' if num_left_out else ''}."
    )


def _stop(_signal: int, _frame: object) -> NoReturn:
    sys.exit("stopped by a signal")


def main() -> int:
    """Run as the harness or, with ``--measure``, as a trainer; returns the exit status."""
    args = _parse_args()
    # So that the context managers stop what was started, and torch's loader ends its workers.
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, _stop)
    if args.measure is not None:
        _train(args.measure)
        return 0
    if args.device != "cpu" and not torch.cuda.is_available():
        print(
            "no GPU: this benchmark needs a CUDA device, and torch sees none. "
            "With --device cpu --quick it shows that it works, and nothing else.",
            file=sys.stderr,
        )
        return 2
    _run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
