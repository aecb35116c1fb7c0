"""The datasets, importable in trainers, in workers of every kind and in servers.

Apart from the photographs they cost next to nothing: the figures are meant to show the loaders. No sample is zero
everywhere: untouched memory from the kernel is one page of zeros, which is read faster than data.
"""

from __future__ import annotations

import io
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from .workloads import JPEGS

# More than any measurement takes, so that it never meets the end of an epoch.
NUM_SAMPLES = 10**9

_SIZE = 224


class Endless(Dataset):
    """Has no end that any measurement meets."""

    def __len__(self) -> int:
        return NUM_SAMPLES


class Images(Endless):
    """Copies of one preallocated image of 3x224x224."""

    def __init__(self, dtype: str) -> None:
        self.image = torch.randint(1, 255, (3, _SIZE, _SIZE)).to(getattr(torch, dtype))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.image.clone()


class Integers(Endless):
    """The index itself."""

    def __getitem__(self, index: int) -> int:
        return index


class Paths(Dataset):
    """A list of paths, as of a dataset of files; a sample is the length of one, and the worker that has read it."""

    def __init__(self, num_paths: int) -> None:
        self.paths = [f"/data/train/class_{i % 1000:04d}/image_{i:09d}.jpg" for i in range(num_paths)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return len(self.paths[index]), _get_worker_id()


class Naps(Endless):
    """Samples that take some time and no work; each is the number of the worker that has slept."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return _get_worker_id()


def _get_worker_id() -> int:
    info = get_worker_info()
    if info is None:
        raise RuntimeError("this sample is read in the training process")
    return info.id


class Ready(Endless):
    """One tensor of so many bytes, always the same: samples that cost nothing but to be sent."""

    def __init__(self, size_bytes: int) -> None:
        self.tensor = torch.full((size_bytes,), 0xA5, dtype=torch.uint8)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensor


class Features(Endless):
    """Dictionaries of many small int64 tensors, each with memory of its own (a clone costs about 1 us)."""

    def __init__(self, num_features: int, num_values: int) -> None:
        self.features = {f"feature_{i}": torch.full((num_values,), i) for i in range(num_features)}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values.clone() for name, values in self.features.items()}


class Photographs(Endless):
    """JPEGs that are read, decoded and cropped at random to uint8 3x224x224.

    Those of the folder that the environment names, and of all below it, or else scikit-learn's two (640x427).
    """

    def __init__(self) -> None:
        folder = os.environ.get(JPEGS)
        self.paths = find_jpegs(Path(folder)) if folder else _find_photographs()

    def __getitem__(self, index: int) -> torch.Tensor:
        crop = _crop(self.paths[index % len(self.paths)].read_bytes())
        return torch.from_numpy(crop.transpose(2, 0, 1).copy())


class Files(Endless):
    """JPEGs of a folder: each is read, decoded, cropped at random and flipped or not, to 3x224x224."""

    def __init__(self, folder: str, dtype: str = "uint8") -> None:
        self.paths = sorted(Path(folder).glob("*.jpg"))
        self.dtype = getattr(torch, dtype)

    def __getitem__(self, index: int) -> torch.Tensor:
        crop = _crop(self.paths[index % len(self.paths)].read_bytes())
        if random.random() < 0.5:
            crop = crop[:, ::-1]
        return torch.from_numpy(crop.transpose(2, 0, 1).copy()).to(self.dtype)


def write_files(folder: Path, number: int) -> None:
    """Write JPEGs of 500x375, as the middle one of ImageNet is, cut from the photographs at random."""
    photographs = [Image.open(path).convert("RGB") for path in _find_photographs()]
    choose = random.Random(0)
    for i in range(number):
        image = photographs[i % len(photographs)]
        left, top = choose.randint(0, image.width - 500), choose.randint(0, image.height - 375)
        image.crop((left, top, left + 500, top + 375)).save(folder / f"{i:04d}.jpg", quality=90)


def find_jpegs(folder: Path) -> list[Path]:
    """Return the JPEGs of a folder, and of those below it."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no .jpg or .jpeg")
    return paths


def _find_photographs() -> list[Path]:
    # Found beside the package instead of by load_sample_images(), which decodes them and takes a second to import.
    import importlib.util

    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the photographs are scikit-learn's: pip install scikit-learn")
    return find_jpegs(Path(spec.origin).parent / "datasets" / "images")


def _crop(content: bytes) -> np.ndarray[Any, Any]:
    """Decode a JPEG, and choose a part of it; one that is too small for that is enlarged."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    if min(image.size) < _SIZE:
        image = image.resize((max(_SIZE, image.width), max(_SIZE, image.height)))
    left, top = random.randint(0, image.width - _SIZE), random.randint(0, image.height - _SIZE)
    return np.asarray(image)[top : top + _SIZE, left : left + _SIZE]


def get_only(samples: list[Any]) -> Any:
    """Collate a batch of one sample that is a batch already."""
    (sample,) = samples
    return sample
