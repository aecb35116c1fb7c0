"""What two ranks check about all-to-all; ``test_training.py`` starts them."""

from __future__ import annotations

import torch
import torch.distributed as dist

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
