"""The recommender: an embedding bag, LayerNorm and Tanh for each sparse feature, a dense tower, interactions, a top."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn

from . import sharding


class Recommender(nn.Module):
    """Predict the logit of a click.

    Weights depend on the seed of torch's generator, and not on the ranks that share the tables.

    Args:
        tables: Rows of the table of each sparse feature.
        num_dense: Number of dense columns.
        dim: Width of an embedding.
        hidden: Widths of the dense tower's hidden layers.
        shards: Features of each rank, if the tables are spread over ranks.
        rank: Of this process.
    """

    def __init__(
        self,
        tables: dict[str, int],
        num_dense: int,
        dim: int = 16,
        hidden: tuple[int, ...] = (64,),
        shards: list[list[str]] | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.sizes = [dim] * len(tables)
        self.widths = [dim * len(shard) for shard in shards] if shards else []
        layers: list[nn.Module] = []
        for before, after in zip((num_dense, *hidden), hidden, strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.tower = nn.Sequential(*layers, nn.Linear(hidden[-1], dim))
        self.norms = nn.ModuleDict({name: nn.LayerNorm(dim) for name in tables})
        self.top = nn.Sequential(nn.Linear((len(tables) + 2) * dim, 64), nn.ReLU(), nn.Linear(64, 1))
        seeds = dict(zip(tables, torch.randint(2**31, (len(tables),)).tolist(), strict=True))
        self.tables = nn.ModuleDict()
        for name in shards[rank] if shards else tables:
            weight = torch.randn(tables[name], dim, generator=torch.Generator().manual_seed(seeds[name]))
            self.tables[name] = nn.EmbeddingBag(tables[name], dim, mode="sum", _weight=weight)

    def forward(self, dense: Tensor, **sparse: Tensor) -> Tensor:
        pooled = torch.cat([look_up(table, sparse, name) for name, table in self.tables.items()], dim=1)
        if self.widths:
            pooled = sharding.all_to_all(pooled, self.widths)
        pieces = torch.split(pooled, self.sizes, dim=1)
        features = torch.cat([torch.tanh(norm(pieces[k])) for k, norm in enumerate(self.norms.values())], dim=1)
        tower = self.tower(dense)
        each = features.unflatten(1, (len(self.sizes), -1))
        # The products of all pairs, each pair once, without making them.
        pairs = (each.sum(dim=1) ** 2 - (each**2).sum(dim=1)) / (2 * len(self.sizes))
        return self.top(torch.cat([tower, pairs, features], dim=1)).squeeze(1)


def look_up(table: nn.Module, sparse: dict[str, Tensor], name: str) -> Tensor:
    indices, lengths = sparse[f"{name}_indices"], sparse[f"{name}_lengths"]
    return table(indices, torch.cumsum(lengths, 0, dtype=torch.int32) - lengths)


class DenseOnly(nn.Module):
    """What can be known without the sparse features: a tower and a top of the same widths."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_dense, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, **_sparse: Tensor) -> Tensor:
        return self.layers(dense).squeeze(1)


def trace(model: nn.Module) -> fx.GraphModule:
    """Capture the graph of a model whose ``forward`` takes its sparse features as ``**sparse``.

    The graph has a placeholder for each of them, so it takes what the model takes: ``graph(dense, **sparse)``.
    """
    module = fx.symbolic_trace(model)
    graph = module.graph
    for node in [node for node in graph.nodes if node.op == "placeholder" and node.target.startswith("**")]:
        inputs: dict[str, fx.Node] = {}
        for item in list(node.users):
            if item.target is not operator.getitem:
                raise ValueError(f"{item.format_node()} takes all inputs at once: a graph needs the name of each")
            name = item.args[1]
            if name not in inputs:
                with graph.inserting_before(node):
                    inputs[name] = graph.placeholder(name)
            item.replace_all_uses_with(inputs[name])
            graph.erase_node(item)
        graph.erase_node(node)
    module.recompile()
    return module
