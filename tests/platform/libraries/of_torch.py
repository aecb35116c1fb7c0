"""Products of matrices, with torch's own threads."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


def write(folder):
    """A matrix."""
    torch.save(torch.rand(600, 600, generator=torch.Generator().manual_seed(0)), f"{folder}/matrix.pt")


class Products(Dataset):
    """The constructor multiplies with several threads, and so would a sample, if a worker had them."""

    def __init__(self, source):
        torch.set_num_threads(2)
        matrix = torch.load(f"{source}/matrix.pt", weights_only=True)
        self.matrix = (matrix @ matrix).softmax(0)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return (self.matrix[index] * self.matrix).exp().sum(0)
