"""A model that ranks train together: its graph, its optimizer, its checkpoints, and how good it is."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from . import passes, sharding
from .model import DenseOnly, Recommender, trace


class Ranks:
    """Which part of the work this process has.

    Args:
        device: "cpu" not to use a GPU that is there.

    Attributes:
        rank: Its number.
        number: How many there are.
        device: Where it computes.
    """

    def __init__(self, device: str = "") -> None:
        self.rank, self.number = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        if device != "cpu" and torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.number > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if self.number > 1:
            if kind is None:
                dist.barrier()  # a rank that leaves while another one still closes its group may abort it
            dist.destroy_process_group()

    def sum(self, *values: float) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64)
        if self.number > 1:
            dist.all_reduce(found)
        return found.tolist()

    def join(self, values: Tensor, length: int) -> Tensor:
        """Put what the ranks have of a sampler's order together again, without what is repeated at its end."""
        if self.number == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.number)]
        dist.all_gather(parts, values)
        return torch.stack(parts, dim=1).flatten(0, 1)[:length]

    def add_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Of layers that all ranks have, in one message."""
        if self.number > 1:
            flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
            dist.all_reduce(flat)
            parts = flat.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)


class Trainer:
    """A model, its graph after the passes, and its optimizer.

    Args:
        args: Of the command line.
        ranks: The processes that share the work.
        tables: Of the rows.
        num_dense: Of the rows.
    """

    def __init__(self, args: argparse.Namespace, ranks: Ranks, tables: dict[str, int], num_dense: int) -> None:
        self.ranks, self.features = ranks, list(tables)
        self.combined = not args.no_passes or ranks.number > 1
        self.shards = sharding.split_features(self.features, ranks.number) if ranks.number > 1 else []
        torch.manual_seed(args.seed)
        if args.dense_only:
            model: nn.Module = DenseOnly(num_dense)
            self.model = model.to(ranks.device)
        else:
            model = Recommender(tables, num_dense, args.dim, shards=self.shards, rank=ranks.rank).to(ranks.device)
            self.model = model if args.no_passes else self._transform(model)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=args.lr)
        self.common = [value for name, value in self.parameters.items() if not name.startswith("tables.")]

    def _transform(self, model: nn.Module) -> nn.Module:
        own = self.shards[self.ranks.rank] if self.shards else self.features
        graph = passes.combine_sparse_inputs(trace(model), own)
        return passes.overlap_all_to_all(passes.fuse_horizontally(graph))

    def predict(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "clicks"}
        if isinstance(self.model, DenseOnly):
            return self.model(inputs["dense"])
        if self.shards:
            own = self.shards[self.ranks.rank]
            sizes = [len(shard) for shard in self.shards]
            indices, lengths = sharding.exchange(inputs.pop("indices"), inputs.pop("lengths"), sizes)
            if isinstance(self.model, Recommender):
                names = [f"{name}_{part}" for name in own for part in ("indices", "lengths")]
                parts = passes.permute_and_split(indices, lengths, list(range(len(own))))
                inputs |= dict(zip(names, parts, strict=True))
            else:
                inputs |= {"indices": indices, "lengths": lengths}
        return self.model(**inputs)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Learn from a batch; returns the loss."""
        loss = F.binary_cross_entropy_with_logits(self.predict(batch), batch["clicks"])
        self.optimizer.zero_grad()
        # Of the mean over the rows of all ranks, whose batches have one size; tables get the gradients of all of them.
        (loss / self.ranks.number).backward()
        self.ranks.add_gradients(self.common)
        self.optimizer.step()
        return loss.detach()

    def save(self, path: str, **progress: Any) -> None:
        """Write a checkpoint with the tables of all ranks. If it is killed meanwhile, the one before is still there."""
        states = {
            name: {"value": value.detach(), **self.optimizer.state[value]} for name, value in self.parameters.items()
        }
        if self.ranks.number > 1:
            found: list[Any] = [None] * self.ranks.number
            dist.gather_object(states, found if self.ranks.rank == 0 else None)
            states = {name: state for part in found for name, state in (part or {}).items()}
        if self.ranks.rank == 0:
            torch.save({"parameters": states, **progress}, f"{path}.new")
            os.replace(f"{path}.new", path)

    def load(self, path: str) -> dict[str, Any]:
        """Go on from a checkpoint, with this rank's tables; returns the progress that was saved with it."""
        saved = torch.load(path, map_location=self.ranks.device, weights_only=True)
        for name, parameter in self.parameters.items():
            state = saved["parameters"].get(name, {"value": torch.empty(0)})
            value = state.pop("value")
            if value.shape != parameter.shape:
                raise ValueError(f"{path} was saved with other options: it has no {name} of {tuple(parameter.shape)}")
            with torch.no_grad():
                parameter.copy_(value)
            self.optimizer.state[parameter] = {
                key: part.cpu() if key == "step" else part for key, part in state.items()
            }
        return saved


def area_under_curve(scores: Tensor, clicks: Tensor) -> float:
    """Return how often a row with a click has a higher score than one without; equal scores count half."""
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2.0).double()[places]
    positive = clicks > 0.5
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        raise ValueError("without clicks, or with nothing else, there is no area under the curve")
    above = ranks[positive].sum().item() - num_positive * (num_positive + 1) / 2
    return above / (num_positive * num_negative)
