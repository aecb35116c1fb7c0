"""A pool of node servers on the machines of an engine, for as long as a ``with`` block.

One thread of the training process asks the engine for node servers, polls them, and replaces those that are lost. On a
machine of the cluster, an actor of the engine has the node server beside it.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from rpcdataloader.client.discovery import ASK_TIMEOUT, ask_all
from rpcdataloader.errors import ConnectError
from rpcdataloader.host.locks import Condition
from rpcdataloader.starter import Ready, ServerProcess, Told, arguments_of
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import Credentials, forget_credentials, remember_credentials
from rpcdataloader.wire.register import Lookup
from rpcdataloader.wire.status import count_wanted

logger = logging.getLogger("rpcdataloader.pools")

# Seconds between two looks at each node server.
PAUSE = 0.3

# Back-off in seconds before a lost node server is replaced: the first delay, and the longest.
FIRST_DELAY, LAST_DELAY = 0.5, 30.0

# Seconds for node servers to drain, beyond their --grace of 30.
DRAIN_TIMEOUT = 40.0

# Seconds between two questions about what the training loops want.
ASK_PAUSE = 3.0

# Seconds for which node servers are kept that were needed: longer than the time between two reports of a loop.
SHRINK_AFTER = 15.0


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """A pool's description of its node servers."""

    credentials: Credentials  # their secret; not shown by ``repr``
    num_workers: int  # number of workers that each offers, and CPUs that it takes
    launch: tuple[str, ...]  # more options of ``launch``
    find_host: Callable[[], str]  # function for the address at which trainers reach the machine that runs it


class PoolNode(Protocol):
    """A node server that an engine runs, or is about to."""

    def poll(self) -> str | None:
        """Its address; None while it starts. Never waits.

        Raises:
            Exception: The server, or its machine, has ended.
        """

    def stop(self) -> bool:
        """Let it drain, without waiting. False if it never started, so that there is nothing to wait for."""

    def release(self) -> None:
        """Give back what the engine holds for it, dead or alive."""


class PoolEngine(Protocol):
    """The differences between engines.

    Attributes:
        advice: Hint for a user whose engine gives no node servers.
    """

    advice: str

    def start(self, order: ServerOrder) -> PoolNode | None:
        """Request a node server; None to ask again later. Never waits for it."""

    def publish(self, addresses: Sequence[str]) -> None:
        """Make these addresses the result of :meth:`reader`, in every process of the engine."""

    def reader(self) -> Callable[[], Sequence[str]]:
        """A picklable function that returns the addresses published last."""

    def withdraw(self) -> None:
        """Take back requests that :meth:`start` could not meet; called often."""

    def close(self) -> None:
        """Give back everything."""


class PoolWorkers(Lookup, Iterable[str]):
    """Address of a pool's workers: for ``workers=``, here and in other processes of the engine.

    Iterating over it gives the current addresses.
    """

    condition = "in the pool"
    advice = "is the block of the pool still under way?"
    pause = 1.0

    def __init__(self, read: Callable[[], Sequence[str]], credentials: Credentials, anywhere: Any = None) -> None:
        super().__init__("the pool", anywhere or read, credentials)
        self._read = read
        self._credentials = credentials

    @property
    def token(self) -> str:
        """The pool's secret, for ``RPCDATALOADER_TOKEN`` of other processes; it opens nothing else."""
        return self._credentials.secret.decode()

    def _start(self) -> None:
        self._run()  # in a thread that the engine knows; it has a time limit of its own

    def open(self) -> PoolWorkers:
        return PoolWorkers(self._read, self._credentials, self._arguments[0])

    def _look(self) -> tuple[dict[Address, str], dict[str, str]]:
        """In the order in which they came."""
        found = [Address.parse(text) for text in self._read()]
        for address in found:
            remember_credentials(address, self._credentials)
        return dict.fromkeys(found, ""), {}

    def __iter__(self) -> Iterator[str]:
        return iter([str(address) for address in self.look()])

    def __str__(self) -> str:
        return ",".join(self)


class Size:
    """The number of node servers: the most that were needed in the last :data:`SHRINK_AFTER` seconds. Pure.

    Args:
        least, most: Limits of the number.
        num_workers: Number of workers of each.
    """

    def __init__(self, least: int, most: int, num_workers: int) -> None:
        self.number = least
        self._least = least
        self._most = most
        self._num_workers = num_workers
        self._needed: deque[tuple[float, int]] = deque()  # with the time
        self._time = 0.0  # in which it was known what is wanted
        self._asked = 0.0  # last
        self._is_known = False  # then

    def decide(self, now: float, wanted: int) -> int:
        """Return the number of node servers for a number of wanted workers; 0 for an unknown one changes nothing."""
        if wanted:
            if self._is_known:
                self._time += now - self._asked
            self._needed.append((self._time, min(max(math.ceil(wanted / self._num_workers), self._least), self._most)))
            while self._needed[0][0] < self._time - SHRINK_AFTER:
                self._needed.popleft()
            self.number = max(number for _time, number in self._needed)
        self._asked, self._is_known = now, bool(wanted)
        return self.number


