"""What Lightning trains in tests."""

from __future__ import annotations

import os
from typing import Any

import pytorch_lightning as lightning
import torch

from tests.support.training import Seen

Module: Any = lightning.LightningModule
DataModule: Any = lightning.LightningDataModule


class Model(Module):  # type: ignore[misc]  # it is Any
    """Looks at what it is given, and stops when it is told to.

    Args:
        save: Number of batches after which a checkpoint is written, and its path.
    """

    def __init__(self, server, save=(0, "")):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained, self.validated, self.predicted = Seen(server), Seen(server), Seen(server)
        self.save = save

    def training_step(self, batch, _number):
        self.trained.add(batch)
        return self.layer(batch["x"]).square().mean()

    def on_train_batch_end(self, *_):
        num_batches, path = self.save
        if len(self.trained.indices) == num_batches:
            self.trainer.save_checkpoint(path)

    def validation_step(self, batch, _number):
        self.validated.add(batch)

    def predict_step(self, batch, _number):
        self.predicted.add(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class WithLoader(Model):
    """A module that makes its loader itself; Lightning wraps the constructors of loaders meanwhile."""

    def __init__(self, server, make_loader):
        super().__init__(server)
        self.train_dataloader = make_loader


class Data(DataModule):  # type: ignore[misc]  # it is Any
    """Makes the loader in place of the module."""

    def __init__(self, make_loader):
        super().__init__()
        self.train_dataloader = make_loader


class Plain(Model):
    """Notes the indices of batches that this process has loaded."""

    def __init__(self, save=(0, "")):
        super().__init__(os.getpid(), save)

    def training_step(self, batch, _number):
        self.trained.indices.append(batch["index"].tolist())
        return self.layer(batch["x"]).square().mean()
