"""What a child process sees that a fork has made of this one."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable


def status_of_fork(function: Callable[[], object]) -> int:
    """Run a function in a forked child; returns its exit status, which is 0 unless the function raised something."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs is a failure
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
