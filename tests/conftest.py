"""What tests of real processes share: real node servers on ports of the kernel's choice, and a look at what is left."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.zygote import Zygote, use_huge_pages

if TYPE_CHECKING:
    from rpcdataloader.wire.slabs import PageablePool
    from tests.support.quick import QuickServer

# Slow machines multiply every limit of the tests.
TIMEOUT_SCALE = float(os.environ.get("RPCDATALOADER_TEST_TIMEOUT_SCALE", "1"))

# Less than the 10 s that the fixture below gives a server that does not answer, and far more than anything takes that
# waits for nobody, on a machine that has other things to do.
AT_ONCE = 8 * TIMEOUT_SCALE

# Each session would import them with the modules of tests, or each server: 0.2 to 2 s.
IMPORTED_OFTEN = ("encodings.idna", "h5py", "hypothesis", "numpy.random", "pytest")

# Scripts would import them for seconds, each time (an optimizer, torch._dynamo); elsewhere, each fork would cost more.
LIBRARIES = (
    *("sklearn.datasets", "torch._dynamo", "tqdm"),
    *("accelerate", "datasets", "pytorch_lightning", "transformers.trainer", "webdataset"),
)


# A shell without job control lets what it starts in the background ignore Ctrl-C, and so would all programs of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The default up to Python 3.13. Tests of other start methods, and of Python's default, say so.
multiprocessing.set_start_method("fork", force=True)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A plain ``pytest`` runs in parallel, in more processes than there are cores: tests wait half of the time."""
    is_plain = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if is_plain and config.getoption("numprocesses", 0) is None:
        config.option.numprocesses = min(len(os.sched_getaffinity(0)) + 2, 8)
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Importing hundreds of modules leaves next to no garbage; and many tests fork a process of a parallel run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        if hasattr(session.config, "workerinput"):
            gc.freeze()
            use_huge_pages()


