"""Images, filtered with OpenCV."""

from __future__ import annotations

import cv2
import numpy as np
from torch.utils.data import Dataset


def write(folder):
    """Twelve images, large enough for OpenCV's threads."""
    generator = np.random.default_rng(0)
    for number in range(12):
        cv2.imwrite(f"{folder}/{number:02}.png", generator.integers(0, 256, (600, 800, 3), np.uint8))


class Images(Dataset):
    """The constructor computes the mean of the blurred images, and a sample is blurred, too."""

    def __init__(self, source):
        cv2.setNumThreads(4)
        self.paths = [f"{source}/{number:02}.png" for number in range(12)]
        self.mean = np.mean([self._blurred(number) for number in range(2)], axis=0)

    def _blurred(self, index):
        image = cv2.imread(self.paths[index])
        return cv2.resize(cv2.bilateralFilter(image, 5, 50, 50), (40, 30), interpolation=cv2.INTER_AREA)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self._blurred(index) - self.mean
