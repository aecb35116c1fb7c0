"""Files of an HTTP server, with fsspec."""

from __future__ import annotations

import fsspec
import numpy as np
from torch.utils.data import Dataset


def write(folder):
    """Twelve files."""
    for number in range(12):
        np.full(1000, number, np.float32).tofile(f"{folder}/{number:02}.bin")


class Kept(Dataset):
    """The constructor lists the files, by an event loop in a thread, and the file system stays."""

    def __init__(self, source):
        self.files = fsspec.filesystem("http")
        self.names = sorted(name for name in self.files.ls(source, detail=False) if name.endswith(".bin"))

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return np.frombuffer(self.files.cat_file(self.names[index]), np.float32).copy()


class OnFirstUse(Kept):
    """Each process has a file system."""

    def __init__(self, source):
        super().__init__(source)
        del self.files

    def __getitem__(self, index):
        self.files = fsspec.filesystem("http")  # the same one in each call
        return super().__getitem__(index)
