"""Tables on two ranks: what they compute, and what is done while embeddings travel."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx, nn

from examples.recommender import passes, sharding
from examples.recommender.model import Recommender, trace

ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize("check", ["check_recommender", "check_graphs"])
def test_two_ranks_compute_the_same_as_one_and_with_overlap(check, zygote, tmp_path):
    source = f"import sys; sys.path.insert(0, {ROOT!r}); from tests.recommender import ranks; ranks.{check}"
    scripts = [zygote.start(f"{source}({rank}, {str(tmp_path)!r})", ends_quickly=True) for rank in range(2)]
    for script in scripts:
        ended = script.wait(100)
        assert ended.status == 0, ended.errors


def sharded(num_features=3):
    """The graph of rank 0, which can be looked at without ranks."""
    tables = {f"C{k}": 10 for k in range(num_features)}
    return trace(Recommender(tables, 13, shards=[list(tables)[:1], list(tables)[1:]], rank=0))


def test_tower_is_computed_between_request_and_wait():
    before = sharded()
    names = [node.name for node in before.graph.nodes]
    assert names.index("tower_0") > names.index("all_to_all")
    after = [node.name for node in passes.overlap_all_to_all(before).graph.nodes]
    assert after[:3] == ["dense", "c0_indices", "c0_lengths"]
    request, wait = after.index("all_to_all_request"), after.index("all_to_all_wait")
    assert after[request + 1 : wait] == ["tower_0", "tower_1", "tower_2"]
    assert after[wait + 1] == "split"
    assert [node.name for node in before.graph.nodes] == names


def test_request_goes_before_what_stood_before_it():
    class Early(nn.Module):
        def forward(self, dense, pooled):
            for _ in range(3):
                dense = dense.sin()
            return dense + sharding.all_to_all(pooled * 2, widths=[1, 1])

    after = [node.name for node in passes.overlap_all_to_all(fx.symbolic_trace(Early())).graph.nodes]
    middle = ["mul", "all_to_all_request", "sin", "sin_1", "sin_2", "all_to_all_wait", "add"]
    assert after == ["dense", "pooled", *middle, "output"]


def test_features_are_split_into_neighbours():
    assert sharding.split_features(["a", "b", "c", "d", "e"], 2) == [["a", "b"], ["c", "d", "e"]]
    assert sharding.split_features(["a", "b"], 1) == [["a", "b"]]
    with pytest.raises(ValueError, match="3 ranks cannot share 2 tables: start fewer ranks"):
        sharding.split_features(["a", "b"], 3)
