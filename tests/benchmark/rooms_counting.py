"""Counts which functions of the package are entered, in all threads of a process; see ``rooms.py``."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch.utils.data import Dataset

import rpcdataloader

_PACKAGE = os.path.dirname(os.path.abspath(rpcdataloader.__file__)) + os.sep

# A function that fewer batches enter is no part of the way of each.
_LEAST_SHARE = 1 / 20


class Profile:
    """The calls of one process, between :meth:`clear` and :meth:`describe`."""

    def __init__(self) -> None:
        self._calls: Counter[CodeType] = Counter()

    def follow_new_threads(self) -> None:
        """Count in the threads that start from now on; in forks, too."""
        threading.setprofile(self._note)

    def follow_this_thread(self) -> None:
        """Count in the calling thread."""
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            self._calls[frame.f_code] += 1

    def clear(self) -> None:
        """Begin to count."""
        self._calls.clear()

    def describe(self, num_batches: int) -> dict[str, dict[str, float]]:
        """Calls per batch, by file of the package and function."""
        found: dict[str, dict[str, float]] = {}
        for code, calls in self._calls.copy().items():
            if code.co_filename.startswith(_PACKAGE) and calls > num_batches * _LEAST_SHARE:
                functions = found.setdefault(code.co_filename.removeprefix(_PACKAGE), {})
                name = f"{code.co_name}:{code.co_firstlineno}"  # the names of comprehensions are all the same
                functions[name] = functions.get(name, 0.0) + calls / num_batches
        return found


_profile = Profile()  # of a worker


class CountedIntegers(Dataset):
    """Samples are their indices. The worker that loads them writes what it has called into a file.

    Args:
        first: The sample with which counting begins.
        last: The one with which it ends.
        num_batches: Loaded between these two.
        path: Of the file.
    """

    def __init__(self, first: int, last: int, num_batches: int, path: str) -> None:
        self._first, self._last, self._num_batches, self._path = first, last, num_batches, path
        # This is the session, and the worker's threads are started by Python code of its fork.
        _profile.follow_new_threads()

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        if index == self._first:
            _profile.clear()
        elif index == self._last:
            temporary = Path(f"{self._path}.tmp")
            temporary.write_text(json.dumps(_profile.describe(self._num_batches)))
            temporary.rename(self._path)
        return index


def follow_worker(_worker_id: int) -> None:
    """What a worker does first: its main thread is that of the session, forked."""
    _profile.follow_this_thread()