# They import the libraries above, or start processes that do.
OF_LIBRARIES = {
    f"test_{name}.py"
    for name in ("accelerate", "compiled_loop", "docs", "examples", "library_streams", "lightning", "transformers")
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs the tests of a file, and one those of all files that need large libraries."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduling = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope
    scheduling._split_scope = lambda test: "libraries" if Path(file_of(test)).name in OF_LIBRARIES else file_of(test)
    return scheduling


def wait_until(
    condition: Callable[[], object], seconds: float = 30.0, what: str | Callable[[], str] = "", interval: float = 0.005
) -> None:
    """Wait for something that another process does, with a deadline.

    Looks every ``interval`` seconds, and less often if a look takes long: others need the CPU that it takes.
    """
    begin = time.monotonic()
    deadline = begin + seconds * TIMEOUT_SCALE
    while not condition():
        now = time.monotonic()
        if now > deadline:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {seconds} s: {said or condition}")
        time.sleep(max(interval, 3 * min(now - begin, 0.3)))
        begin = time.monotonic()


def leased_bytes(pool: PageablePool) -> int:
    """Bytes of a pool that are in use, in units of whole mappings; what has come back is among the free ones then.

    With the memory of workers on this machine that is in use.
    """
    from rpcdataloader.wire.frames import SharedBlock

    with pool._lock:
        pool._collect()
    # A lease holds its mapping by the finalizer that will return it.
    finalizers = list(weakref.finalize._registry.values())  # type: ignore[attr-defined]
    own = sum(len(each.args[0]) for each in finalizers if getattr(each.func, "__self__", None) is pool._returned)
    blocks = [each.args[0] for each in finalizers if each.args and isinstance(each.args[0], SharedBlock)]
    return own + sum(block.size_bytes for block in blocks)


def stat_of(pid: int) -> list[str]:
    """State, parent, and so on; empty if there is no such process."""
    # Without pathlib and text: all processes of the machine are looked at several times in each of a thousand tests.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        # Before them comes its name, which any process of the machine may choose, in any bytes.
        return file.read().rpartition(b")")[2].decode().split()
    return []


def descendants(pid: int) -> list[int]:
    """Live processes below ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat_of(int(entry))) and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended and waits for its parent to notice does not count."""
    return stat_of(pid)[:1] not in ([], ["Z"])


def process_name(pid: int) -> str:
    """What ``ps -o comm`` shows; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def occupied(server_pid: int) -> list[int]:
    """Live processes below a node server; a gate that was just forked still has the name of that."""
    return [pid for pid in descendants(server_pid) if process_name(pid) != process_name(server_pid)]


READY_LINE = re.compile(r"rpcdataloader ready (.+) num_workers=(\d+) pid=(\d+)\n")


@pytest.fixture(scope="session", autouse=True)
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One secret for all servers and clients of the tests, and short waits for servers that are not there."""
    # The same path for tests beside examples, for which this is another fixture: servers of both name it.
    path = tmp_path_factory.getbasetemp() / "secret" / "token"
    path.parent.mkdir(exist_ok=True)
    path.touch(0o600)
    path.write_text("the secret of the test suite 0123456789\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RPCDATALOADER_TOKEN_FILE", str(path))
        patch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(10 * TIMEOUT_SCALE))
        patch.delenv("RPCDATALOADER_WORKERS", raising=False)
        yield path


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Tests that collect garbage need not visit what libraries and other tests have made: half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def own_modules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the modules that a file of tests uses, and no others, for passes to send, and to search for changes.

    A script has imported some modules of its own; a process that runs tests, all of them: a third of its time.
    """
    from rpcdataloader.host.sources import recorder

    used = _modules_used_by(request.module.__name__)
    others = {name: sys.modules[name] for name in recorder.look() if name not in used}
    recorder._others |= others
    yield
    for name in others:
        recorder._others.pop(name, None)


def _modules_used_by(name: str) -> set[str]:
    """A module of the tests or examples, and those from which it has objects, and so on."""
    used, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        if name in sys.modules and name not in used and name.partition(".")[0] in ("tests", "examples"):
            used.add(name)
            for value in vars(sys.modules[name]).values():
                of = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
                waiting += [of] if isinstance(of, str) else []
    return used


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of certificates, with keys that only we can read: git does not keep modes."""
    folder = tmp_path_factory.mktemp("certificates")
    for path in (Path(__file__).parent / "support" / "certificates").glob("*.[pk]e[my]"):
        (folder / path.name).touch(0o600)
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _zygote_with(*modules: str) -> Any:
    """A fixture that starts scripts quickly, with those of these modules that are installed."""

    begun: list[Zygote] = []  # one for tests beside examples, too, for which this is another fixture

    @pytest.fixture(scope="session")
    def start(token_file: Path, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Zygote:  # noqa: ARG001
        if not begun:
            found = [name for name in modules if importlib.util.find_spec(name.partition(".")[0])]
            begun.append(Zygote(tmp_path_factory.mktemp("scripts"), *found))
            pytestconfig.add_cleanup(begun[0].close)
        return begun[0]

    return start


zygote = _zygote_with(*IMPORTED_OFTEN)
library_zygote = _zygote_with(*IMPORTED_OFTEN, *LIBRARIES)


@pytest.fixture(scope="session")
def shared_server(zygote: Zygote) -> Iterator[QuickServer]:
    """A node server with two workers for tests that do it no harm."""
    yield from _serve_to_the_end(zygote)


@pytest.fixture(scope="session")
def second_server(zygote: Zygote) -> Iterator[QuickServer]:
    """Another one."""
    yield from _serve_to_the_end(zygote)


@pytest.fixture(scope="session")
def unix_server(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuickServer]:
    """One on a Unix socket, which shares memory with its clients."""
    yield from _serve_to_the_end(zygote, "--host", f"unix:{tmp_path_factory.mktemp('unix')}/socket")


def _serve_to_the_end(zygote: Zygote, *options: str) -> Iterator[QuickServer]:
    from tests.support.quick import quick_server  # it imports this file

    with quick_server(zygote, "--num-workers", "2", "--max-connections", "64", *options) as server:
        yield server
        assert server.end(signal.SIGTERM) == 0, server.log


def close_client() -> None:
    """End this process's sessions, as its end does."""
    from rpcdataloader.client import client

    client.close_client()


@pytest.fixture
def clean_client() -> Iterator[None]:
    """Close this process's client after the test, and check that no thread, descriptor or process of it is left."""
    close_client()
    before = set(os.listdir("/proc/self/fd"))
    processes = set(descendants(os.getpid()))
    yield
    close_client()
    # Its sessions and workers, and whatever else the test has started.
    wait_until(lambda: not _left_behind(processes), what=lambda: f"processes left behind: {_left_behind(processes)}")
    # A connection that was lost before is not waited for: its receiver may have a few instructions to go.
    wait_until(lambda: not _threads(), what=lambda: f"threads left, and where they are: {_threads()}")
    # A queue of torch's workers is closed by a thread, which no list has any more by then.
    wait_until(lambda: not _left_open(before), what=lambda: f"descriptors left: {_left_open(before)}")


def _left_behind(before: set[int]) -> dict[int, str]:
    return {pid: process_name(pid) for pid in set(descendants(os.getpid())) - before}


def _left_open(before: set[str]) -> dict[str, str]:
    targets = {fd: _target(fd) for fd in set(os.listdir("/proc/self/fd")) - before}
    ours = ("socket:", "pipe:", "anon_inode:[eventfd]")
    return {fd: target for fd, target in targets.items() if target.startswith(ours)}


def _threads() -> dict[str, list[str]]:
    """Ours that run, each with its last calls."""
    frames = sys._current_frames()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("rpcdl")]
    return {each.name: traceback.format_stack(frames[each.ident])[-4:] for each in ours if each.ident in frames}


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
