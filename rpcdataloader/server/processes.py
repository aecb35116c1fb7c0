"""Forked processes: their stages, their exit status, their end with their parent, and the loop that waits for them.

Linux only: children are watched through descriptors, without signal handlers and ``waitpid(-1)``, which could disturb
the caller of :func:`~rpcdataloader.server.run.run_worker`.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import logging
import math
import multiprocessing.process
import multiprocessing.util
import os
import random
import sched
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from multiprocessing.connection import Connection
from typing import Any

# Under its full name: numpy imports it at first use, which would be in every fork.
import numpy.random
import torch

from rpcdataloader.host.forks import Part, at_fork


class Life(enum.Enum):
    """Stages of a process, which only advance."""

    SERVING = "takes requests"
    DRAINING = "finishes its requests, as the node server ends"
    RETIRING = "finishes its requests, as it has served its share of tasks"
    ENDED = "has ended, or is being ended"


logger = logging.getLogger("rpcdataloader.server")

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_F_SETSIG = 10  # fcntl(2)
_SYS_PIDFD_OPEN = 434  # the same on every architecture that torch runs on
_libc = ctypes.CDLL(None, use_errno=True)

# Seconds until a retry when the system has no room for a process, a thread or a descriptor.
EXHAUSTED_PAUSE = 1.0
FIRST_THREAD_PAUSE = 0.05

# Above the trainer's and the node server's own: the kernel ends a worker first when memory runs out.
WORKER_OOM_SCORE = 500

_QUIET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Loop:
    """Waits for descriptors and times, in a node server or a session."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._timers = sched.scheduler(time.monotonic)

    def watch(self, descriptor: int, handler: Callable[[], object], events: int = select.POLLIN) -> None:
        """Call ``handler`` on any of ``events``. The handler must cope with finding nothing to read."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Stop calling its handler; idempotent. Call this before the number of a closed descriptor is used again."""
        if self._handlers.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def call_after(self, seconds: float, function: Callable[[], object]) -> sched.Event:
        """Call ``function`` after ``seconds``; returns the timer."""
        return self._timers.enter(seconds, 0, function)

    def cancel(self, timer: sched.Event | None) -> None:
        """Drop a timer, unless it is over."""
        with contextlib.suppress(ValueError):
            self._timers.cancel(timer)  # type: ignore[arg-type]  # None is not there, as one that is over

    def wait(self, timeout: float | None = None) -> None:
        """Wait for events and times, at most ``timeout`` seconds, and call their handlers and functions."""
        seconds = math.inf if timeout is None else timeout
        for timer in self._timers.queue[:1]:
            seconds = min(seconds, timer.time - time.monotonic())
        for descriptor, _events in self._poll.poll(None if seconds == math.inf else max(0.0, seconds) * 1000 + 1):
            # An earlier handler of this round may have dropped the descriptor, or even reused its number.
            if handler := self._handlers.get(descriptor):
                handler()
        self._timers.run(blocking=False)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """SIGTERM, SIGINT and SIGHUP (a closed terminal), as a descriptor that becomes readable when one comes."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._read

    def take(self) -> set[int]:
        """The signals that have come; the same one twice at once counts once, as for Python's handlers."""
        try:
            return set(os.read(self._read, 4096)).intersection(STOP_SIGNALS)
        except BlockingIOError:
            return set()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hear them, which is only possible in the main thread; SIGUSR1 and SIGUSR2 of a job manager do nothing.

        Afterwards all are ignored: a process that has drained still takes torch apart, and then exits with status 0.
        """
        # A signal that the kernel gives to another thread, such as one of a preloaded module, does not interrupt poll.
        # The descriptor comes first, so that no signal is lost.
        wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _QUIET_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup says
                signal.signal(number, _do_nothing)
        try:
            yield
        finally:
            for number in _QUIET_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(wakeup)
            self.close()

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class Leads(enum.Enum):
    """What a process leads, and what ends with it."""

    NOTHING = "no other process"
    GROUP = "a process group"
    SESSION = "a session, as of setsid(2), with several process groups"


class Process:
    """A forked child.

    Attributes:
        ended: How the process ended, in words, once :meth:`reap` has seen it.
        leads: What ends with it: programs that user code has started, unless they have left that.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.ended: str | None = None
        self.leads = Leads.NOTHING
        self._descriptor = descriptor
        self._killed_because: str | None = None

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        return self._descriptor

    def kill(self, reason: str) -> None:
        """End it at once, with a reason for :meth:`reap`; without effect on a process that has ended."""
        if self.ended is None:
            self._killed_because = self._killed_because or reason
            # Its id is not reused before the process is reaped, which happens here alone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reap(self, *, wait: float = 0.0) -> str | None:
        """Collect the exit status, within ``wait`` seconds; returns how the process ended, in words, if it has."""
        if self.ended is None:
            if wait > 0:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLIN)
                poll.poll(wait * 1000)
            self._end_programs()
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Another waitpid(-1) took it: run_worker shares its process with a caller.
                self.ended = "ended"
            else:
                if pid:
                    self.ended = describe_exit(status)
                    if self._killed_because is not None and os.WIFSIGNALED(status):
                        self.ended = f"was ended: {self._killed_because}"
            if self.ended is not None:
                os.close(self._descriptor)
        return self.ended

    def _end_programs(self) -> None:
        """End what the process has led, if it has ended. Until it is reaped, its number names nothing else."""
        if self.leads is Leads.NOTHING:
            return
        with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
            if self.leads is Leads.GROUP:
                os.killpg(self.pid, signal.SIGKILL)
                return
            end_session(self.pid)


