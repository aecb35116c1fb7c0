"""Crops and flips, which draw from torch's generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Resize:
    """To ``size`` pixels of the shorter side."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        scale = self.size / min(image.size)
        return image.resize((round(scale * image.width), round(scale * image.height)))


class RandomResizedCrop(Resize):
    def __call__(self, image: Image.Image) -> Image.Image:
        scale, x, y = torch.rand(3).tolist()
        side = (0.3 + 0.7 * scale) * min(image.size)
        left, top = x * (image.width - side), y * (image.height - side)
        return image.resize((self.size, self.size), box=(left, top, left + side, top + side))


class CenterCrop(Resize):
    def __call__(self, image: Image.Image) -> Image.Image:
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return image.crop((left, top, left + self.size, top + self.size))


class RandomHorizontalFlip:
    def __call__(self, image: Image.Image) -> Image.Image:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else image


class PILToTensor:
    def __call__(self, image: Image.Image) -> torch.Tensor:
        return torch.tensor(np.asarray(image)).permute(2, 0, 1)
