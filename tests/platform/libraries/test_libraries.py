"""Datasets that use a library in the constructor and again for each sample, as real ones do: ``make test-libraries``.

Each library has threads, an event loop, or open files of its own, which a fork lacks or shares. Each way to a dataset
gives the batches of torch's workers, or fails as the documents say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.server
import importlib.util
import json
import re
import threading
from collections.abc import Mapping

import pytest

from tests.conftest import TIMEOUT_SCALE

LIBRARIES = ("aiohttp", "cv2", "duckdb", "fsspec", "h5py", "lmdb", "polars", "pyarrow", "tokenizers", "zarr")

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, LIBRARIES)), reason="make test-libraries installs the libraries"
    ),
]

SCRIPT = """
import sys
from tests.platform.libraries import ways

if __name__ == "__main__":
    ways.main(*sys.argv[1:])
"""

WRITE = """
import importlib, sys
importlib.import_module("tests.platform.libraries." + sys.argv[1]).write(sys.argv[2])
"""

TORCH = ("torch fork", "torch forkserver")
OURS = ("instance node", "built node", "built workers", "instance fork", "instance forkserver")

# Seconds for a batch: a deadline, which is met within one; and where a worker waits for threads that it lacks.
LIMIT = 60.0 * TIMEOUT_SCALE
LIMIT_OF_HANGS = 5.0

# What a script ends with.
HANGS = "timed out after 5(.0)? seconds"

# What it prints on standard error. The second is also printed without need: polars has threads once it is imported.
IN_EACH_WORKER = "is built in every worker instead of once"
LACK_THREADS = "workers are forked from a session that has threads of its own"


@dataclasses.dataclass(frozen=True)
class Row:
    """A dataset.

    Attributes:
        fails: How ways end that give no batches.
        warns: Ways whose workers each build the dataset, which a warning says.
    """

    module: str
    name: str
    fails: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warns: tuple[str, ...] = ()

    def __str__(self):
        return f"{self.module}-{self.name}"


CANNOT_BE_SENT = dict.fromkeys(
    ("torch forkserver", "instance node", "instance forkserver"), "cannot (be pickled|pickle)"
)
WAITS_FOR_THREADS = dict.fromkeys(("torch fork", "instance fork", "built node"), HANGS)
NOT_FORK_SAFE = dict.fromkeys(("torch fork", "instance fork"), "This class is not fork-safe")

ROWS = [
    Row("of_polars", "Groups", WAITS_FOR_THREADS),
    Row("of_duckdb", "Kept", CANNOT_BE_SENT),
    Row("of_duckdb", "OnFirstUse"),
    Row("of_fsspec", "Kept", NOT_FORK_SAFE, ("instance node", "built node")),
    Row("of_fsspec", "OnFirstUse"),
    Row("of_h5py", "Kept", CANNOT_BE_SENT, ("built node",)),
    Row("of_h5py", "OnFirstUse"),
    Row("of_lmdb", "Kept", CANNOT_BE_SENT, ("built node",)),
    Row("of_lmdb", "OnFirstUse"),
    Row("of_opencv", "Images"),
    Row("of_pyarrow", "Rows"),
    Row("of_tokenizers", "Texts"),
    Row("of_tokenizers", "TextsInThreads", WAITS_FOR_THREADS),
    Row("of_torch", "Products"),
    Row("of_zarr", "Rows"),
]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_words):
        pass


@pytest.fixture(params=ROWS, ids=str)
def row(request):
    return request.param


@pytest.fixture
def source(row, zygote, tmp_path):
    """The folder with the data of a row, or its address."""
    ended = zygote.start(WRITE, row.module, tmp_path).wait(LIMIT)
    assert ended.status == 0, ended.errors
    with contextlib.ExitStack() as stack:
        if row.module != "of_fsspec":
            yield tmp_path
            return
        handler = functools.partial(_Quiet, directory=tmp_path)
        server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        yield "http://{}:{}".format(*server.server_address)


def test_each_way_gives_the_batches_of_torchs_workers_or_fails_as_they_do(row, source, zygote, shared_server):
    batches = {}
    for way in (*TORCH, *OURS):
        fails = row.fails.get(way)
        limit = LIMIT_OF_HANGS if fails == HANGS else LIMIT
        script = zygote.start(SCRIPT, row.module, row.name, way, source, shared_server.address, limit)
        ended = script.wait(LIMIT + 60)
        said = f"{way}: {ended.errors}"
        assert (IN_EACH_WORKER in ended.errors) == (way in row.warns), said
        if fails is None:
            assert ended.status == 0, said
            batches[way] = json.loads(ended.output)
        else:
            assert ended.status == 1, said
            assert re.search(fails, ended.errors), said
            assert LACK_THREADS in ended.errors or (way, fails) != ("built node", HANGS), said
    expected = next(batches[way] for way in TORCH if way in batches)
    assert len(expected) == 2 * 3
    assert [way for way, found in batches.items() if found != expected] == []