def end_session(leader: int) -> None:
    """End the processes of the session, as of setsid(2), of a process that has ended."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getsid(int(pid)) == leader:
                os.kill(int(pid), signal.SIGKILL)


def describe_exit(status: int) -> str:
    """Put a status of ``waitpid`` into words: ``"was killed by SIGKILL (perhaps out of memory)"``."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {
        "SIGKILL": " (perhaps out of memory)",
        "SIGALRM": " (its end, or a sample that a stream takes again, took too long)",
        "SIGBUS": " (perhaps shared memory or a file that shrank)",
        "SIGSEGV": " (a crash in compiled code)",
    }.get(name, "")
    return f"was killed by {name}{hint}"


def fork(run: Callable[[], None]) -> Process:
    """Run ``run`` in a forked child, which dies with this process and leaves by ``os._exit``.

    In the child, signals that a terminal or job manager sends to all processes have no effect: its parent tells it to
    end. Programs that user code starts there can be terminated as usual. Its standard input is empty. Its global random
    generators are seeded afresh. Torch uses one thread, because a fork of a process that used OpenMP hangs in the next
    parallel region.

    Raises:
        OSError: The system has no room for another process or descriptor.
    """
    parent = os.getpid()
    _flush_output()  # or the child would write our buffers again
    # The child holds the other end, for a kernel without pidfds.
    end, held = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _QUIET_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            os.close(end)
            _run_child(run, parent)
    except OSError:
        os.close(end)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(held)
    try:
        descriptor = open_pidfd(pid)
    except OSError:
        # Linux 5.3 has them, but not the 4.18 of RHEL 8. The pipe is worse: an orphan of the child keeps it open, and
        # hides the child's end.
        return Process(pid, end)
    os.close(end)
    return Process(pid, descriptor)


def _do_nothing(_number: int, _frame: object) -> None:
    """Handle a broadcast signal: do nothing."""


_forking = threading.local()  # signals that this thread had blocked before


def _hold_signals() -> None:
    # A signal before the fork hears again must not be lost: its sender may wait for an end.
    _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _QUIET_SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)


def _hear_again() -> None:
    """Restore usual signals in a fork that user code makes; our own forks still hold them."""
    for number in _QUIET_SIGNALS:
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _release_signals()


at_fork(Part.SIGNALS, before=_hold_signals, in_parent=_release_signals, in_child=_hear_again)


def _run_child(run: Callable[[], None], parent: int) -> None:
    status = 1
    try:
        be_child(parent)
        # Proxies of a Manager, for example, open a connection of their own.
        multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]
        run()
        status = 0
    except BaseException:
        # A child never returns into its parent's code.
        logger.exception("a forked process ended by an error")
    finally:
        leave(status)


def be_child(parent: int | None) -> None:
    """Be a child as :func:`fork` says.

    Args:
        parent: Process whose death ends this one, strictly speaking the death of the thread that has forked it; None
            for a child that is told otherwise.
    """
    if parent is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    for number in _QUIET_SIGNALS:
        # Not SIG_IGN, which programs and forks of user code would inherit: they could not be terminated, and a
        # multiprocessing.Pool would wait for that without limit.
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup says
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _empty_stdin()
    torch.set_num_threads(1)
    _seed_afresh()


