"""Images in folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image


class ImageFolder:
    """A folder with one subfolder of images per class."""

    def __init__(self, root: str, transform: Callable[[Image.Image], Any]) -> None:
        self.classes = sorted(path.name for path in Path(root).iterdir() if path.is_dir())
        self.samples = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted(Path(root, name).iterdir())
        ]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label
