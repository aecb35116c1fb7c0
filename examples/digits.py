"""Train a small convolutional network on handwritten digits that other processes decode and augment.

One script, four ways to run it. On one machine; worker processes start by themselves::

    python examples/digits.py

With workers on other machines: run the first line on each of them, the second one where the training happens::

    python -m rpcdataloader.launch --host 0.0.0.0 --port 6543
    python examples/digits.py --workers node01:6543 node02:6543

Data-parallel, here with two training processes, each on a GPU of its own if there are any::

    torchrun --nproc-per-node 2 examples/digits.py

Both together; the training processes share the workers among themselves::

    torchrun --nproc-per-node 2 examples/digits.py --workers node01:6543 node02:6543

Wherever the batches are made, they are the same: ``--digest`` prints a checksum of all of them.

With ``--checkpoint FILE``, training goes on where it was. The file is written after each epoch. On SIGUSR1 or SIGTERM
it is written after the batch that is under way, and the script ends with exit code 75: it wants to be started again.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler
from tqdm import tqdm

from rpcdataloader import RPCDataloader, RPCDataset


class Digits(Dataset[tuple[Tensor, int]]):
    """The 8x8 digits of scikit-learn: every fifth image is for testing, the others are augmented for training."""

    def __init__(self, train: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        chosen = (np.arange(len(labels)) % 5 != 0) == train
        self.images = torch.tensor(images[chosen] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels = labels[chosen].tolist()
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return (augment(image) if self.train else image), self.labels[index]


def augment(image: Tensor) -> Tensor:
    """Rotate, shift and add noise, drawing from the global generators of python, numpy and torch as one pleases."""
    angle = math.radians(random.uniform(-15, 15))
    dx, dy = np.random.uniform(-0.15, 0.15, size=2)
    rotate_and_shift = torch.tensor([[math.cos(angle), -math.sin(angle), dx], [math.sin(angle), math.cos(angle), dy]])
    grid = F.affine_grid(rotate_and_shift.float()[None], [1, 1, 8, 8], align_corners=False)
    return F.grid_sample(image[None], grid, align_corners=False)[0] + 0.05 * torch.randn(1, 8, 8)


def build_network() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def sum_over_ranks(values: Tensor) -> list[float]:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values.tolist()


class StopRequest:
    """Whether somebody wants this to end, and to go on another time: SIGUSR1 or SIGTERM has come."""

    def __init__(self) -> None:
        self._has_come = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: object) -> None:
        self._has_come = True

    def is_known_to_a_rank(self) -> bool:
        """To be asked after each batch: the signal finds ranks at different ones, and all must stop at the same."""
        return sum_over_ranks(torch.tensor([float(self._has_come)]))[0] > 0


def save_checkpoint(path: str, parts: dict[str, Any], **progress: Any) -> None:
    """Save the states of all parts. If it is killed meanwhile, the checkpoint before is still there."""
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**states, "generator": torch.get_rng_state(), **progress}, f"{path}.new")
    os.replace(f"{path}.new", path)


def load_checkpoint(path: str, parts: dict[str, Any]) -> dict[str, Any]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["generator"])
    return state


def evaluate(network: nn.Module, loader: RPCDataloader, device: torch.device) -> float:
    """Return the share of right answers on the test images of all ranks."""
    if dist.is_initialized():
        for statistics in network.buffers():  # of batch norm; each rank has seen other images
            dist.broadcast(statistics, src=0)
    network.eval()
    counts = torch.zeros(2, device=device)
    with torch.inference_mode():
        for images, labels in loader:
            correct = network(images).argmax(dim=1) == labels
            counts[0] += correct.sum()
            counts[1] += len(labels)
    num_correct, num_images = sum_over_ranks(counts)
    return num_correct / num_images


def describe_waiting(loader: RPCDataloader) -> tuple[float, str]:
    """Return the share of its time that the loop waits for the loader, and a text for the progress bar."""
    diagnosis = loader.diagnosis()
    return diagnosis.wait_share, f"waiting {diagnosis.wait_share:.0%} ({diagnosis.bound})"


def name_place(workers: str | list[str] | None) -> str:
    """Say where batches are loaded."""
    workers = workers or os.environ.get("RPCDATALOADER_WORKERS") or "local"
    if workers == "inline":
        return "this process, without workers"
    named = workers if isinstance(workers, list) else workers.split(",")
    return "worker processes on this machine" if named[0].startswith("local") else f"workers on {' and '.join(named)}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: 20)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch and process (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="for weights, order and augmentation (default: 0)")
    parser.add_argument("--digest", action="store_true", help="print a checksum of all training batches (of rank 0)")
    parser.add_argument("--checkpoint", metavar="FILE", help="save there, and go on from there (default: none)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--workers",
        nargs="+",
        metavar="HOST:PORT",
        help="node servers (default: those in RPCDATALOADER_WORKERS, else worker processes on this machine)",
    )
    source.add_argument(
        "--num-workers",
        type=int,
        metavar="N",
        help="number of worker processes on this machine, 0 to load in the training process (default: one per core)",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    torch.set_num_threads(1)  # leave the other cores to the workers
    torch.manual_seed(args.seed)

    workers = args.workers
    if args.num_workers is not None:
        workers = f"local:{args.num_workers}" if args.num_workers else "inline"
    train_set = RPCDataset(workers, Digits, train=True)
    test_set = RPCDataset(workers, Digits, train=False)

    sampler: DistributedSampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    train_loader = RPCDataloader(train_set, args.batch_size, sampler=sampler, device=device)
    # A DistributedSampler would test some images twice, to give each rank the same number of them.
    share = range(rank, len(test_set), world_size)
    test_loader = RPCDataloader(test_set, args.batch_size, sampler=share, device=device)

    network = build_network().to(device)
    model = DistributedDataParallel(network) if dist.is_initialized() else network
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=args.epochs * len(train_loader))
    parts = {"network": network, "optimizer": optimizer, "schedule": schedule, "loader": train_loader}
    first_epoch, digest = 0, ""
    trained_seconds = waited_seconds = 0.0
    stop = StopRequest() if args.checkpoint else None
    if args.checkpoint and os.path.exists(args.checkpoint):
        progress = load_checkpoint(args.checkpoint, parts)  # by all ranks: they were at the same batch
        first_epoch, digest = progress["epoch"], progress["digest"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(4, device=device)
        start = time.perf_counter()
        bar = tqdm(train_loader, f"epoch {epoch + 1}", leave=False, disable=None if rank == 0 else True)
        for number, (images, labels) in enumerate(bar):
            if number % 10 == 0 and not bar.disable:
                bar.set_postfix_str(describe_waiting(train_loader)[1], refresh=False)
            if args.digest:
                digest = hashlib.sha256(
                    digest.encode() + images.cpu().numpy().tobytes() + labels.cpu().numpy().tobytes()
                ).hexdigest()
            output = model(images)
            loss = F.cross_entropy(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            sums[0] += loss.detach() * len(labels)
            sums[1] += (output.argmax(dim=1) == labels).sum()
            sums[2] += len(labels)
            if stop and stop.is_known_to_a_rank():
                if rank == 0:
                    save_checkpoint(args.checkpoint, parts, epoch=epoch, digest=digest)
                sys.exit(os.EX_TEMPFAIL)
        sums[3] += describe_waiting(train_loader)[0]
        loss_sum, num_correct, num_images, waited = sum_over_ranks(sums)
        seconds = time.perf_counter() - start
        trained_seconds += seconds
        waited_seconds += seconds * waited / world_size
        if rank == 0 and num_images:  # none where the checkpoint is of the last batch of an epoch
            print(
                f"epoch {epoch + 1:2}  loss {loss_sum / num_images:.4f}  accuracy {num_correct / num_images:.4f}  "
                f"{num_images / seconds:6.0f} samples/s  waiting for data {waited / world_size:4.0%}",
                flush=True,
            )
        if rank == 0 and args.checkpoint:
            save_checkpoint(args.checkpoint, parts, epoch=epoch + 1, digest=digest)

    accuracy = evaluate(network, test_loader, device)
    if rank == 0:
        if args.digest:
            print(f"digest of the training batches: {digest}")
        print(f"test accuracy: {accuracy:.4f}")
        processes = "1 process" if world_size == 1 else f"{world_size} processes"
        print(f"It was trained on {device.type} by {processes}; {name_place(workers)} prepared the images.")
        print(f"Training took {trained_seconds:.1f} s, of which it waited {waited_seconds:.1f} s for images.")
        print("Next: docs/first-training.md trains with workers on a second machine, and saves checkpoints.")
    if dist.is_initialized():
        # Before the group: what ends with the model holds the interpreter while it waits for threads that may want it.
        del model
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
