"""Node servers as actors of Ray, and of Dask: there one on each Dask worker with enough threads."""

from __future__ import annotations

import functools
import importlib
import secrets
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from rpcdataloader.pools.pool import NodeActor, Pool, ServerOrder
from rpcdataloader.wire.credentials import Credentials


def ray_pool(
    num_nodes: int | tuple[int, int] = 1,
    cpus_per_node: int = 1,
    *,
    launch: Sequence[str] = (),
    timeout: float = 600.0,
    **options: Any,
) -> Pool:
    """Node servers in a Ray cluster: ``with ray_pool(num_nodes=4, cpus_per_node=32) as workers:``.

    Call ``ray.init()`` first. Ray chooses the machines, and starts nothing else on the CPUs until the block ends.

    Args:
        num_nodes: Number of node servers; or the least, for which the block waits, and the most, such as ``(1, 8)``.
            Between them, it follows what the training loops want; Ray's autoscaler sees the demand.
        cpus_per_node: CPUs that each takes from Ray, and workers that it offers.
        launch: More options of ``python -m rpcdataloader.launch``.
        timeout: Seconds to wait for the least number of node servers.
        **options: Options of the actors, as for Ray's ``.options()``: ``runtime_env``, ``resources``,
            ``scheduling_strategy`` (``"SPREAD"`` unless given) and so on.

    Raises:
        ImportError: Ray is missing.
        ValueError: An argument is invalid, or Ray is not connected.
        ConnectError: When the block begins: the node servers did not start.
    """
    order = make_order(cpus_per_node, launch, _ray_host)
    return Pool(_Ray(options), num_nodes, order, timeout)


def _ray_host() -> str:
    return str(import_engine("ray", "ray").util.get_node_ip_address())


class _Board:
    """An actor that holds the addresses of a pool."""

    def __init__(self) -> None:
        self._addresses: tuple[str, ...] = ()

    def write(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)

    def read(self) -> tuple[str, ...]:
        return self._addresses


def _read_board(board: Any) -> Sequence[str]:
    """Read the board, in any process of the cluster."""
    return import_engine("ray", "ray").get(board.read.remote(), timeout=10.0)  # type: ignore[no-any-return]


class _Ray:
    """The engine of Ray."""

    advice = "see ray status: do machines have that many CPUs free?"

    def __init__(self, options: dict[str, Any]) -> None:
        self._ray = ray = import_engine("ray", "ray")
        if not ray.is_initialized():
            raise ValueError("Ray is not connected: call ray.init() before ray_pool()")
        self._options = {"scheduling_strategy": "SPREAD", **options}
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        # Beside the trainer: it is lost with the trainer alone.
        self._board = ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()

    def start(self, order: ServerOrder) -> _RayNode:
        actor = self._ray.remote(NodeActor).options(num_cpus=order.num_workers, **self._options)
        return _RayNode(self._ray, actor.remote(order))

    def publish(self, addresses: Sequence[str]) -> None:
        self._board.write.remote(addresses)

    def reader(self) -> Callable[[], Sequence[str]]:
        return functools.partial(_read_board, self._board)

    def withdraw(self) -> None:
        pass  # actors wait for their machines themselves

    def close(self) -> None:
        self._ray.kill(self._board)


class _RayNode:
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._address: str | None = None
        self._has_begun = False
        self._question = actor.address.remote()

    def poll(self) -> str | None:
        answered, _ = self._ray.wait([self._question], timeout=0)
        if answered:
            self._address = self._ray.get(self._question)
            self._has_begun = True
            self._question = self._actor.address.remote()
        return self._address

    def stop(self) -> bool:
        if self._has_begun:
            self._actor.stop.remote()
        return self._has_begun

    def release(self) -> None:
        # Kills a server that has not ended yet, in the middle of its work.
        self._ray.kill(self._actor)


def dask_pool(
    client: Any,
    num_nodes: int | tuple[int, int] = 1,
    cpus_per_node: int = 1,
    *,
    launch: Sequence[str] = (),
    timeout: float = 600.0,
) -> Pool:
    """Node servers in a Dask cluster: ``with dask_pool(client, num_nodes=4, cpus_per_node=32) as workers:``.

    Each occupies ``cpus_per_node`` threads of a Dask worker, the least busy ones first, until the block ends.

    Args:
        client: A synchronous ``distributed.Client``.
        num_nodes: Number of node servers; or the least, for which the block waits, and the most, such as ``(1, 8)``.
            Between them, it follows what the training loops want. Tasks wait at the scheduler, for which ``adapt``
            adds Dask workers.
        cpus_per_node: Threads that each takes from its Dask worker, and workers that it offers.
        launch: More options of ``python -m rpcdataloader.launch``.
        timeout: Seconds to wait for the least number of node servers.

    Raises:
        ImportError: Dask is missing.
        ValueError: An argument is invalid.
        ConnectError: When the block begins: the node servers did not start.
    """
    order = make_order(cpus_per_node, launch, _dask_host)
    return Pool(_Dask(client), num_nodes, order, timeout)


