"""Lightning trains with our workers: it makes loaders again by their class and arguments, and saves their state."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from rpcdataloader import ResumableDistributedSampler, RPCDataloader, RPCDataset
from rpcdataloader.errors import LocalProtocolError
from tests.support.library import Library
from tests.support.origins import run_ranks
from tests.support.training import Points, collate, flat

lightning = Library("pytorch_lightning")
models = Library("tests.support.lightning_models", needs="pytorch_lightning")

pytestmark = [
    pytest.mark.usefixtures("clean_client"),
    # Its advice (more workers, a validation loader), and deprecated names that it uses.
    pytest.mark.filterwarnings(r"ignore::Warning:pytorch_lightning\..*"),
    # On a machine of a cluster.
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def make_trainer(**options):
    names = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    quiet = dict.fromkeys(names, False)
    return lightning.Trainer(accelerator="cpu", log_every_n_steps=1, **{**quiet, "max_epochs": 2, **options})


ORDERED = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_fit_validate_and_predict_load_with_workers(make_loader, shared_server):
    model = models.Model(shared_server.pid)
    trainer = make_trainer(num_sanity_val_steps=1)
    trainer.fit(model, make_loader(shuffle=True, persistent_workers=True, num_workers=2), make_loader())
    for epoch in (model.trained.indices[:4], model.trained.indices[4:]):
        assert sorted(flat(epoch)) == list(range(10))
    assert model.validated.indices == ORDERED[:1] + 2 * ORDERED
    # To predict, Lightning makes the loader again, to know indices.
    trainer.predict(model, make_loader(drop_last=True))
    assert model.predicted.indices == ORDERED


@pytest.mark.parametrize("owner", ["module", "data module"])
def test_loader_may_be_made_in_a_hook(make_loader, shared_server, owner):
    def make():
        return make_loader(num_workers=2)

    model = models.Model(shared_server.pid) if owner == "data module" else models.WithLoader(shared_server.pid, make)
    make_trainer().fit(model, datamodule=models.Data(make) if owner == "data module" else None)
    assert model.trained.indices == 2 * ORDERED


def test_checkpoint_of_a_later_epoch_goes_on_in_its_order_and_on_as_many_ranks(shared_server, tmp_path):
    """Lightning begins the pass before it tells the sampler which epoch this is."""
    checkpoint = tmp_path / "checkpoint"

    def make_loader(kind, num_ranks):
        dataset = RPCDataset(shared_server.address, Points, 12)
        return RPCDataloader(dataset, 2, sampler=kind(dataset, num_ranks, 0), collate_fn=collate)

    def resume(kind, num_ranks):
        model = models.Model(shared_server.pid)
        loader = make_loader(kind, num_ranks)
        make_trainer(num_sanity_val_steps=0).fit(model, loader, ckpt_path=checkpoint, weights_only=False)
        return model.trained.indices

    whole = models.Model(shared_server.pid, save=(4, checkpoint))
    make_trainer(num_sanity_val_steps=0).fit(whole, make_loader(DistributedSampler, 2))
    assert len(whole.trained.indices) == 6
    assert resume(DistributedSampler, 2) == whole.trained.indices[4:]
    with pytest.raises(ValueError, match=r"on rank 0 of 2, and here is .*0 of 1: .* ResumableDistributedSampler"):
        resume(DistributedSampler, 1)
    # One batch of each rank was delivered.
    sampler = DistributedSampler(range(12), 1, 0)
    sampler.set_epoch(1)
    assert flat(resume(ResumableDistributedSampler, 1)) == list(sampler)[4:]


def test_checkpoint_of_a_loader_without_workers_says_what_to_use(tmp_path):
    loader = RPCDataloader(Points(10), 3, collate_fn=collate)
    with pytest.raises(LocalProtocolError, match=r"this loader has no workers, .* give num_workers=1"):
        make_trainer().fit(models.Plain(save=(6, tmp_path / "checkpoint")), loader)


class OwnBatchSampler(BatchSampler):
    """Lightning makes those again whose class is not torch's."""


def train_as_rank(address, server, store):
    """What each process of a job is given: loaders of every kind, each with a sampler for its rank."""
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    # Lightning finds what torchrun would have set, and that the processes know each other.
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK=rank, GROUP_RANK="0", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="test")
    os.environ.update(MASTER_ADDR="unused", MASTER_PORT="0")
    own = RPCDataset(address, Points, 12)
    loaders = [
        RPCDataloader(own, 2, shuffle=True, collate_fn=collate),
        RPCDataloader(Points(12), 2, collate_fn=collate, workers=address, num_workers=1, persistent_workers=True),
        RPCDataloader(own, batch_sampler=OwnBatchSampler(RandomSampler(range(12)), 3, False), collate_fn=collate),
    ]
    seen = []
    for loader in loaders:
        model = models.Model(int(server))
        trainer = make_trainer(devices=2, strategy="ddp")
        trainer.fit(model, loader)
        assert isinstance(trainer.train_dataloader, RPCDataloader)
        assert isinstance(trainer.train_dataloader.batch_sampler.sampler, DistributedSampler)
        seen.append(model.trained.indices)
    torch.distributed.destroy_process_group()
    return seen


def test_processes_of_a_job_share_the_samples(library_zygote, shared_server, tmp_path):
    ranks = run_ranks(library_zygote, train_as_rank, 2, shared_server.address, shared_server.pid, tmp_path / "store")
    for kind, (one, two) in enumerate(zip(*ranks, strict=True)):
        num_batches = (3, 3, 2)[kind]
        assert len(one) == len(two) == 2 * num_batches
        for epoch in (slice(num_batches), slice(num_batches, None)):
            assert sorted(flat(one[epoch] + two[epoch])) == list(range(12))
            assert one[epoch] != two[epoch]
        # Each epoch has another order: Lightning tells its sampler which one it is.
        assert one[:num_batches] != one[num_batches:]
