"""Forking, and what is known of a child afterwards: that it dies with its parent, and why it ended.

Linux only: children are watched through pid descriptors, so no signal handler and no ``waitpid(-1)`` can disturb
the process that calls :func:`~rpcdataloader.server.node.run_worker`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import signal
from collections.abc import Callable

import numpy as np
import torch

logger = logging.getLogger("rpcdataloader.server")

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_libc = ctypes.CDLL(None, use_errno=True)

# Above the trainer's and the node server's own: when memory runs out, a worker goes first.
WORKER_OOM_SCORE = 500

_QUIET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Process:
    """A forked child.

    Attributes:
        pid: Its process id.
        ended: How it ended, once :meth:`reap` has seen it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: str | None = None
        self._descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        return self._descriptor

    def kill(self) -> None:
        """End it at once; does nothing to a process that has ended."""
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def reap(self) -> str | None:
        """Collect the exit status, if there is one yet: how the process ended, in words."""
        if self.ended is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Somebody else's waitpid(-1) took it: run_worker shares its process with a caller.
                self.ended = "ended"
            else:
                if pid:
                    self.ended = describe_exit(status)
            if self.ended is not None:
                os.close(self._descriptor)
        return self.ended


def describe_exit(status: int) -> str:
    """Put the status of ``waitpid`` into words: ``"was killed by SIGKILL (perhaps out of memory)"``."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {
        "SIGKILL": " (perhaps out of memory)",
        "SIGBUS": " (perhaps shared memory or a file that shrank)",
        "SIGSEGV": " (a crash in compiled code)",
    }.get(name, "")
    return f"was killed by {name}{hint}"


def fork(run: Callable[[], None]) -> Process:
    """Run ``run`` in a forked child, which dies with this process and leaves by ``os._exit``.

    In the child the signals that a terminal or a job manager sends to everybody are ignored: it learns of an end from
    its parent. Its global random generators are seeded afresh and torch uses one thread, because a fork of a process
    that used OpenMP hangs in the next parallel region.
    """
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _QUIET_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _be_child(run, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Process(pid)


def _be_child(run: Callable[[], None], parent: int) -> None:
    status = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        for number in _QUIET_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _QUIET_SIGNALS)
        torch.set_num_threads(1)
        _seed_afresh()
        run()
        status = 0
    except BaseException:
        # A child never returns into its parent's code, whatever happened.
        logger.exception("a forked process ended by an error")
    finally:
        os._exit(status)


def _seed_afresh() -> None:
    seed = int.from_bytes(os.urandom(8), "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, instead of giving it back to the kernel and faulting it in again per sample.

    glibc raises these thresholds by itself when large chunks of its heap are freed. A worker whose batches live in
    recycled buffers never frees one, and then returns the memory of every decoded image: 735 page faults and 1 ms of
    kernel time each, for a photograph of 640x427.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        _libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def prefer_for_oom() -> None:
    """Ask the kernel to choose this process first when memory runs out; ignored where that is not allowed."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(WORKER_OOM_SCORE))


def num_threads() -> int:
    """How many threads this process has, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def open_files() -> set[tuple[int, int]]:
    """Regular files that this process holds open, as (device, inode): what forked workers would share offsets of."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if status.st_mode & 0o170000 == 0o100000:
            found.add((status.st_dev, status.st_ino))
    return found
