"""Hugging Face Accelerate trains with our workers."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch.utils.data import DataLoader

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.integrations import gather_states, prepare, skip_first_batches
from tests.support.library import Library
from tests.support.origins import run_ranks
from tests.support.training import Points, PointStream, Seen, collate, flat

accelerate = Library("accelerate")

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture
def accelerator():
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    yield accelerate.Accelerator(cpu=True, dataloader_config=config)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def seen(shared_server):
    return Seen(shared_server.pid)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}],
    ids=["all workers", "some workers"],
)
def test_training_loop_gets_batches_of_workers_in_the_order_of_accelerate(accelerator, make_loader, seen, options):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    theirs = accelerator.prepare(DataLoader(Points(10), 3, shuffle=True))
    model, optimizer, loader = prepare(accelerator, model, optimizer, make_loader(shuffle=True, **options))
    expected, gathered, ends = [], [], []
    for epoch in (4, 2):
        theirs.set_epoch(epoch)
        loader.set_epoch(epoch)
        expected += [batch["index"].tolist() for batch in theirs]
        for batch in loader:
            seen.add(batch)
            accelerator.backward(model(batch["x"]).square().mean())
            optimizer.step()
            gathered += accelerator.gather_for_metrics(batch["index"]).tolist()
            ends.append(accelerator.gradient_state.end_of_dataloader)
    assert len(loader) == 4
    assert seen.indices == expected
    assert gathered == flat(seen.indices)
    assert ends == [False, False, False, True] * 2


def test_first_batches_are_skipped_and_others_still_come_from_workers(accelerator, make_loader, seen):
    loader = prepare(accelerator, make_loader(persistent_workers=True))
    for skip in (accelerator.skip_first_batches, skip_first_batches):
        skipped = skip(loader, 2)
        assert seen.add_all(skipped) == [[6, 7, 8], [9]]
    assert seen.add_all(skip_first_batches(skipped, 1)) == [[9]]
    assert seen.add_all(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_saved_state_goes_on_in_the_middle_of_an_epoch(accelerator, make_loader, seen, tmp_path):
    torch.manual_seed(3)
    loader = prepare(accelerator, make_loader(shuffle=True))
    accelerator.register_for_checkpointing(loader)
    accelerator.save_state(tmp_path)  # of an epoch that has not begun
    batches = iter(loader)
    seen.add(next(batches))
    seen.add(next(batches))
    accelerator.save_state(tmp_path)
    rest = seen.add_all(batches)
    assert sorted(flat(seen.indices)) == list(range(10))

    accelerator._custom_objects.clear()
    again = prepare(accelerator, make_loader(shuffle=True))
    accelerator.register_for_checkpointing(again)
    accelerator.load_state(tmp_path)
    assert seen.add_all(again) == rest


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_checkpoint_has_the_state_where_accelerate_uses_stateful_loaders(accelerator, make_loader, seen, tmp_path):
    """``use_stateful_dataloader=True`` needs torchdata, and no registering."""
    pytest.importorskip("torchdata.stateful_dataloader")
    accelerator.dataloader_config.use_stateful_dataloader = True
    torch.manual_seed(3)
    whole = seen.add_all(prepare(accelerator, make_loader(shuffle=True)))
    found = []
    for num_batches, is_begun in (1, False), (2, False), (1, True):
        accelerator._dataloaders.clear()  # as in a new process, with other random numbers
        torch.manual_seed(3 + len(found))
        loader = prepare(accelerator, make_loader(shuffle=True))
        batches = iter(loader)
        if is_begun:
            next(batches)
        if found:
            accelerator.load_state(tmp_path)
        if is_begun:
            with pytest.raises(LocalProtocolError, match="load_state_dict"):
                next(batches)
        found += seen.add_all(itertools.islice(loader, num_batches))
        accelerator.save_state(tmp_path)
    assert found == whole


def test_accelerator_itself_refuses_a_loader_whose_workers_it_would_drop(accelerator, make_loader):
    with pytest.raises(LocalProtocolError, match=r"use rpcdataloader\.integrations\.prepare"):
        accelerator.prepare(make_loader())
    # As torch's, this one loads in this process.
    loader = accelerator.prepare(RPCDataloader(Points(4), 2))
    assert [batch["index"].tolist() for batch in loader] == [[0, 1], [2, 3]]


def train_as_rank(address, server, store):
    """What each process of a job sees: its shard, and the samples of both when gathered."""
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    # Accelerate looks for these, and finds that the processes know each other.
    os.environ.update(LOCAL_RANK=os.environ["RANK"], MASTER_ADDR="unused", MASTER_PORT="0")
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert gather_states(accelerator.process_index) == [0, 1]
    seen = Seen(int(server))
    torch.manual_seed(3)
    theirs = accelerator.prepare(DataLoader(Points(11), batch_size=2, shuffle=True))
    torch.manual_seed(3)
    ours = prepare(accelerator, RPCDataloader(RPCDataset(address, Points, 11), 2, shuffle=True, collate_fn=collate))
    gathered = []
    for epoch in (0, 1):
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        for batch in ours:
            seen.add(batch)
            gathered.append(accelerator.gather_for_metrics(batch["index"]).tolist())
        assert seen.indices[-3:] == [batch["index"].tolist() for batch in theirs]
    batches = iter(ours)
    seen.add(next(batches))
    state = ours.state_dict()
    rest = seen.add_all(batches)
    assert len(rest) == 2
    ours.load_state_dict(state)
    assert seen.add_all(ours) == rest
    assert len(seen.add_all(accelerator.skip_first_batches(ours, 2))) == 1
    # By default, the first process loads what is iterable-style for all of them.
    stream = prepare(accelerator, RPCDataloader(RPCDataset(address, PointStream, 8), 2, collate_fn=collate))
    next(iter(stream))
    state = gather_states(stream.state_dict())[0]
    if accelerator.process_index:  # which loads nothing
        stream.load_state_dict(state)
    dispatched = seen.add_all(stream)
    accelerator.dataloader_config = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    ours = prepare(accelerator, RPCDataloader(RPCDataset(address, Points, 12), 2, collate_fn=collate))
    accelerator.register_for_checkpointing(ours)
    batches = iter(ours)
    resumed = seen.add_all(itertools.islice(batches, 1))
    accelerator.save_state(store + ".checkpoint")  # of the first process
    rest = seen.add_all(batches)
    accelerator.load_state(store + ".checkpoint")
    resumed += seen.add_all(ours)
    assert resumed[1:] == rest
    accelerator.dataloader_config = accelerate.DataLoaderConfiguration(dispatch_batches=False)
    with pytest.raises(ValueError, match="cannot split an iterable-style RPCDataset"):
        prepare(accelerator, RPCDataloader(RPCDataset(address, PointStream, 8), batch_size=2))
    torch.distributed.destroy_process_group()
    return {"indices": seen.indices[:6], "gathered": gathered, "dispatched": dispatched, "resumed": resumed}


@pytest.mark.slow
@pytest.mark.instruments
def test_processes_of_a_job_get_the_shards_that_accelerate_makes(library_zygote, shared_server, tmp_path):
    one, two = run_ranks(library_zygote, train_as_rank, 2, shared_server.address, shared_server.pid, tmp_path / "store")
    for epoch in (slice(0, 3), slice(3, 6)):
        assert sorted(set(flat(one["indices"][epoch] + two["indices"][epoch]))) == list(range(11))
        assert sorted(flat(one["gathered"][epoch])) == list(range(11))
    assert one["gathered"] == two["gathered"]
    for name, size in (("dispatched", 8), ("resumed", 12)):
        assert sorted(flat(one[name] + two[name])) == list(range(size))
        assert len(one[name]) == len(two[name]) == size // 4
