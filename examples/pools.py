"""The same training with workers on this machine, in a Ray cluster or in a Dask cluster.

python examples/pools.py local|ray|dask
"""

import contextlib
import sys

import torch
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader, RPCDataset


class Noisy(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.randn(8) + index % 2, torch.tensor([index % 2.0])


def train(workers):
    torch.manual_seed(7)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = RPCDataloader(RPCDataset(workers, Noisy), batch_size=16, shuffle=True)
    for _epoch in range(2):
        for samples, labels in loader:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(samples), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"loss {loss.item():.9f}, weights {model.weight.sum().item():.9f}")


@contextlib.contextmanager
def start_pool(kind):
    if kind == "ray":
        import ray

        from rpcdataloader.pools import ray_pool

        with ray.init(), ray_pool(num_nodes=2, cpus_per_node=1) as workers:
            yield workers
    elif kind == "dask":
        from distributed import Client

        from rpcdataloader.pools import dask_pool

        with Client(n_workers=2, threads_per_worker=1) as client, dask_pool(client, num_nodes=2) as workers:
            yield workers
    else:
        yield "local:2"


if __name__ == "__main__":
    with start_pool(sys.argv[1]) as workers:
        train(workers)
