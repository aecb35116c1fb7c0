"""``rpc_async``: run a function in a worker of a node server."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.futures import Future

from rpcdataloader.client.client import get_client
from rpcdataloader.client.worker import RemoteWorker, RRef
from rpcdataloader.errors import ConnectionLostError, RPCError, RPCTimeoutError
from rpcdataloader.host.locks import Event
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.exceptions import add_note, copy_to_raise
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.pickling import result_of
from rpcdataloader.wire.slabs import pinned_allocator


def rpc_async(
    host: str,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    pin_memory: bool = False,
    rref: bool = False,
    timeout: float | None = 120.0,
) -> Future[Any]:
    """Run ``func(*args, **kwargs)`` on a node server and return at once.

    All calls of this process to one node server run in the same worker process there, so that they can share objects
    (see ``rref``); one after the other, in their order.

    Args:
        host: ``host:port``, ``[v6]:port`` or ``unix:/path`` of the node server.
        func: Any callable: imported there by its name, or else sent by value (lambdas, closures, ``__main__``).
        args: Positional arguments. An :class:`RRef` anywhere inside them becomes its object.
        kwargs: Keyword arguments, likewise.
        pin_memory: Receive the tensors of the result into page-locked memory.
        rref: Keep the result on the worker, and return an :class:`RRef` to it.
        timeout: Seconds for the whole call, including connecting; None for no limit.

    Returns:
        A future of the result. It fails with ``func``'s exception, whose cause shows the remote traceback; with
        :class:`~rpcdataloader.errors.RPCTimeoutError`; with :class:`~rpcdataloader.errors.ConnectionLostError` if the
        worker dies, or has died with the object of an RRef among the arguments; with
        :class:`~rpcdataloader.errors.SerializationError` if the result cannot be sent; or with
        :class:`~rpcdataloader.errors.ConnectError` if there is no server. Its callbacks (``then``) run in up to
        64 threads of their own, so they may wait for further calls, and for a few further callbacks; those of
        :func:`torch.futures.collect_all` may not.

    Raises:
        ValueError: The address is malformed, or the timeout is not positive.
        TypeError: ``func`` is not callable.
        SerializationError: An argument cannot be pickled.
        LocalProtocolError: An RRef among the arguments lives in another worker.
    """
    address = Address.parse(host)
    if not callable(func):
        raise TypeError(f"func must be callable, but is a {type(func).__name__}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds or None, but is {timeout}")
    if args is not None and not isinstance(args, Iterable):
        raise TypeError(f"args must be a list or tuple of arguments, but is a {type(args).__name__}")
    timeout = None if timeout is None else float(timeout)  # numpy's may be too coarse for a clock
    start = time.monotonic()
    client = get_client()
    allocator = (pinned_allocator() if pin_memory else None) or client.allocator
    call = Call(func, tuple(args or ()), dict(kwargs or {}), keep=rref)
    future = _CallFuture()
    unsettled: list[Future[Any]] = [future]  # one of two threads gets it, as a pop is atomic

    def complete(reply: Message | RPCError) -> None:
        try:
            result = result_of(reply, allocator)
            if rref:
                result = RRef(worker, result, worker.connection.release)
        except BaseException as exc:
            _fail(unsettled, exc)
        else:
            with contextlib.suppress(IndexError):
                unsettled.pop().set_result(result)

    try:
        worker = client.node(address).rpc_worker()
        number = worker.call(call, complete, allocator)
    except ConnectionLostError as exc:
        _fail(unsettled, exc)
        return future
    if timeout is not None:
        # The alarm must not keep the arguments, which may contain RRefs.
        name = getattr(func, "__qualname__", None) or repr(func)
        remaining = start + timeout - time.monotonic()
        timer = client.alarm.call_after(remaining, lambda: _expire(worker, number, unsettled, name, timeout))
        Future.add_done_callback(future, lambda _future: timer.cancel())
    return future


class _CallFuture(Future[Any]):
    """Runs callbacks where they may wait: the thread that completes a call receives the answers of all others.

    Waits so that signal handlers run, Ctrl-C included.
    """

    def wait(self) -> Any:
        if not self.done():
            completed = Event()
            super().add_done_callback(lambda _future: completed.set())
            completed.wait()
        return super().wait()

    def set_exception(self, result: Any) -> None:
        # torch would raise the one that it keeps, each time, where no garbage collector looks: that and its traceback
        # would keep the variables of all who have waited, and so this future.
        result.__traceback__ = None

        def raise_copy(kept: Any) -> None:
            raise copy_to_raise(kept)

        self._set_unwrap_func(raise_copy)
        self.set_result(result)

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        following = _CallFuture()

        def run() -> None:
            try:
                result = callback(self)
            except BaseException as exc:
                # The frames of a callback that fails are told in a note, as the exception is kept without them.
                add_note(exc, "in a callback:\n" + "".join(traceback.format_tb(exc.__traceback__)[1:]))
                following.set_exception(exc if isinstance(exc, Exception) else RuntimeError(repr(exc)))
            else:
                following.set_result(result)

        self._once_done(run)
        return following

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        self._once_done(lambda: callback(self))

    def _once_done(self, run: Callable[[], None]) -> None:
        if self.done():
            run()  # at once, as torch does
        else:
            callers = get_client().callers
            super().add_done_callback(lambda _future: callers.call(run))


def _fail(unsettled: list[Future[Any]], error: BaseException) -> None:
    with contextlib.suppress(IndexError):
        unsettled.pop().set_exception(error)


def _expire(worker: RemoteWorker, number: int, unsettled: list[Future[Any]], name: str, timeout: float) -> None:
    worker.connection.cancel(number)
    state = "" if worker.number else " (still connecting)"
    _fail(unsettled, RPCTimeoutError(f"{name} on {worker.name}{state} did not finish within {timeout:g} s"))
