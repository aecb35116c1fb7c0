"""A worker's unsent messages, and the timing of its requests."""

from __future__ import annotations

import queue
import resource
import threading
import time
from collections.abc import Callable

from rpcdataloader.fetch.samples import whereabouts
from rpcdataloader.host.resources import CpuUse, read
from rpcdataloader.wire.channel import Outgoing
from rpcdataloader.wire.messages import Stages

# Limit in bytes of received requests: little against the memory of a node with many workers, and enough to keep a
# network busy.
MAX_WAITING_BYTES = 64 << 20


class Outbox:
    """Messages for the sender, a thread that is started for the first of them: replies, warnings, the last GOAWAY.

    A batch is sent while the next one is computed: a loader limits its own requests. Of remote calls, a script can make
    thousands at once, with results of any size, so each result is sent before the next call.

    Args:
        send: Function that sends a message; must not raise.

    Attributes:
        num_waiting: Number of messages that are not sent.
    """

    def __init__(self, send: Callable[[Outgoing], None]) -> None:
        self._send = send
        # Reentrant: a destructor may run anywhere, and warn.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._messages: queue.SimpleQueue[Outgoing] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_waiting = 0

    def put(self, message: Outgoing) -> None:
        """Queue a message; never blocks, unless the system has no room for a thread: then it is sent by this one."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="rpcdl-send", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    self._send(message)
                    return
                self._thread = thread
            self.num_waiting += 1
            self._messages.put(message)

    def join(self) -> None:
        """Wait until all messages are sent."""
        with self._lock:
            self._changed.wait_for(lambda: not self.num_waiting)

    def _run(self) -> None:
        while True:
            message = self._messages.get()
            self._send(message)
            with self._lock:
                self.num_waiting -= 1
                self._changed.notify_all()
            # This frame must not keep the reply while it waits for the next one.
            del message


def _cpu_seconds() -> float:
    """CPU time of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _runqueue_seconds() -> float:
    """Seconds that the main thread has waited for a CPU (sched-stats, "/proc/<pid>/schedstat")."""
    numbers = read("/proc/self/schedstat").split()
    return int(numbers[1]) / 1e9 if len(numbers) > 1 else 0.0


class Meter:
    """Timing of those requests that ask for it, about 50 per second at most: one at a time, in the main thread."""

    def __init__(self) -> None:
        self._idle = self._cpu = self._fetch_cpu = self._runqueue = self._encode = 0.0
        self._cpus = CpuUse()

    def begin(self, idle: float) -> None:
        """Start timing a request, for which the worker has waited ``idle`` seconds."""
        self._idle = idle
        self._runqueue, self._fetch_cpu = _runqueue_seconds(), 0.0
        whereabouts.fetched = self._fetched
        self._cpu = _cpu_seconds()

    def _fetched(self) -> None:
        whereabouts.fetched, self._fetch_cpu = None, _cpu_seconds() - self._cpu

    def encodes(self) -> None:
        """Note that the result is ready to be pickled."""
        self._encode = time.perf_counter()

    def end(self) -> bytes:
        """Return the stages of a reply that is ready to be sent."""
        encode = time.perf_counter() - self._encode
        cpu, runqueue = _cpu_seconds() - self._cpu, _runqueue_seconds() - self._runqueue
        cpus, busy_cpus = self._cpus.look(time.monotonic())
        stages = Stages(
            idle=self._idle,
            encode=encode,
            cpu=cpu,
            runqueue=runqueue,
            fetch_cpu=self._fetch_cpu,
            cpus=cpus,
            busy_cpus=busy_cpus,
        )
        return stages.pack()
