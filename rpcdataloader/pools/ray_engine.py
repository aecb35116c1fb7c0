"""Node servers as actors of Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rpcdataloader.pools.pool import NodeActor, Order, Pool, import_engine, make_order


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
        num_nodes: Number of node servers; or the least, for which the block waits, and the most, such as ``(2, 8)``.
            Below the most, Ray's autoscaler sees the demand.
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
    order = make_order(cpus_per_node, launch, _find_host)
    return Pool(_Ray(options), num_nodes, order, timeout)


def _find_host() -> str:
    return str(import_engine("ray", "ray").util.get_node_ip_address())


class _Board:
    """An actor that holds the addresses of a pool."""

    def __init__(self) -> None:
        self._addresses: tuple[str, ...] = ()

    def write(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)

    def read(self) -> tuple[str, ...]:
        return self._addresses


def _read(board: Any) -> Sequence[str]:
    """Read the board, in any process of the cluster."""
    return import_engine("ray", "ray").get(board.read.remote(), timeout=10.0)  # type: ignore[no-any-return]


class _Ray:
    """The engine."""

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

    def start(self, order: Order) -> _Node:
        actor = self._ray.remote(NodeActor).options(num_cpus=order.num_workers, **self._options)
        return _Node(self._ray, actor.remote(order))

    def publish(self, addresses: Sequence[str]) -> None:
        self._board.write.remote(addresses)

    def reader(self) -> Callable[[], Sequence[str]]:
        return functools.partial(_read, self._board)

    def close(self) -> None:
        self._ray.kill(self._board)


class _Node:
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
