"""Node servers as actors of Dask, one on each of its workers that have the threads."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from rpcdataloader.pools.node import NodeActor, Order
from rpcdataloader.pools.pool import Pool, import_engine, make_order


def dask_pool(
    client: Any,
    num_nodes: int | tuple[int, int] = 1,
    cpus_per_node: int = 1,
    *,
    launch: Sequence[str] = (),
    timeout: float = 600.0,
) -> Pool:
    """Node servers in a Dask cluster: ``with dask_pool(client, num_nodes=4, cpus_per_node=32) as workers:``.

    Each is on a Dask worker with at least as many threads, the least busy ones first, and occupies that many of them
    until the block ends.

    Args:
        client: A ``distributed.Client``, not an asynchronous one.
        num_nodes: How many; or the least, for which the block waits, and the most, such as ``(2, 8)``. While there are
            fewer than the most, the scheduler has tasks that wait, and ``adapt`` adds workers.
        cpus_per_node: Threads that each takes from its Dask worker, and workers that it offers.
        launch: More options of ``python -m rpcdataloader.launch``.
        timeout: Seconds to wait for the least number of node servers.

    Raises:
        ImportError: Dask is missing.
        ValueError: An argument makes no sense.
        ConnectError: When the block begins: the node servers did not start.
    """
    order = make_order(cpus_per_node, launch, _find_host)
    return Pool(_Dask(client), num_nodes, order, timeout)


def _find_host() -> str:
    distributed = import_engine("distributed", "dask")
    return str(distributed.comm.get_address_host(distributed.get_worker().address))


class _DaskActor(NodeActor):
    """A node server that tasks on the same Dask worker can wait for."""

    def __init__(self, order: Order, name: str) -> None:
        super().__init__(order)
        _actors[name] = self


_actors: WeakValueDictionary[str, _DaskActor] = WeakValueDictionary()


def _hold(name: str) -> None:
    """Occupy a thread of this Dask worker until the node server has ended."""
    actor = _actors.get(name)
    ended = None if actor is None else actor.ended
    del actor
    if ended is not None:
        ended.wait()


class _Reader:
    """Asks the scheduler, from any process of the cluster."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> Sequence[str]:
        distributed = import_engine("distributed", "dask")
        return distributed.Variable(self._name, distributed.get_client()).get(timeout=10.0)  # type: ignore[no-any-return]


class _Dask:
    """The engine."""

    def __init__(self, client: Any) -> None:
        self._distributed = import_engine("distributed", "dask")
        if not isinstance(client, self._distributed.Client) or client.asynchronous:
            raise ValueError(f"client must be a distributed.Client that is not asynchronous, but is {client!r}")
        self._client = client
        self._name = f"rpcdataloader-pool-{secrets.token_hex(4)}"
        self._board = self._distributed.Variable(self._name, client)
        self._nodes: list[_Node] = []
        # Tasks that no Dask worker can run, of the kind that occupies threads for long: adapt() adds workers for them.
        self._wishes: list[Any] = []
        self._count = 0
        self.advice = "see client.scheduler_info(): do Dask workers have as many threads?"

    def start(self, order: Order) -> _Node | None:
        infos = self._client.scheduler_info(n_workers=-1)["workers"]
        tasks = self._client.processing()
        taken = {node.worker for node in self._nodes if not node.is_released}
        free = [
            worker
            for worker, info in infos.items()
            if worker not in taken and info["status"] == "running" and info["nthreads"] >= order.num_workers
        ]
        if not free:
            if not self._wishes:
                self._wishes = _occupy(self._client, "", order.num_workers, resources={"rpcdataloader": 1})
            return None
        self._forget_wishes()
        self._count += 1
        worker = min(free, key=lambda worker: len(tasks.get(worker, ())))
        self._nodes = [node for node in self._nodes if not node.is_released]
        self._nodes.append(_Node(self._client, order, worker, f"{self._name}-{self._count}"))
        return self._nodes[-1]

    def publish(self, addresses: Sequence[str]) -> None:
        self._board.set(list(addresses))

    def reader(self) -> Callable[[], Sequence[str]]:
        return _Reader(self._name)

    def close(self) -> None:
        self._forget_wishes()
        self._board.delete()

    def _forget_wishes(self) -> None:
        self._client.cancel(self._wishes, force=True)
        self._wishes = []


def _occupy(client: Any, name: str, num_threads: int, **where: Any) -> list[Any]:
    keys = [("rpcdataloader-hold", secrets.token_hex(8)) for _ in range(num_threads)]
    return [client.submit(_hold, name, key=key, pure=False, **where) for key in keys]


class _Node:
    """
    Attributes:
        worker: Address of its Dask worker.
    """

    def __init__(self, client: Any, order: Order, worker: str, name: str) -> None:
        self._client = client
        self._num_threads = order.num_workers
        self.worker = worker
        self._name = name
        self.is_released = False
        self._where = {"workers": [worker], "allow_other_workers": False, "priority": 100}
        self._future = client.submit(_DaskActor, order, name, actor=True, key=name, **self._where)
        self._holds: list[Any] = []
        self._actor: Any = None
        self._question: Any = None
        self._address: str | None = None

    def poll(self) -> str | None:
        if self._actor is None and self._future.status != "pending":
            self._actor = self._future.result()  # raises what the constructor has raised
            self._holds = _occupy(self._client, self._name, self._num_threads, **self._where)
        if self._actor is not None:
            if self._question is None:
                self._question = self._actor.address()
            elif self._question.done():
                self._address, self._question = self._question.result(), None
        return self._address

    def stop(self) -> bool:
        if self._actor is not None:
            self._actor.stop()
        return self._actor is not None

    def release(self) -> None:
        self.is_released = True
        self._client.cancel([self._future, *self._holds], force=True)
        self._actor = self._question = None
