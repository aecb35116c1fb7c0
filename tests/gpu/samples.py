"""What the tests on a real device load."""

import torch

# Of the GPU: about a quarter of a second, in which the processor does thousands of times what the tests do meanwhile.
CYCLES = 500_000_000


class Samples:
    """64 samples of the kinds that batches consist of."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"large": torch.full((3, 128, 128), float(index)), "small": torch.tensor(index), "index": index}
