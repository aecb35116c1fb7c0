"""Iterable-style datasets with workers. What torch does, row by row, is in the table of differential tests."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rpcdataloader import RPCDataloader, RPCDataset
from tests.conftest import wait_until
from tests.support.crew import workers_of
from tests.support.datasets import notes
from tests.support.streams import Informed, Parts


def as_is(samples):
    return samples


def in_turn(streams):
    """One of each in turn; who has no more is left out."""
    rows = itertools.zip_longest(*streams)
    return [batch for row in rows for batch in row if batch is not None]


def batches_of(sizes, batch_size, drop_last):
    """The batches of each stream."""
    streams = []
    for stream, size in enumerate(sizes):
        samples = [100 * stream + number for number in range(size)]
        batches = [samples[start : start + batch_size] for start in range(0, size, batch_size)]
        streams.append([batch for batch in batches if len(batch) == batch_size or not drop_last])
    return streams


SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=5)
QUICK = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # making a failure smaller may take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@QUICK
@given(sizes=SIZES, batch_size=st.integers(1, 4), drop_last=st.booleans(), prefetch_factor=st.integers(1, 3))
def test_batches_of_streams_come_in_turn(wide_servers, sizes, batch_size, drop_last, prefetch_factor):
    loader = RPCDataloader(
        Parts(sizes),
        batch_size,
        drop_last=drop_last,
        collate_fn=as_is,
        prefetch_factor=prefetch_factor,
        num_workers=len(sizes),
        workers=wide_servers[0].address,
    )
    assert list(loader) == in_turn(batches_of(sizes, batch_size, drop_last))


@QUICK
@given(sizes=SIZES, max_in_flight_bytes=st.sampled_from([None, 1]))
def test_in_any_order_each_stream_keeps_its_own(wide_servers, sizes, max_in_flight_bytes):
    loader = RPCDataloader(
        Parts(sizes),
        2,
        in_order=False,
        collate_fn=as_is,
        num_workers=len(sizes),
        workers=wide_servers[0].address,
        max_in_flight_bytes=max_in_flight_bytes,
    )
    batches = list(loader)
    found = [[batch for batch in batches if batch[0] // 100 == stream] for stream in range(len(sizes))]
    assert found == batches_of(sizes, 2, False)


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