def ask_wanted(addresses: Iterable[str], credentials: Credentials) -> int:
    """Ask node servers how many workers the loops of all clients want together; 0 if none is known."""
    return count_wanted(ask_all(map(Address.parse, addresses), lambda _address: credentials))


class Pool:
    """Node servers of an engine; the value of its ``with`` block is for ``workers=``.

    Args:
        num_nodes: Number of node servers; or the least and the most, between which it follows what loops want.
        timeout: Seconds to wait for the least.

    Raises:
        ValueError: ``num_nodes`` is invalid.
    """

    def __init__(
        self, engine: PoolEngine, num_nodes: int | tuple[int, int], order: ServerOrder, timeout: float
    ) -> None:
        match (num_nodes, num_nodes) if isinstance(num_nodes, int) else num_nodes:
            case (int(least), int(most)) if 1 <= least <= most:
                self._least, self._most = least, most
            case _:
                raise ValueError(f"num_nodes must be a number of 1 or more, or two such as (2, 8), but is {num_nodes}")
        self._engine = engine
        self._order = order
        self._timeout = timeout
        self._changed = Condition()
        # Guarded by the condition:
        self._addresses: list[str] = []
        self._problem: Exception | None = None
        self._is_ending = False
        self._size = Size(self._least, self._most, order.num_workers)
        # For the thread, and for close() once that has ended:
        self._nodes: dict[PoolNode, str | None] = {}  # with the address, once it is known; the latest come last
        self._draining: dict[PoolNode, float] = {}  # those no longer wanted, with the time until which they may drain
        self._published: list[str] = []
        self._delay = FIRST_DELAY
        self._retry_at = 0.0
        self._asking = threading.Thread(target=self._ask, name="rpcdl-pool-ask", daemon=True)
        self._thread = threading.Thread(target=self._keep, name="rpcdl-pool", daemon=True)

    def __enter__(self) -> PoolWorkers:
        """Returns when the least number of node servers is ready.

        Raises:
            ConnectError: A node server did not start, or too few were ready before the timeout.
            RuntimeError: The pool was used before.
        """
        if self._thread.ident is not None:
            raise RuntimeError("a pool is for one with block: make another one")
        try:
            self._thread.start()
            if self._least < self._most:
                self._asking.start()
            with self._changed:
                self._changed.wait_for(lambda: self._problem or len(self._addresses) >= self._least, self._timeout)
                if (found := len(self._addresses)) < self._least:
                    raise ConnectError(
                        f"{found} of {self._least} node servers of the pool are ready: "
                        f"{self._problem or f'no more came within {self._timeout:g} s; {self._engine.advice}'}"
                    ) from self._problem
        except BaseException:
            self.close()
            raise
        return PoolWorkers(lambda: tuple(self._addresses), self._order.credentials, self._engine.reader())

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let all node servers drain, and give back what the engine gave. Ctrl-C ends them at once."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        try:
            self._thread.join()
            if self._asking.ident is not None:
                self._asking.join(ASK_TIMEOUT)
            draining = [*self._draining, *(node for node in self._nodes if _stop(node))]
            deadline = time.monotonic() + DRAIN_TIMEOUT
            while (draining := [node for node in draining if _is_there(node)]) and time.monotonic() < deadline:
                time.sleep(PAUSE)
        finally:
            for give_back in *(node.release for node in (*self._draining, *self._nodes)), self._engine.close:
                try:
                    give_back()
                except Exception as exc:  # a vanished cluster has taken all back
                    logger.warning("cannot release the resources of the pool: %s", exc)
            with self._changed:
                self._addresses = []
            # Other servers may get the same ports.
            forget_credentials(self._order.credentials)

    def _keep(self) -> None:
        has_failed = False
        while True:
            try:
                self._look()
                has_failed = False
            except Exception:
                if not has_failed:  # each look fails while it lasts
                    logger.exception("cannot look after the pool")
                has_failed = True
            with self._changed:
                if self._changed.wait_for(lambda: self._is_ending, PAUSE):
                    return

    def _look(self) -> None:
        for node, known in list(self._nodes.items()):
            try:
                if (address := node.poll()) is not None and known is None:
                    del self._nodes[node]
                    self._nodes[node] = address
            except Exception as exc:
                self._lose(node, exc)
        while not self._is_ending and len(self._nodes) < self._size.number and time.monotonic() >= self._retry_at:
            try:
                started = self._engine.start(self._order)
            except Exception as exc:
                self._lose(None, exc)
            else:
                if started is None:
                    self._retry_at = time.monotonic() + FIRST_DELAY
                    break
                self._nodes[started] = None
        if len(self._nodes) >= self._size.number:
            self._engine.withdraw()
        # Those that are too many: first those that still start, then the latest.
        leaving = sorted(self._nodes, key=lambda node: self._nodes[node] is None)[self._size.number :]
        addresses = [address for node, address in self._nodes.items() if address and node not in leaving]
        if addresses != self._addresses:
            with self._changed:
                self._addresses = addresses
                self._changed.notify_all()
        if addresses != self._published:
            self._engine.publish(addresses)
            self._published = addresses
        # They stay in the pool until no loop can find them: the engine may fail to publish that.
        for node in leaving:
            if (left := self._nodes.pop(node)) is not None:
                logger.info("the training loops no longer need the node server %s", left)
            self._draining[node] = time.monotonic() + DRAIN_TIMEOUT if _stop(node) else 0.0
        for node, until in list(self._draining.items()):
            if time.monotonic() >= until or not _is_there(node):
                del self._draining[node]
                self._release(node)

    def _ask(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_ending, ASK_PAUSE):
                    return
                addresses = list(self._addresses)
            wanted = ask_wanted(addresses, self._order.credentials)
            with self._changed:
                self._size.decide(time.monotonic(), wanted)

    def _lose(self, node: PoolNode | None, error: Exception) -> None:
        """Start another one later; None if the engine has refused to start one."""
        address = None if node is None else self._nodes.pop(node)
        # Ray wraps it in twenty lines of traceback and advice.
        problem: Exception = getattr(error, "cause", None) or error
        if address is None:
            # The fault of a server that did not start is likely to be common to all: the block does not begin.
            with self._changed:
                self._problem = problem
                self._changed.notify_all()
        now = time.monotonic()
        if now >= self._retry_at:  # several may be lost at once
            delay = FIRST_DELAY if now >= self._retry_at + LAST_DELAY else self._delay
            self._retry_at, self._delay = now + delay, min(2 * delay, LAST_DELAY)
        if node is not None:
            self._release(node)
        logger.warning(
            "replacing the node server %s: %s",
            address or "that did not start",
            (str(problem).splitlines() or [repr(problem)])[0],
        )

    def _release(self, node: PoolNode) -> None:
        try:
            node.release()
        except Exception as exc:  # any exception of the engine, whose node may be gone
            logger.debug("cannot release a node server: %s", exc)


