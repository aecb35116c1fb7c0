"""Three passes over the graph of a recommender: each returns another ``GraphModule``, which computes the same.

The module that is given stays as it is. What a pass does not recognise in every detail is left alone, and what it
cannot keep right is refused. They are independent of each other and of the model in this example.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from . import sharding


def permute_and_split(indices: Tensor, lengths: Tensor, order: list[int]) -> list[Tensor]:
    """Take a combined batch apart, without copying it: views of the indices and the lengths of each feature, in turn.

    Args:
        indices: Of all features, in the order of the batch: feature after feature, and within each row after row.
        lengths: Of all lists, as long as features times rows.
        order: The places in the batch of the features that are returned.
    """
    of_features = lengths.view(len(order), -1)
    # Splitting needs the sizes on the host: a GPU is waited for once, where 2N copies would have been made.
    parts = indices.split(of_features.sum(dim=1).tolist())
    return [part for place in order for part in (parts[place], of_features[place])]


def combine_sparse_inputs(module: fx.GraphModule, features: list[str]) -> fx.GraphModule:
    """Let a model take the ids of all its sparse features in two tensors instead of 2N.

    Placeholders ``NAME_indices`` and ``NAME_lengths`` become ``indices`` and ``lengths``, which hold those of all
    features, feature after feature; a ``permute_and_split`` behind them gives each feature its part. Other placeholders
    stay. Results and gradients are the same, bit for bit.

    Args:
        module: A model with a pair of placeholders for each sparse feature, and no other ones of such names.
        features: Names in the order in which the batches have them.

    Raises:
        ValueError: The placeholders are not those of these features.
    """
    inputs = {node.target: node for node in module.graph.nodes if node.op == "placeholder"}
    pairs = [f"{name}_{part}" for name in features for part in ("indices", "lengths")]
    own = [name for name in inputs if name.endswith(("_indices", "_lengths"))]
    if not features or len(set(features)) < len(features):
        raise ValueError(f"there are no two tensors to combine, or a feature is named twice: {features}")
    if missing := sorted(set(pairs) - set(own)):
        raise ValueError(f"the model has no input {missing[0]} (and {len(missing) - 1} more that the batch has)")
    if other := sorted(set(own) - set(pairs)):
        raise ValueError(f"the batch has nothing for the input {other[0]} (and {len(other) - 1} more of the model)")
    if taken := {"indices", "lengths"} & set(inputs):
        raise ValueError(f"the model already has an input {min(taken)}")
    if defaults := [name for name in pairs if inputs[name].args]:
        raise ValueError(f"the input {defaults[0]} has a default, which a combined batch cannot leave out")

    found = _copy(module)
    graph = found.graph
    inputs = {node.target: node for node in graph.nodes if node.op == "placeholder"}
    names = [name.removesuffix("_indices") for name in inputs if name in pairs and name.endswith("_indices")]
    last = list(inputs.values())[-1]
    with graph.inserting_after(last):
        lengths = graph.placeholder("lengths")
    with graph.inserting_before(lengths):
        indices = graph.placeholder("indices")
    order = [features.index(name) for name in names]
    with graph.inserting_after(lengths):
        split = graph.call_function(permute_and_split, (indices, lengths, order))
    after = split
    for place, name in enumerate(f"{name}_{part}" for name in names for part in ("indices", "lengths")):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (split, place))
        inputs[name].replace_all_uses_with(after)
        graph.erase_node(inputs[name])
    return _finish(found)


class StackedLayerNorm(nn.Module):
    """One LayerNorm for (rows, features, dim) with a weight and a bias for each feature.

    Args:
        norms: A LayerNorm of each feature; their values are taken over.
    """

    def __init__(self, norms: list[nn.Module]) -> None:
        super().__init__()
        self.normalized_shape: Any = norms[0].normalized_shape
        self.eps: Any = norms[0].eps
        self.weight, self.bias = (
            nn.Parameter(
                torch.stack([getattr(norm, name).detach() for norm in norms]), getattr(norms[0], name).requires_grad
            )
            for name in ("weight", "bias")
        )

    def forward(self, values: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.layer_norm(values, self.normalized_shape, eps=self.eps), self.weight)


def add_middle_dim(values: Tensor, number: int) -> Tensor:
    """View (rows, number * dim) as (rows, number, dim)."""
    rows, width = values.shape  # it must be a matrix
    return values.reshape(rows, number, width // number)


def remove_middle_dim(values: Tensor) -> Tensor:
    """View (rows, number, dim) as (rows, number * dim)."""
    return values.flatten(1)


def fuse_horizontally(module: fx.GraphModule) -> fx.GraphModule:
    """Compute N times LayerNorm and Tanh at once.

    A ``torch.split`` of a matrix with a list of N equal sizes along dimension 1, whose parts go through a LayerNorm and
    a Tanh each, and then, all of them in order and with nothing else, into a ``torch.cat`` along dimension 1, become
    ``add_middle_dim``, a :class:`StackedLayerNorm`, one Tanh and ``remove_middle_dim``. Weights and biases keep their
    values in new parameters, so make optimizers afterwards. Results and gradients are the same but for rounding.

    Chains that differ anywhere are left alone: another order, eps, width or type, a LayerNorm that is used twice or has
    no bias, a part or a result with a second user, parameters of which some are frozen.
    """
    found = _copy(module)
    for split in list(found.graph.nodes):
        match = _match_chains(found, split)
        if match is None:
            continue
        norms, chain, concatenation = match
        name = "stacked_norm"
        while hasattr(found, name):
            name += "_"
        found.add_submodule(name, StackedLayerNorm([found.get_submodule(str(node.target)) for node in norms]))
        with found.graph.inserting_before(concatenation):
            values = found.graph.call_function(add_middle_dim, (_bind(split, *_SPLIT)["values"], len(norms)))
            values = found.graph.call_function(torch.tanh, (found.graph.call_module(name, (values,)),))
            concatenation.replace_all_uses_with(found.graph.call_function(remove_middle_dim, (values,)))
        for node in (concatenation, *reversed(chain), split):
            found.graph.erase_node(node)
    found.delete_all_unused_submodules()
    return _finish(found)


_SPLIT = (
    {"tensor": "values", "self": "values", "split_size_or_sections": "sizes", "split_size": "sizes"},
    ("values", "sizes", "dim"),
)
_CAT = {"tensors": "values"}, ("values", "dim")


def _bind(node: fx.Node, names: dict[str, str], order: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    return {
        **dict(zip(order, node.args, strict=False)),
        **{names.get(key, key): node.kwargs[key] for key in node.kwargs},
    }


def _calls(module: fx.GraphModule, node: fx.Node, functions: tuple[Any, ...], kind: type, method: str = "") -> bool:
    if node.op == "call_function":
        return node.target in functions
    if node.op == "call_method":
        return node.target == method
    return node.op == "call_module" and type(module.get_submodule(str(node.target))) is kind


def _match_chains(module: fx.GraphModule, split: fx.Node) -> tuple[list[fx.Node], list[fx.Node], fx.Node] | None:
    """Return the nodes of the norms behind a split, of all chains, and of the concatenation; None if one differs."""
    if split.op == "call_module" or not _calls(module, split, (torch.split,), nn.Module, "split"):
        return None
    bound = _bind(split, *_SPLIT)
    sizes = bound.get("sizes")
    # With one size, the number of parts is not known.
    if not isinstance(sizes, (list, tuple)) or len(sizes) < 2 or len(set(sizes)) > 1 or bound.get("dim") != 1:
        return None
    parts = {node.args[1]: node for node in split.users if node.target is operator.getitem}
    if len(split.users) != len(sizes) or set(parts) != set(range(len(sizes))):
        return None
    chain, ends, norms = [], [], []
    for _, part in sorted(parts.items()):
        norm = _only_user(part)
        end = norm and _only_user(norm)
        if not norm or not end or not _calls(module, norm, (), nn.LayerNorm) or norm.args != (part,) or norm.kwargs:
            return None
        if not _calls(module, end, (torch.tanh, F.tanh), nn.Tanh, "tanh") or end.args != (norm,) or end.kwargs:
            return None
        chain += [part, norm, end]
        ends.append(end)
        norms.append(norm)
    concatenation = _only_user(ends[0])
    if not concatenation or any(_only_user(end) is not concatenation for end in ends):
        return None
    if concatenation.target not in (torch.cat, torch.concat, torch.concatenate):
        return None
    bound = _bind(concatenation, *_CAT)
    if set(bound) != {"values", "dim"} or bound["dim"] != 1 or list(bound["values"]) != ends:
        return None
    return (norms, chain, concatenation) if _can_stack(module, norms, sizes[0]) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _can_stack(module: fx.GraphModule, nodes: list[fx.Node], width: int) -> bool:
    """Whether the norms that these nodes call are alike but for their values, and nothing else uses or watches them."""
    norms = [module.get_submodule(str(node.target)) for node in nodes]
    kinds = {
        (norm.normalized_shape, norm.eps, *((p.dtype, p.device, p.requires_grad) for p in norm.parameters()))
        for norm in norms
    }
    if len(kinds) > 1 or norms[0].normalized_shape != (width,) or len(list(norms[0].parameters())) != 2:
        return False
    calls = Counter(str(node.target) for node in module.graph.nodes)  # of modules, and of parameters by their names
    uses: Counter[int] = Counter()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] += 1 + calls[name]
    return all(
        calls[str(node.target)] == 1
        and all(uses[id(parameter)] == 1 for parameter in norm.parameters())
        and not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks)
        for node, norm in zip(nodes, norms, strict=True)
    )


def overlap_all_to_all(module: fx.GraphModule) -> fx.GraphModule:
    """Compute what does not need the embeddings of other ranks while these travel, forward and backward.

    Each ``sharding.all_to_all`` becomes ``all_to_all_request`` and ``all_to_all_wait``. What a request needs comes
    first, then the request, then all nodes that do not depend on it, wherever they stood, and the wait only before the
    node that uses it. The backward pass follows from this order: the wait sends the gradient, gradients of the nodes in
    between are computed, and the request waits. Results and gradients are the same, bit for bit; only where a tensor
    has three users or more, their gradients may be added up in another order.

    All ranks must have the same graph but for the tables, since they must ask in the same order.

    Raises:
        ValueError: A node draws random numbers or changes a tensor in place, so that it cannot change its place.
    """
    found = _copy(module)
    graph = found.graph
    waits: dict[fx.Node, None] = {}
    for node in list(graph.nodes):
        if node.target is sharding.all_to_all:
            pooled, widths = _bind(node, {}, ("pooled", "widths")).values()
            with graph.inserting_before(node):
                requested = graph.call_function(sharding.all_to_all_request, (pooled, widths))
                wait = graph.call_function(sharding.all_to_all_wait, (requested, widths))
            waits[wait] = None
            node.replace_all_uses_with(wait)
            graph.erase_node(node)
    if not waits:
        return found
    for node in graph.nodes:
        if reason := _cannot_move(found, node):
            raise ValueError(f"{node.format_node()} {reason}, so overlap_all_to_all cannot change the order around it")

    # How many waits must have ended before a node, one after the other?
    rounds: dict[fx.Node, int] = {}
    for node in graph.nodes:
        rounds[node] = max((rounds[needed] + (needed in waits) for needed in node.all_input_nodes), default=0)
    # What requests need is not kept waiting by other nodes of its round.
    urgent = {requested for wait in waits for requested in wait.all_input_nodes}
    for node in reversed(graph.nodes):
        if any(user in urgent and rounds[user] == rounds[node] for user in node.users):
            urgent.add(node)
    *nodes, output = graph.nodes
    nodes.sort(key=lambda node: (rounds[node], node not in urgent) if node.op != "placeholder" else (-1, False))
    for node in (*[node for node in nodes if node not in waits], output):
        for needed in list(waits) if node is output else node.all_input_nodes:
            if needed in waits:
                del waits[needed]
                output.prepend(needed)
        if node is not output:
            output.prepend(node)
    return _finish(found)


_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("__i")}
_IN_PLACE |= {operator.setitem, operator.delitem}
_IN_PLACE -= {operator.index, operator.inv}
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "poisson", "rrelu")


def _cannot_move(module: fx.GraphModule, node: fx.Node) -> str | None:
    """Why a node must keep its place, as far as it can be told."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return None
    called: Any = node.target
    if node.op == "call_module":
        called = type(part := module.get_submodule(str(node.target)))
        if getattr(part, "inplace", False):
            return "changes a tensor in place"
    name = called if isinstance(called, str) else getattr(called, "__name__", str(called))
    if any(word in name.lower() for word in _RANDOM):
        return "draws random numbers"
    by_name = name.endswith("_") and not name.endswith("__") and getattr(called, "__module__", "") != "_operator"
    if called in _IN_PLACE or by_name or node.kwargs.get("inplace") or "out" in node.kwargs:
        return "changes a tensor in place"
    return None


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module of its own graph, which shares parameters and buffers."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def _finish(module: fx.GraphModule) -> fx.GraphModule:
    module.graph.lint()
    module.recompile()
    return module
