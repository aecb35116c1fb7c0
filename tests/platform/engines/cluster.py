"""A cluster of several nodes in one machine: ``python -m tests.platform.engines.cluster ray|dask NUM_NODES``.

Prints its address. A line on standard input adds a node; the end of the input ends the cluster.
"""

from __future__ import annotations

import sys

CPUS = 2  # of each node


def run_ray(num_nodes: int) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=CPUS)
        print(cluster.address, flush=True)
        for _line in sys.stdin:
            cluster.add_node(num_cpus=CPUS)
    finally:
        cluster.shutdown()


def run_dask(num_nodes: int) -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=num_nodes, threads_per_worker=CPUS, dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        for _line in sys.stdin:
            num_nodes += 1
            cluster.scale(num_nodes)


if __name__ == "__main__":
    {"ray": run_ray, "dask": run_dask}[sys.argv[1]](int(sys.argv[2]))
