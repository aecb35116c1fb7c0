"""What two ranks check about all-to-all; ``test_training.py`` starts them."""

from __future__ import annotations

import operator

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from examples.recommender import data, passes, sharding
from examples.recommender.loading import ParquetRows, as_combined
from examples.recommender.model import Recommender, trace

NUM_RANKS = 2


def begin(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)


def gradients(module, output):
    module.zero_grad()
    torch.sin(output * torch.arange(1, output.numel() + 1).view_as(output)).sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def assert_same(before, after, *inputs):
    """Results and gradients, bit for bit."""
    expected, found = before(*inputs), after(*inputs)
    assert found.equal(expected)
    wanted = {name: gradient.clone() for name, gradient in gradients(before, expected).items()}
    got = gradients(after, found)
    assert set(got) == set(wanted)
    assert all(got[name].equal(wanted[name]) for name in wanted)


def check_recommender(rank, folder):
    """Shared tables give what tables in one process give, and the overlap changes nothing."""
    begin(rank, folder)
    if rank == 0:
        data.write(f"{folder}/rows.parquet", *data.generate(100, num_features=5, max_length=3, table_rows=20, seed=1))
    dist.barrier()
    rows = ParquetRows(f"{folder}/rows.parquet")
    shards = sharding.split_features(list(rows.tables), NUM_RANKS)
    inputs = []
    for r in range(NUM_RANKS):
        batch = as_combined(rows.__getitems__(list(range(20 * r, 20 * r + 20))))
        inputs.append((batch["dense"], batch["indices"], batch["lengths"]))
    models = []
    for options in {}, {"shards": shards, "rank": rank}:
        torch.manual_seed(0)
        model = trace(Recommender(rows.tables, 13, dim=8, **options))
        models.append(passes.combine_sparse_inputs(model, shards[rank] if options else list(rows.tables)))
    whole, shared = models
    dense, *sparse = inputs[rank]
    own = (dense, *sharding.exchange(*sparse, [len(shard) for shard in shards]))
    assert shared(*own).equal(whole(dense, *sparse))
    # The gradient of a table is the sum of those of all ranks.
    sum(whole(*other).sin().sum() for other in inputs).backward()
    shared(*own).sin().sum().backward()
    for name in shards[rank]:
        expected, found = (model.get_parameter(f"tables.{name}.weight").grad for model in models)
        torch.testing.assert_close(found, expected)
    assert_same(shared, passes.overlap_all_to_all(shared), *own)
    fused = passes.fuse_horizontally(shared)
    assert_same(fused, passes.overlap_all_to_all(fused), *own)
    dist.destroy_process_group()


MATRIX, EMBEDDINGS = (3, 4), (3 * NUM_RANKS, 2)  # of this rank's rows, and of this rank's features
SHAPES = {"linear": (MATRIX, MATRIX), "sin": (None, None), "add": (None, None), "to_embeddings": (MATRIX, EMBEDDINGS)}
SHAPES["all_to_all"] = (EMBEDDINGS, MATRIX)


@st.composite
def graphs(draw):
    """Operators of a graph of any form, each with the places of what it takes.

    A value has two users at most: the sum of three gradients depends on their order.
    """
    shapes, operators, free = [MATRIX, EMBEDDINGS], [], [0, 0, 1, 1]
    for _ in range(draw(st.integers(1, 12))):
        name = draw(st.sampled_from(sorted(SHAPES)))
        taken, given = SHAPES[name]
        candidates = [k for k in free if taken in (None, shapes[k])]
        if not candidates:
            continue
        free.remove(first := draw(st.sampled_from(candidates)))
        others = [k for k in free if name == "add" and shapes[k] == shapes[first]]
        second = draw(st.sampled_from(others)) if others else None
        if name == "add" and second is None:
            name = "sin"
        elif second is not None:
            free.remove(second)
        operators.append((name, first, second))
        shapes.append(given or shapes[first])
        free += [len(shapes) - 1] * 2
    return operators


def build(operators):
    graph = fx.Graph()
    values = [graph.placeholder("matrix"), graph.get_attr("embeddings")]
    root: dict = {"embeddings": nn.Parameter(torch.randn(EMBEDDINGS))}
    for place, (name, first, second) in enumerate(operators):
        if name == "linear":
            root[f"linear{place}"] = nn.Linear(4, 4)
            value = graph.call_module(f"linear{place}", (values[first],))
        elif name == "sin":
            value = graph.call_function(torch.sin, (values[first],))
        elif name == "add":
            value = graph.call_function(operator.add, (values[first], values[second]))
        elif name == "to_embeddings":
            value = graph.call_method("reshape", (values[first], EMBEDDINGS))
        else:
            value = graph.call_function(sharding.all_to_all, (values[first], [2] * NUM_RANKS))
        values.append(value)
    flat = [graph.call_method("flatten", (value,)) for value in values if not value.users]
    graph.output(graph.call_function(torch.cat, (flat,)))
    return fx.GraphModule(root, graph)


def assert_order(module):
    """No wait stands before a node that it could follow, and no request behind one that it does not need."""
    order = list(module.graph.nodes)
    place = {node: k for k, node in enumerate(order)}
    waits = [node for node in order if node.target is sharding.all_to_all_wait]
    for wait in waits:
        (requested,) = wait.all_input_nodes
        assert requested.target is sharding.all_to_all_request
        behind = {wait}
        for node in order:
            if behind & set(node.all_input_nodes):
                behind.add(node)
        if wait.users:
            first = min(place[user] for user in wait.users)
            others = order[place[wait] + 1 : first]
            assert all(other in waits for other in others)  # other waits of the same node
        if len(waits) == 1:
            independent = [node for node in order if node not in behind and node.op != "placeholder"]
            assert all(place[node] < place[wait] for node in independent)
            needed = {requested}
            for node in reversed(order):
                if needed & set(node.users):
                    needed.add(node)
            between = order[place[requested] + 1 : place[wait]]
            assert set(independent) - needed == set(between)


# The same examples on both ranks: they follow from the code alone.
@settings(derandomize=True, max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(graphs())
def check_graph(operators):
    torch.manual_seed(7)
    before = build(operators)
    after = passes.overlap_all_to_all(before)
    assert_order(after)
    assert_same(before, after, torch.randn(MATRIX))


def check_graphs(rank, folder):
    """Graphs of any form, with any number of all-to-all operators in a row or beside each other."""
    begin(rank, folder)
    check_graph()
    dist.destroy_process_group()