def end_with(pipe: Connection) -> None:
    """Let the kernel kill this process group when the writing end of a pipe is closed, as by the death of its owner.

    ``PR_SET_PDEATHSIG`` acts at the end of the *thread* that has forked this process, and on this process alone:
    programs that user code has started would stay. It comes later, too, as a process that dies closes its files first.
    """
    # Opened anew: what follows holds for all processes that have inherited the same file.
    own = os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)


def leave(status: int) -> None:
    """End this process, without exit functions."""
    _flush_output()
    os._exit(status)


def start_thread(name: str, target: Callable[[], None]) -> None:
    """Start a daemon thread; waits while the system has no room for one, as it had for this process."""
    pause = FIRST_THREAD_PAUSE
    while True:
        try:
            threading.Thread(target=target, name=name, daemon=True).start()
            return
        except RuntimeError:
            time.sleep(pause)
            pause = min(2 * pause, EXHAUSTED_PAUSE)


def name_process(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show, of 15 characters at most; forks inherit it."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def number_process(number: int) -> None:
    """Let multiprocessing know this fork as a process of its own: code tells workers apart by its name or identity.

    Whether it may have children, and its key, stay those of its parent.
    """
    made: Any = multiprocessing.process.BaseProcess(name=f"Process-{number}")
    made._identity = (number,)
    multiprocessing.process._current_process = made  # type: ignore[attr-defined]


def open_pidfd(pid: int) -> int:
    # The Pythons of conda and uv lack it: they are built against headers older than the running kernels.
    descriptor: int = _libc.syscall(_SYS_PIDFD_OPEN, pid, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        # None without such a descriptor; a caller may have closed or replaced it.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def _empty_stdin() -> None:
    """Keep user code, and programs that it starts, from reading the terminal or a socket."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)


def _seed_afresh() -> None:
    """Seed by chance, for what has no seed of its own: samples and batches have, and changes of an RPCDataset."""
    seed = int.from_bytes(os.urandom(8), "little")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def keep_freed_memory() -> None:
    """Let malloc keep freed memory, instead of returning it to the kernel and faulting it in again per sample.

    glibc raises these thresholds when large chunks of its heap are freed. A worker whose batches live in recycled
    buffers never frees one, and then returns the memory of every decoded image: 735 page faults and 1 ms of kernel
    time each, for a photograph of 640x427.
    """
    _libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    _libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def give_back_freed_memory() -> None:
    """Give the kernel what malloc keeps free."""
    _libc.malloc_trim(0)


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Let the kernel end this process by SIGALRM, unless the block ends in time."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def prefer_for_oom() -> None:
    """Ask the kernel to choose this process first when memory runs out; ignored where forbidden."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(WORKER_OOM_SCORE))


def reap_orphans(known: Container[int]) -> None:
    """Collect ended children that this process has not forked.

    A node server may be process 1 of a container, as without ``docker run --init``: it then inherits the workers of
    ended sessions, and orphans of user code. Processes whose ids are ``known`` are reaped elsewhere.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in known:
            os.waitpid(ended.si_pid, 0)


def num_threads() -> int:
    """Number of threads that a fork would miss, including those of C libraries."""
    # A progress bar of tqdm starts one that only adjusts its refresh rate.
    missed_by_nobody = [thread for thread in threading.enumerate() if type(thread).__module__ == "tqdm._monitor"]
    return len(os.listdir("/proc/self/task")) - len(missed_by_nobody)


def has_more_threads(before: int) -> bool:
    """Whether threads have stayed since this process had that many."""
    return num_threads() > before and name_threads() != "" and num_threads() > before


# A thread that was joined is one of the process's for a moment longer; those of C libraries stay.
_LOOKS_AT_THREADS = 20


def name_threads() -> str:
    """Names of the threads of this process, in words; empty without any."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    for _look in range(_LOOKS_AT_THREADS):
        if (num_others := len(os.listdir("/proc/self/task")) - 1 - len(names)) <= 0:
            break
        time.sleep(0.001)
    return ", ".join([*names, f"{num_others} of C libraries"] if num_others > 0 else names)
