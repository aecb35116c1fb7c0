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
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import time

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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: 20)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch and process (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="for weights, order and augmentation (default: 0)")
    parser.add_argument("--digest", action="store_true", help="print a SHA-256 of all training batches (of rank 0)")
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
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
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
    digest = hashlib.sha256()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(4, device=device)
        waited = 0.0
        start = asked = time.perf_counter()
        for images, labels in tqdm(
            train_loader, f"epoch {epoch + 1}", leave=False, disable=None if rank == 0 else True
        ):
            waited += time.perf_counter() - asked
            if args.digest:
                digest.update(images.cpu().numpy())
                digest.update(labels.cpu().numpy())
            output = model(images)
            loss = F.cross_entropy(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            sums[0] += loss.detach() * len(labels)
            sums[1] += (output.argmax(dim=1) == labels).sum()
            sums[2] += len(labels)
            asked = time.perf_counter()
        sums[3] += waited
        loss_sum, num_correct, num_images, waited = sum_over_ranks(sums)
        seconds = time.perf_counter() - start
        if rank == 0:
            print(
                f"epoch {epoch + 1:2}  loss {loss_sum / num_images:.4f}  accuracy {num_correct / num_images:.4f}  "
                f"{num_images / seconds:6.0f} samples/s  waiting for data {waited / world_size / seconds:4.0%}",
                flush=True,
            )

    accuracy = evaluate(network, test_loader, device)
    if rank == 0:
        if args.digest:
            print(f"digest of the training batches: {digest.hexdigest()}")
        print(f"test accuracy: {accuracy:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
