"""The Trainer of Transformers trains with our workers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.integrations import TrainerMixin
from tests.support.library import Library
from tests.support.training import Points, PointStream, Seen, collate, flat

transformers = Library("transformers", needs="accelerate")

pytestmark = pytest.mark.usefixtures("clean_client")


@functools.cache
def trainer_class() -> Any:
    """What the documentation says."""

    class RPCTrainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc, name-defined]  # it is Any
        pass

    return RPCTrainer


class Model(torch.nn.Module):
    """Looks at what it is given."""

    def __init__(self, server):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained, self.evaluated = Seen(server), Seen(server)
        self.num_columns = set()

    def forward(self, x, index, fetched, collated, server, num_columns):
        batch = {"index": index, "fetched": fetched, "collated": collated, "server": server}
        (self.trained if self.training else self.evaluated).add(batch)
        self.num_columns.update(num_columns.tolist())
        return {"loss": self.layer(x).square().mean(), "logits": index.float()}


@pytest.fixture
def model(shared_server):
    return Model(shared_server.pid)


@pytest.fixture
def make_trainer(shared_server, tmp_path):
    """Trainers whose datasets have ten samples and seven."""

    def make(model, kind="RPCDataset", train=None, **options):
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        sizes = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 4, "num_train_epochs": 2}
        # A worker imports transformers if it is to remove columns, which takes seconds.
        others = {"use_cpu": True, "dataloader_pin_memory": False, "remove_unused_columns": False}
        options = {**quiet, **sizes, **others, **options}
        if kind == "RPCDataset":
            train = RPCDataset(shared_server.address, Points, 10) if train is None else train
            evaluation = RPCDataset(shared_server.address, Points, 7)
        else:
            train, evaluation = Points(10), Points(7)
        data = {"data_collator": collate, "train_dataset": train, "eval_dataset": evaluation}
        trainer = trainer_class()(model, transformers.TrainingArguments(str(tmp_path), **options), **data)
        if kind != "RPCDataset":
            trainer.workers = shared_server.address
        return trainer

    return make


@pytest.mark.parametrize("kind", ["RPCDataset", "ordinary dataset"])
def test_train_evaluate_and_predict_load_with_workers(make_trainer, model, kind):
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 1}
    removes = kind == "RPCDataset"
    trainer = make_trainer(model, kind, eval_strategy="epoch", remove_unused_columns=removes, **options)
    trainer.train()
    # In the order that the Trainer gives.
    theirs = transformers.Trainer.get_train_dataloader(trainer)
    for epoch, expected in enumerate((model.trained.indices[:4], model.trained.indices[4:])):
        theirs.set_epoch(epoch)
        assert list(theirs.batch_sampler) == expected
    for epoch in (model.trained.indices[:4], model.trained.indices[4:]):
        assert sorted(flat(epoch)) == list(range(10))
    assert model.evaluated.indices == 2 * [[0, 1, 2, 3], [4, 5, 6]]
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.predictions[-1].tolist() == list(range(7))
    assert model.num_columns == {3 if removes else 4}


def test_arguments_of_the_loader_are_honoured(make_trainer, model):
    trainer = make_trainer(
        model,
        dataloader_num_workers=2,
        dataloader_drop_last=True,
        dataloader_prefetch_factor=3,
        dataloader_in_order=False,
        dataloader_persistent_workers=True,
    )
    loader = trainer.get_train_dataloader().base_dataloader
    assert type(loader) is RPCDataloader
    options = loader.num_workers, loader.prefetch_factor, loader.in_order, loader.persistent_workers
    assert options == (2, 3, False, True)
    assert len(loader) == 3
    assert loader.collate_fn is collate
    assert trainer.get_eval_dataloader() is trainer.get_eval_dataloader()


@pytest.mark.parametrize("kind", ["RPCDataset", "ordinary dataset"])
def test_all_workers_are_kept_for_the_next_epoch(make_trainer, model, kind, monkeypatch):
    """torch refuses to keep 0 workers; here, 0 stands for all of them."""
    pids = []
    monkeypatch.setattr(model.trained, "add", lambda batch: pids.append(batch["fetched"][0].item()))
    trainer = make_trainer(model, kind, dataloader_num_workers=0, dataloader_persistent_workers=True)
    trainer.train()
    assert set(pids[:4]) & set(pids[4:])
    trainer.evaluate()
    assert trainer.get_eval_dataloader() is trainer.get_eval_dataloader()
    loader = trainer.get_train_dataloader().base_dataloader
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (0, True, 2)
    assert trainer.args.dataloader_num_workers == 0


@pytest.mark.parametrize("kind", ["RPCDataset", "ordinary dataset"])
def test_resumed_training_skips_and_loads_the_rest_with_workers(make_trainer, model, shared_server, kind, tmp_path):
    make_trainer(model, kind, save_strategy="steps", save_steps=6).train()
    assert len(model.trained.indices) == 8

    rest = Model(shared_server.pid)
    trainer = make_trainer(rest, kind)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert rest.trained.indices == model.trained.indices[6:]


def test_iterable_dataset(make_trainer, model, shared_server):
    dataset = RPCDataset(shared_server.address, PointStream, 10)
    make_trainer(model, train=dataset, dataloader_num_workers=2, max_steps=4).train()
    assert model.trained.indices == [[0, 2, 4], [1, 3, 5], [6, 8], [7, 9]]
