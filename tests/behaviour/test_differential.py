"""The specification: whatever torch's loader does, ours does, whoever loads. What differs is in docs/differences.md."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from tests.behaviour.differential_rows import DRAWS, ROWS, STREAMS, fail_to_begin
from tests.conftest import close_client, descendants, wait_until
from tests.support.comparison import assert_same
from tests.support.datasets import Augmented, Gated, Numbers, augment_batch
from tests.support.differential import OURS, seeded, steps
from tests.support.quick import quick_server
from tests.support.zygote import Zygote

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

INLINE = OURS[-1]


@pytest.fixture(scope="module")
def addresses(zygote: Zygote) -> Iterator[dict[int, str]]:
    """Node servers by their number of workers; one client for all tests of this file."""
    close_client()
    processes = set(descendants(os.getpid()))
    with contextlib.ExitStack() as stack:
        limits = ("--max-connections", "64")
        servers = [stack.enter_context(quick_server(zygote, "--num-workers", str(n), *limits)) for n in (1, 2, 3)]
        yield {server.num_workers: server.address for server in servers}
        close_client()
    wait_until(lambda: not set(descendants(os.getpid())) - processes, what="processes left behind")
    wait_until(lambda: not any(thread.name.startswith("rpcdl") for thread in threading.enumerate()), what="threads")


TABLES = {"map-style": ROWS, "streams": STREAMS}


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, rows in TABLES.items() for name in rows])
@pytest.mark.parametrize("loaders", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_rows(addresses, table, name, loaders):
    rows = TABLES[table]
    rows[name].check(addresses, list(rows).index(name) if loaders == "some" else None)


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_the_same_whoever_loads(addresses, name):
    row = DRAWS[name]
    expected = row.run(INLINE, addresses)
    for variant in row.some_variants(list(DRAWS).index(name)):
        assert_same(row.run(variant, addresses), expected, str(variant))


def test_no_sample_or_batch_has_numbers_of_another(addresses):
    """Of another seed, rank, epoch or position."""
    numbers = []
    for number, rank in (1, 0), (1, 1), (2, 0):
        # Passes of workers that stay have one seed.
        options = {"persistent_workers": True, "partition": (rank, 2), "generator": seeded(number)}
        loader = RPCDataloader(Augmented(), 3, workers=addresses[2], collate_fn=augment_batch, **options)
        for batch in [*loader, *loader]:
            numbers += [value for name in ("draws", "mixing", "seed") for value in batch[name].flatten().tolist()]
    assert len(set(numbers)) == len(numbers) == 3 * 2 * (20 * 5 + 7 * 3)


# Ctrl-C


def interrupt_wait():
    """As soon as the main thread waits for a batch."""

    def waits():
        frame, names = sys._current_frames()[threading.main_thread().ident], []
        while frame:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return names[0] in ("wait", "select") and "__next__" in names

    wait_until(waits)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("how", ["workers", "RPCDataset"])
def test_interrupt_while_waiting_leaves_a_loader_that_works(addresses, fifo, how, persistent_workers):
    dataset, workers = Gated(8, 2, fifo), addresses[2]
    if how == "RPCDataset":
        dataset, workers = RPCDataset(addresses[2], Gated, 8, 2, fifo), None
    loader = RPCDataloader(dataset, workers=workers, persistent_workers=persistent_workers)
    iterator = iter(loader)
    numbers = [int(next(iterator)) for _ in range(2)]
    for _ in range(2):
        thread = threading.Thread(target=interrupt_wait)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        thread.join()
    open(fifo, "w").close()
    assert numbers + [int(number) for number in iterator] == list(range(8))
    for _ in range(2):
        iterator = iter(loader)
        open(fifo, "w").close()
        assert [int(number) for number in iterator] == list(range(8))


# Differences


def outcome(loader):
    return list(steps(iter(loader)))


def test_difference_random_numbers_do_not_depend_on_seeds_of_the_init_function(addresses):
    def draws(make, **options):
        torch.manual_seed(1)
        (batch,) = make(Augmented(), batch_size=20, **options)
        return batch["draws"].tolist()

    theirs = [draws(DataLoader, num_workers=1, worker_init_fn=init) for init in (None, torch.manual_seed)]
    ours = [draws(RPCDataloader, workers=addresses[1], worker_init_fn=init) for init in (None, torch.manual_seed)]
    assert theirs[0] != theirs[1]
    assert ours[0] == ours[1]
    assert ours[0] not in theirs


def test_difference_failed_init_function_is_the_only_error(addresses):
    loader = RPCDataloader(Numbers(6), workers=addresses[2], worker_init_fn=fail_to_begin)
    assert {error.type for error in outcome(loader)[:6]} == {PermissionError}


def test_difference_multiprocessing_context_needs_no_number(addresses):
    loader = RPCDataloader(Numbers(2), workers=addresses[2], multiprocessing_context="spawn")
    assert outcome(loader) == [0, 1, "end"]


def test_difference_which_worker_loads_a_batch(addresses, fifo):
    # With torch, the worker that waits for the first batch would also have the third and so on.
    iterator = iter(RPCDataloader(Gated(8, 0, fifo), workers=addresses[2], collate_fn=tell_worker, in_order=False))
    first = [next(iterator) for _ in range(6)]
    open(fifo, "w").close()
    assert len({worker for _index, worker in first}) == 1
    assert len({index for index, _worker in first} & {2, 4, 6}) >= 2
    list(iterator)


def tell_worker(samples):
    return samples[0], get_worker_info().id


def test_difference_loader_with_persistent_workers_can_be_copied(addresses):
    loader = RPCDataloader(Numbers(2), workers=addresses[2], persistent_workers=True)
    assert outcome(loader) == outcome(copy.deepcopy(loader)) == [0, 1, "end"]


def test_difference_batches_may_be_generators(addresses):
    # With torch's workers, the loop waits for ever.
    loader = RPCDataloader(Numbers(), batch_sampler=[(number for number in (1, 2))], workers=addresses[2])
    assert_same(list(loader), [torch.tensor([1, 2])])
