"""Graph passes: what they make of a graph, what they leave alone, and that results and gradients stay the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from examples.recommender import data, passes
from examples.recommender.loading import ParquetRows, as_combined, as_dict
from examples.recommender.model import Recommender, trace


def count(module, op, target=None):
    return sum(node.op == op and target in (None, node.target) for node in module.graph.nodes)


def gradients(module, output):
    """Gradients of all parameters, after one of some weighted sum of an output."""
    module.zero_grad()
    torch.sin(output * torch.arange(1, output.numel() + 1).view_as(output)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def assert_same(before, after, inputs, combined, tolerance=0.0):
    expected, found = before(**inputs), after(**combined)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    wanted, got = gradients(before, expected), gradients(after, found)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=tolerance, atol=tolerance)
    assert set(got) == set(wanted)


def unstack(module):
    """Let the parameters of stacked norms be those of single ones, so that gradients can be compared."""
    names = {"C1": 0, "C2": 1, "C3": 2, "C4": 3}
    return {
        f"norms.{name}.{part}": getattr(module.stacked_norm, part).grad[place]
        for name, place in names.items()
        for part in ("weight", "bias")
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "rows.parquet")
    data.write(path, *data.generate(num_rows=100, num_features=4, max_length=3, table_rows=20, seed=1))
    return ParquetRows(path)


@pytest.fixture
def batch(rows):
    """One batch in both forms, and the names of its features."""
    found = rows.__getitems__(list(range(40)))
    forms = as_dict(found), as_combined(found)
    for form in forms:
        del form["clicks"]
    return *forms, found.features


@pytest.fixture
def graph(rows):
    torch.manual_seed(0)
    return trace(Recommender(rows.tables, 13, dim=8))


# --- combine_sparse_inputs


class Three(nn.Module):
    """Gives back its inputs, in another order than that of the batch."""

    def forward(self, B_indices, B_lengths, C_indices, C_lengths, A_indices, A_lengths):
        return {"A": (A_indices, A_lengths), "B": (B_indices, B_lengths), "C": (C_indices, C_lengths)}


# Section 3.1 of https://pytorch.org/blog/optimizing-production-pytorch-performance-with-graph-transformations/
ARTICLE = {
    "A": ([106, 211, 7], [2, 1]),
    "B": ([52, 498, 616, 870, 1013], [3, 2]),
    "C": ([2011, 19, 351, 790], [1, 3]),
}


def test_three_features_of_the_article_are_recovered_from_two_tensors():
    module = passes.combine_sparse_inputs(fx.symbolic_trace(Three()), ["A", "B", "C"])
    assert [node.target for node in module.graph.nodes if node.op == "placeholder"] == ["indices", "lengths"]
    indices = torch.tensor([106, 211, 7, 52, 498, 616, 870, 1013, 2011, 19, 351, 790])
    lengths = torch.tensor([2, 1, 3, 2, 1, 3])
    found = module(indices, lengths)
    assert {name: tuple(part.tolist() for part in parts) for name, parts in found.items()} == ARTICLE
    # Nothing is copied.
    assert all(parts[0].untyped_storage().data_ptr() == indices.data_ptr() for parts in found.values())


def test_recommender_computes_the_same_from_combined_inputs(graph, batch):
    inputs, combined, features = batch
    found = passes.combine_sparse_inputs(graph, features)
    assert (count(graph, "placeholder"), count(found, "placeholder")) == (1 + 2 * 4, 1 + 2)
    assert count(found, "call_function", passes.permute_and_split) == 1
    assert_same(graph, found, inputs, combined)


def test_passes_leave_the_module_that_they_are_given(graph, batch):
    inputs, _, features = batch
    code, state, expected = graph.code, copy.deepcopy(graph.state_dict()), graph(**inputs)
    passes.fuse_horizontally(passes.combine_sparse_inputs(graph, features))
    passes.fuse_horizontally(graph)
    assert graph.code == code
    assert list(graph.state_dict()) == list(state)
    assert graph(**inputs).equal(expected)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (["C1", "C2", "C3"], r"the batch has nothing for the input C4_indices \(and 1 more"),
        (["C1", "C2", "C3", "C4", "C5"], r"the model has no input C5_indices \(and 1 more"),
        (["C1", "C2", "C3", "C3", "C4"], "named twice"),
        ([], "no two tensors to combine"),
    ],
)
def test_batches_of_other_features_are_refused(graph, features, message):
    with pytest.raises(ValueError, match=message):
        passes.combine_sparse_inputs(graph, features)


def test_inputs_that_cannot_be_combined_are_refused(graph):
    again = passes.combine_sparse_inputs(graph, ["C1", "C2", "C3", "C4"])
    with pytest.raises(ValueError, match="no input C1_indices"):
        passes.combine_sparse_inputs(again, ["C1"])

    def taken(x_indices, x_lengths, lengths):
        return x_indices, x_lengths, lengths

    def optional(x_indices, x_lengths=None):
        return x_indices, x_lengths

    with pytest.raises(ValueError, match="already has an input lengths"):
        passes.combine_sparse_inputs(fx.symbolic_trace(taken), ["x"])
    with pytest.raises(ValueError, match="x_lengths has a default"):
        passes.combine_sparse_inputs(fx.symbolic_trace(optional), ["x"])


# --- fuse_horizontally


def test_recommender_computes_the_same_with_one_norm(graph, batch):
    inputs, _, _ = batch
    found = passes.fuse_horizontally(graph)
    assert count(found, "call_function", torch.tanh) == 1
    assert not any(name.startswith("norms") for name, _ in found.named_modules())
    operators = [node.target for node in found.graph.nodes]
    start = operators.index(passes.add_middle_dim)
    assert operators[start : start + 4] == [passes.add_middle_dim, "stacked_norm", torch.tanh, passes.remove_middle_dim]
    expected, got = graph(**inputs), found(**inputs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    wanted, others = gradients(graph, expected), gradients(found, got)
    others = {name: value for name, value in others.items() if not name.startswith("stacked")} | unstack(found)
    assert set(others) == set(wanted)
    for name, gradient in others.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-5)


class Chains(nn.Module):
    """N chains between a split and a concatenation, and one place in which something is different."""

    def __init__(self, number=4, width=3, odd="", place=0, tanh="function", eps=1e-5):
        super().__init__()
        self.number, self.width, self.odd, self.place, self.tanh = number, width, odd, place, tanh
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps) for _ in range(number))
        self.act = nn.Tanh()
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        norm = self.norms[place]
        if odd == "eps":
            norm.eps = 0.1
        elif odd == "no bias":
            norm.bias = None
        elif odd == "no affine":
            self.norms[place] = nn.LayerNorm(width, eps, elementwise_affine=False)
        elif odd == "type":
            self.norms[place] = nn.RMSNorm(width)
        elif odd == "frozen":
            norm.weight.requires_grad_(False)
        elif odd == "shared norm":
            self.norms[place] = self.norms[place - 1]
        elif odd == "shared weight":
            norm.weight = self.norms[place - 1].weight
        elif odd == "hook":
            norm.register_forward_hook(lambda _module, _args, output: output * 2)

    def forward(self, values):
        sizes = [self.width] * self.number
        if self.odd == "size":
            sizes[0], sizes[1] = self.width - 1, self.width + 1
        if self.odd == "size of all":
            sizes = self.width
        pieces = torch.split(values, sizes, dim=0 if self.odd == "dimension" else 1)
        extra, ends = 0, []
        for k, norm in enumerate(self.norms):
            odd = self.odd if k == self.place else ""
            piece = pieces[k - 1 if odd == "part taken twice" else k]
            if self.odd == "size" and k < 2:
                piece = F.pad(piece, (0, 1)) if k == 0 else piece[:, : self.width]
            normed = norm(piece)
            if odd == "norm called twice":
                extra = extra + norm(piece * 2).sum()
            if odd == "weight read":
                extra = extra + norm.weight.sum()
            if odd == "no tanh":
                end = normed
            elif odd == "other function":
                end = torch.sigmoid(normed)
            elif self.tanh == "module":
                end = self.act(normed)
            elif self.tanh == "method":
                end = normed.tanh()
            else:
                end = torch.tanh(normed)
            if odd.startswith("second user"):
                extra = extra + {"part": piece, "norm": normed, "tanh": end}[odd.split()[-1]].sum()
            ends.append(end)
        if self.odd == "order":
            ends.reverse()
        if self.odd == "more":
            ends.append(values)
        if self.odd == "fewer":
            del ends[self.place]
        return torch.cat(ends, dim=0 if self.odd == "rows" else 1) + extra
