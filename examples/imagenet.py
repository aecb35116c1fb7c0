"""Train ResNet-50 on ImageNet, or on any folder with one subfolder of images per class.

``DATA`` holds the folders ``train`` and ``val``, as node servers and training processes see them. Start a node server
on each CPU node, then train on one GPU, or on several with torchrun::

    python -m rpcdataloader.launch --host 0.0.0.0 --port 6543
    python examples/imagenet.py DATA --workers node01:6543 node02:6543
    torchrun --nproc-per-node 8 examples/imagenet.py DATA --workers node01:6543 node02:6543

Under Slurm, export ``MASTER_ADDR`` and ``MASTER_PORT`` in the job script, and start one task per GPU::

    srun python examples/imagenet.py DATA --workers node01:6543 node02:6543

Workers decode, crop and flip. Images travel as uint8, a quarter of the bytes of float32. The loader delivers them on
the GPU, which normalises them.

The checkpoint is written after each epoch. On SIGUSR1 or SIGTERM it is written after the batch that is under way, and
the script ends with exit code 75: it wants to be started again. Training goes on with the next batch, also on another
number of GPUs or with other workers. Each epoch shows each image once, however often it was interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from rpcdataloader import ResumableDistributedSampler, RPCDataloader, RPCDataset

# Of the pixels 0 to 255 of ImageNet, per channel.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def build_datasets(data: str, image_size: int, workers: list[str] | None) -> tuple[RPCDataset, RPCDataset]:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    train = [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    val = [transforms.Resize(image_size * 8 // 7), transforms.CenterCrop(image_size), transforms.PILToTensor()]
    return (
        RPCDataset(workers, ImageFolder, os.path.join(data, "train"), transform=transforms.Compose(train)),
        RPCDataset(workers, ImageFolder, os.path.join(data, "val"), transform=transforms.Compose(val)),
    )


def build_network(num_classes: int) -> nn.Module:
    from torchvision.models import resnet50

    return resnet50(num_classes=num_classes).to(memory_format=torch.channels_last)


def read_environment(*names: str, default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


def normalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, STD))
    return ((images - mean) / std).contiguous(memory_format=torch.channels_last)


def describe_waiting(loader: RPCDataloader) -> tuple[float, str]:
    """Return the share of its time that the loop waits for the loader, and a text for the progress bar."""
    diagnosis = loader.diagnosis()
    return diagnosis.wait_share, f"waiting {diagnosis.wait_share:.0%} ({diagnosis.bound})"


def find_learning_rate(num_epochs: float, world_size: int, args: argparse.Namespace) -> float:
    """Rise in proportion, then fall along a cosine; a function of what was seen, for any number of ranks.

    Args:
        num_epochs: Passes over the training images until now.
    """
    peak: float = args.lr * args.batch_size * world_size / 256
    if num_epochs < args.warmup_epochs:
        return peak * num_epochs / args.warmup_epochs
    rest = (num_epochs - args.warmup_epochs) / max(1, args.epochs - args.warmup_epochs)
    return peak * (0.5 + 0.5 * math.cos(math.pi * min(1, rest)))


def sum_over_ranks(values: Tensor) -> list[float]:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values.tolist()


class StopRequest:
    """Whether this training is to end, and to go on another time: SIGUSR1 or SIGTERM has come."""

    def __init__(self) -> None:
        self._has_come = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: object) -> None:
        self._has_come = True

    def is_known_to_a_rank(self) -> bool:
        """To be asked after each batch: the signal finds ranks at different ones, and all must stop at the same."""
        return sum_over_ranks(torch.tensor([float(self._has_come)]))[0] > 0


def save_checkpoint(path: str, rank: int, parts: dict[str, Any], **progress: Any) -> None:
    """Let rank 0 save the states of all parts. If it is killed meanwhile, the checkpoint before is still there."""
    if rank == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "generator": torch.get_rng_state(), **progress}, f"{path}.new")
        os.replace(f"{path}.new", path)
    if dist.is_initialized():
        dist.barrier()  # the first rank that ends makes torchrun end the others


def load_checkpoint(path: str, parts: dict[str, Any]) -> dict[str, Any]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["generator"])
    return state


def evaluate(network: nn.Module, loader: RPCDataloader, precision: dict[str, Any], device: torch.device) -> list[float]:
    """Return the shares of the images of all ranks whose class is the first guess, and among the first five."""
    if dist.is_initialized():
        for statistics in network.buffers():  # of batch norm; each rank has seen other images
            dist.broadcast(statistics, src=0)
    network.eval()
    counts = torch.zeros(3, device=device)
    with torch.inference_mode():
        for images, labels in loader:
            with torch.autocast(**precision):
                output = network(normalise(images))
            correct = output.topk(min(5, output.shape[1])).indices == labels[:, None]
            counts[0] += correct[:, 0].sum()
            counts[1] += correct.sum()
            counts[2] += len(labels)
    first, first_five, num_images = sum_over_ranks(counts)
    return [first / num_images, first_five / num_images]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", metavar="DATA", help="folder that holds the folders train and val")
    add(
        "--workers",
        nargs="+",
        metavar="HOST:PORT",
        help="node servers (default: RPCDATALOADER_WORKERS, else local ones)",
    )
    add("--epochs", type=int, default=90, help="passes over the training images (default: %(default)s)")
    add("--batch-size", type=int, default=256, help="images per batch and process (default: %(default)s)")
    add("--image-size", type=int, default=224, help="pixels of a side (default: %(default)s)")
    add("--lr", type=float, default=0.1, help="learning rate per 256 images of a step (default: %(default)s)")
    add("--warmup-epochs", type=int, default=5, help="with a rising learning rate (default: %(default)s)")
    add("--momentum", type=float, default=0.9, help="of SGD (default: %(default)s)")
    add("--weight-decay", type=float, default=1e-4, help="of SGD (default: %(default)s)")
    add("--amp", choices=["bfloat16", "float16", "off"], default="bfloat16", help="precision (default: %(default)s)")
    add("--seed", type=int, default=0, help="for weights, order and augmentation (default: %(default)s)")
    add("--checkpoint", metavar="FILE", default="resnet50.pt", help="save and go on there (default: %(default)s)")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_arguments()
    # torchrun sets the first name of each, srun the second.
    rank = read_environment("RANK", "SLURM_PROCID", default=0)
    world_size = read_environment("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", default=1)
    local_rank = read_environment("LOCAL_RANK", "SLURM_LOCALID", default=0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world_size)
    torch.manual_seed(args.seed)

    train_set, val_set = build_datasets(args.data, args.image_size, args.workers)
    sampler = ResumableDistributedSampler(train_set, world_size, rank, seed=args.seed)
    train_loader = RPCDataloader(train_set, args.batch_size, sampler=sampler, device=device)
    # A DistributedSampler would count some images twice, to give each rank the same number of them.
    share = range(rank, len(val_set), world_size)
    val_loader = RPCDataloader(val_set, args.batch_size, sampler=share, device=device)

    network = build_network(len(train_set.classes)).to(device)
    model = DistributedDataParallel(network) if world_size > 1 else network
    precision: dict[str, Any] = {"device_type": device.type, "enabled": args.amp != "off"}
    if precision["enabled"]:
        precision["dtype"] = getattr(torch, args.amp)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "float16")
    optimizer = torch.optim.SGD(model.parameters(), momentum=args.momentum, weight_decay=args.weight_decay)
    parts = {"network": network, "optimizer": optimizer, "scaler": scaler, "loader": train_loader}
    first_epoch, num_seen = 0, 0  # images of this epoch, by all ranks
    stop = StopRequest()
    if os.path.exists(args.checkpoint):
        progress = load_checkpoint(args.checkpoint, parts)  # by all ranks: they were at the same batch
        first_epoch, num_seen = progress["epoch"], progress["num_seen"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(3, device=device, dtype=torch.float64)
        start = time.perf_counter()
        bar = tqdm(train_loader, f"epoch {epoch + 1}", leave=False, disable=None if rank == 0 else True)
        for number, (images, labels) in enumerate(bar):
            if number % 10 == 0 and not bar.disable:
                bar.set_postfix_str(describe_waiting(train_loader)[1], refresh=False)
            num_seen += len(labels) * world_size
            for group in optimizer.param_groups:
                group["lr"] = find_learning_rate(epoch + num_seen / len(train_set), world_size, args)
            with torch.autocast(**precision):
                loss = F.cross_entropy(model(normalise(images)), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
            if stop.is_known_to_a_rank():
                save_checkpoint(args.checkpoint, rank, parts, epoch=epoch, num_seen=num_seen)
                sys.exit(os.EX_TEMPFAIL)
        num_seen = 0
        sums[2] += describe_waiting(train_loader)[0]
        loss_sum, num_images, waited = sum_over_ranks(sums)
        seconds = time.perf_counter() - start
        accuracy, accuracy_of_five = evaluate(network, val_loader, precision, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1:2}  loss {loss_sum / max(1, num_images):.4f}  {num_images / seconds:6.0f} images/s  "
                f"waiting for data {waited / world_size:4.0%}  "
                f"validation accuracy {accuracy:.4f}, within five guesses {accuracy_of_five:.4f}",
                flush=True,
            )
        save_checkpoint(args.checkpoint, rank, parts, epoch=epoch + 1, num_seen=num_seen)

    if world_size > 1:
        # Before the group: what ends with the model holds the interpreter while it waits for threads that may want it.
        del model
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