def _dask_host() -> str:
    distributed = import_engine("distributed", "dask")
    return str(distributed.comm.get_address_host(distributed.get_worker().address))


class _DaskActor(NodeActor):
    """A node server that tasks on the same Dask worker can wait for."""

    def __init__(self, order: ServerOrder, name: str) -> None:
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


def _read_variable(name: str) -> Sequence[str]:
    """Read the addresses, in any process of the cluster."""
    distributed = import_engine("distributed", "dask")
    return distributed.Variable(name, distributed.get_client()).get(timeout=10.0)  # type: ignore[no-any-return]


class _Dask:
    """The engine of Dask.

    Attributes:
        taken: Dask workers that have a node server.
    """

    advice = "see client.scheduler_info(): do Dask workers have that many threads?"

    def __init__(self, client: Any) -> None:
        distributed = import_engine("distributed", "dask")
        if not isinstance(client, distributed.Client) or client.asynchronous:
            raise ValueError(f"client must be a distributed.Client that is not asynchronous, but is {client!r}")
        self.client = client
        self.taken: set[str] = set()
        self._name = f"rpcdataloader-pool-{secrets.token_hex(4)}"
        self._board = distributed.Variable(self._name, client)
        # Tasks that no Dask worker can run, and that would occupy threads for long: adapt() adds workers for them.
        self._wishes: list[Any] = []

    def start(self, order: ServerOrder) -> _DaskNode | None:
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        free = [
            name
            for name, worker in workers.items()
            if name not in self.taken and worker["status"] == "running" and worker["nthreads"] >= order.num_workers
        ]
        if not free:
            self._wishes = self._wishes or self.occupy("", order.num_workers, resources={"rpcdataloader": 1})
            return None
        self.withdraw()
        tasks = self.client.processing()
        return _DaskNode(self, order, min(free, key=lambda name: len(tasks.get(name, ()))))

    def occupy(self, actor: str, num_threads: int, **where: Any) -> list[Any]:
        """Run a task in each of several threads, for as long as the node server of ``actor`` lives."""
        keys = [("rpcdataloader-hold", secrets.token_hex(8)) for _ in range(num_threads)]
        return [self.client.submit(_hold, actor, key=key, **where) for key in keys]

    def publish(self, addresses: Sequence[str]) -> None:
        self._board.set(list(addresses))

    def reader(self) -> Callable[[], Sequence[str]]:
        return functools.partial(_read_variable, self._name)

    def withdraw(self) -> None:
        if self._wishes:
            self.client.cancel(self._wishes, force=True)
            self._wishes = []

    def close(self) -> None:
        self.withdraw()
        self._board.delete()


class _DaskNode:
    def __init__(self, engine: _Dask, order: ServerOrder, worker: str) -> None:
        self._engine = engine
        self._num_threads = order.num_workers
        self._worker = worker
        self._where = {"workers": [worker], "priority": 100}
        self._name = f"rpcdataloader-node-{secrets.token_hex(8)}"
        self._future = engine.client.submit(_DaskActor, order, self._name, actor=True, key=self._name, **self._where)
        self._holds: list[Any] = []
        self._actor: Any = None
        self._question: Any = None
        self._address: str | None = None
        engine.taken.add(worker)

    def poll(self) -> str | None:
        if self._actor is None and self._future.status != "pending":
            self._actor = self._future.result()  # raises the constructor's exception
            self._holds = self._engine.occupy(self._name, self._num_threads, **self._where)
        if self._actor is not None:
            # A call to an actor whose Dask worker has gone is answered after 30 s.
            if self._future.status != "finished":
                raise RuntimeError(f"the Dask worker {self._worker} has gone")
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
        self._engine.taken.discard(self._worker)
        self._engine.client.cancel([self._future, *self._holds], force=True)
        self._actor = self._question = None


def make_order(cpus_per_node: int, launch: Sequence[str], find_host: Callable[[], str]) -> ServerOrder:
    """Describe each node server, with a secret made for this pool alone.

    Raises:
        ValueError: An option is invalid.
    """
    if cpus_per_node < 1:
        raise ValueError(f"cpus_per_node must be at least 1, but is {cpus_per_node}")
    if isinstance(launch, str):
        raise ValueError(f"launch must be a list of options, such as ['--preload', 'numpy'], but is {launch!r}")
    credentials = Credentials(secrets.token_urlsafe(32).encode(), "the pool")
    return ServerOrder(credentials, cpus_per_node, tuple(launch), find_host)


def import_engine(name: str, extra: str) -> ModuleType:
    """Import an engine's package.

    Raises:
        ImportError: The package is missing; the message names the extra to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ImportError(f"{extra}_pool needs {name}: pip install 'rpcdataloader[{extra}]' ({exc})") from exc
