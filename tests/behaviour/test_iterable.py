"""Iterable-style datasets with workers. What torch does, row by row, is in the table of differential tests."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
import torch

from rpcdataloader import RPCDataloader, RPCDataset
from tests.conftest import wait_until
from tests.support.crew import workers_of
from tests.support.datasets import notes
from tests.support.streams import Informed, Parts


def test_batches_of_streams_come_in_turn(wide_servers):
    sizes, options = [15, 1, 28, 0, 8], {"num_workers": 5, "prefetch_factor": 1}
    loader = RPCDataloader(Parts(sizes), 2, collate_fn=list, workers=wide_servers[0].address, **options)
    streams = [[100 * stream + number for number in range(size)] for stream, size in enumerate(sizes)]
    batches = [[samples[start : start + 2] for start in range(0, len(samples), 2)] for samples in streams]
    assert list(loader) == [batch for row in itertools.zip_longest(*batches) for batch in row if batch is not None]


@pytest.mark.parametrize("max_in_flight_bytes", [None, 1])
def test_in_any_order_each_stream_keeps_its_own(wide_servers, max_in_flight_bytes):
    sizes, options = [7, 0, 2, 12], {"in_order": False, "max_in_flight_bytes": max_in_flight_bytes}
    loader = RPCDataloader(Parts(sizes), 2, num_workers=4, workers=wide_servers[0].address, **options)
    samples = torch.cat(list(loader)).tolist()
    found = [[sample for sample in samples if sample // 100 == stream] for stream in range(4)]
    assert found == [[100 * stream + number for number in range(size)] for stream, size in enumerate(sizes)]


def test_worker_at_the_end_of_its_stream_is_not_needed_any_more(serve, caplog):
    loader = RPCDataloader(Informed([1, 30]), None, num_workers=2, workers=serve("--num-workers", "2").address)
    iterator = iter(loader)
    samples = [next(iterator) for _ in range(4)]
    done, busy = samples[0], samples[1]
    os.kill(done[-1], signal.SIGKILL)
    wait_until(lambda: len(workers_of(iterator)) == 1, what="loss of the worker")
    samples += iterator
    assert [sample[-1] for sample in samples] == [done[-1]] + [busy[-1]] * 30
    assert "another worker starts" not in caplog.text


def test_dataset_on_a_node_can_be_iterated_over(wide_servers, tmp_path):
    log = str(tmp_path / "log")
    dataset = RPCDataset(wide_servers[0].address, Parts, [30], log)
    for _ in range(2):
        assert list(dataset) == list(range(30))
    iterator = iter(dataset)
    assert [next(iterator), next(iterator)] == [0, 1]
    del iterator
    assert len(notes(log)) < 80  # it was not read to its end
    with pytest.raises(TypeError, match="has no len"):
        len(dataset)