def _stop(node: PoolNode) -> bool:
    """Let it drain; False if there is nothing to wait for."""
    try:
        return node.stop()
    except Exception:  # a vanished cluster has ended it
        return False


def _is_there(node: PoolNode) -> bool:
    try:
        node.poll()
    except Exception:
        return False
    return True


class NodeActor:
    """Starts a node server on this machine, without waiting for it.

    The server lives as long as the actor: it watches its standard input, which ends with the process of the actor, or
    with the object (Dask drops an actor when its client has gone).
    """

    def __init__(self, order: ServerOrder) -> None:
        # It refers to the record alone, and not to this object.
        self._record = record = _Record()
        self.ended = record.ended
        own = ["--host", order.find_host(), "--port", "0", "--num-workers", str(order.num_workers)]
        options = [*own, "--log-level", "warning", *order.launch, "--token-file", "-"]
        self._server = ServerProcess(
            [sys.executable, *arguments_of(options, os.getcwd())],
            order.credentials.secret,
            record.take,
            cwd=os.sep,
            # The server can import what this process can: engines bring packages along (runtime_env of Ray).
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)},
        )
        self._close = weakref.finalize(self, self._server.close)

    def address(self) -> str | None:
        """Address for clients; None before the server is ready.

        Raises:
            RuntimeError: The server has ended.
        """
        record = self._record
        if record.ended.is_set():
            status = f"a node server has ended with status {self._server.process.returncode}"
            raise RuntimeError(": ".join(filter(None, [status, record.last_words])))
        return record.address

    def stop(self) -> None:
        """Let the server drain and end; does not wait."""
        if self._record.address is None:
            self._server.process.kill()
        self._close()


class _Record:
    """What an actor knows of its node server."""

    def __init__(self) -> None:
        self.address: str | None = None
        self.last_words = ""
        self.ended = threading.Event()

    def take(self, told: Told) -> None:
        match told:
            case Ready(address):
                self.address = address
            case str(text):  # passed on to where the engine collects it
                self.last_words = text
                with suppress(Exception):  # the engine's stream: a full disk, or anything
                    sys.stderr.write(f"{text}\n")
                    sys.stderr.flush()
            case None:
                self.ended.set()
