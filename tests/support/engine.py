"""An engine for pools whose actors are objects of this process, each with a real node server."""

from __future__ import annotations

import subprocess

from rpcdataloader.pools.pool import NodeActor, Pool, ServerOrder
from rpcdataloader.wire.credentials import Credentials
from tests.conftest import TIMEOUT_SCALE

SECRET = Credentials(b"a secret that the environment does not have", "a test")


def here():
    return "127.0.0.1"


def start_actor(*launch: str) -> NodeActor:
    """An actor whose server has one worker."""
    return NodeActor(ServerOrder(SECRET, 1, launch, here))


def process_of(actor: NodeActor) -> subprocess.Popen[bytes]:
    """Its node server."""
    return actor._server.process


def pool_on(engine: Engine, size: int | tuple[int, int], *launch: str) -> Pool:
    """So many node servers with one worker each."""
    return Pool(engine, size, ServerOrder(SECRET, 1, launch, here), 60 * TIMEOUT_SCALE)


class Node:
    def __init__(self, actor):
        self._actor = actor

    def poll(self):
        return self._actor.address()

    def stop(self):
        self._actor.stop()
        return True

    def release(self):
        self._actor = None


class Engine:
    """Starts node servers in this process."""

    advice = ""

    def __init__(self):
        self.pids = []

    def start(self, order):
        actor = NodeActor(order)
        self.pids.append(process_of(actor).pid)
        return Node(actor)

    def publish(self, addresses):
        pass

    def reader(self):
        return tuple

    def withdraw(self):
        pass

    def close(self):
        pass
