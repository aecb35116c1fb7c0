"""Mistakes that users make: what is done, which exception comes, and in which words.

After each of them the same process loads as if nothing had happened, and no worker is left; after all of them, no
process, thread, descriptor or file is.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset, Subset

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import (
    AuthenticationError,
    BadSamplesError,
    ConnectError,
    ConnectionLostError,
    LocalProtocolError,
    RemoteProtocolError,
    RPCTimeoutError,
    SerializationError,
)
from tests.conftest import TIMEOUT_SCALE, close_client, process_name, wait_until
from tests.support.quick import quick_server


class Items(Dataset):
    def __init__(self, size=8):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class WithLock(Items):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Nested(Items):
    def __init__(self):
        super().__init__()
        self.readers = {"train": WithLock()}


class Shorter(Items):
    """Has fewer samples than it says."""

    def __getitem__(self, index):
        return list(range(5))[index]


class NoFile(Items):
    def __getitem__(self, index):
        return open(f"images/{index}.png").read()


class Uneven(Items):
    def __getitem__(self, index):
        return torch.zeros(index + 1)


class WithNone(Items):
    def __getitem__(self, index):
        return None if index == 3 else index


class OnCard(Items):
    def __getitem__(self, index):
        return torch.zeros(1, device="cuda")


class NoSetUp(Items):
    def __init__(self):
        pass

    def __getitem__(self, index):
        return index % self.size


class Sleeps(Items):
    def __getitem__(self, index):
        time.sleep(600)


class Crashes(Items):
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        return index


class Broken(Items):
    def __getitem__(self, index):
        raise ValueError(f"image {index} is broken")


class NoDataset:
    def __len__(self):
        return 3


def drop_labels(samples):
    return [sample["label"] for sample in samples]


def no_scratch(_worker):
    raise OSError("no scratch disk")


# A module that only the training process has.
only_here = types.ModuleType("only_here")
exec("class Images:\n    def __len__(self): return 1\n    def __getitem__(self, index): return index", vars(only_here))


class Place:
    """Where mistakes are made.

    Attributes:
        address: Of a node server; ``same`` is another name of the same one.
        nobody: An address at which nobody listens; ``other`` is that of another program.
    """

    def __init__(self, address, nobody, other, folder, monkeypatch, serve):
        self.address, self.nobody, self.other = address, nobody, other
        self.same = address.replace("127.0.0.1", "localhost")
        self.folder, self.monkeypatch, self.serve = folder, monkeypatch, serve
        self.is_impatient = False

    def load(self, dataset=None, **options):
        return list(self.loader(dataset, **options))

    def loader(self, dataset=None, **options):
        return RPCDataloader(Items() if dataset is None else dataset, **{"workers": self.address, **options})

    def dataset(self, made=Items, *args, **options):
        return RPCDataset(self.address, made, *args, **options)

    def in_vain(self, do=None, **options):
        """Without much patience for servers that are not there."""
        self.monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(TIMEOUT_SCALE))
        self.is_impatient = True
        close_client()
        do() if do else self.load(**options)

    def load_with_secret(self, text, mode=0o600):
        """With a secret of its own, from a file."""
        path = self.folder / "token"
        if text is not None:
            path.touch()
            path.chmod(mode)
            path.write_text(text)
        self.monkeypatch.setenv("RPCDATALOADER_TOKEN_FILE", str(path))
        self.load(workers=self.same)

    def load_with_another_python(self):
        """As a process that has one."""
        self.monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
        self.load(workers=self.same)

    def go_on(self, loader, state):
        loader.load_state_dict(state)
        return list(loader)


class Mistake(NamedTuple):
    name: str
    do: Callable[[Place], Any]
    error: Any  # a class, or several
    words: str  # a pattern, of the error and its notes


def go_on_in_a_fork(place):
    iterator = iter(place.loader())
    next(iterator)
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python, about threads
        child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as told:
        text = told.read()
    os.waitpid(child, 0)
    assert len(list(iterator)) == 7  # nothing is lost
    assert text.startswith("LocalProtocolError: ")
    raise LocalProtocolError(text)


def go_on_after_the_server(place):
    server = place.serve()
    loader = RPCDataloader(Items(), workers=server.address, reconnect_timeout=0.2)
    assert len(list(loader)) == 8
    server.stop()
    list(loader)


# fmt: off
MISTAKES = [
    # Where the workers are
    Mistake("no server", lambda p: p.in_vain(workers=p.nobody), ConnectError,
            r"cannot connect to 127\.0\.0\.1:\d+: connection refused \(is `python -m rpcdataloader\.launch` running"),
    Mistake("no server for the dataset", lambda p: p.in_vain(lambda: RPCDataset(p.nobody, Items)), ConnectError,
            "connection refused"),
    Mistake("host that does not exist", lambda p: p.load(workers="nosuchhost.invalid:6543"), ConnectError,
            r"cannot connect to nosuchhost\.invalid:6543: the host name does not resolve"),
    Mistake("port of another program", lambda p: p.load(workers=p.other), (ConnectionLostError, RemoteProtocolError),
            "perhaps it is no node server|the peer sent no message"),
    Mistake("more workers than there are", lambda p: p.in_vain(min_workers=3), ConnectError,
            r"min_workers=3, but 2 workers were there for this process within \S+ s; missing: no node"),
    Mistake("server has ended", go_on_after_the_server, (ConnectError, ConnectionLostError),
            "refused|no worker is left|closed the connection|is gone"),
    # Who may use them
    Mistake("another secret", lambda p: p.load_with_secret("another secret of sixteen characters"), AuthenticationError,
            "do not hold the same secret; give both the same token file .* fingerprint"),
    Mistake("secret that others can read", lambda p: p.load_with_secret("x" * 20, 0o644), AuthenticationError,
            r"is open to other users \(mode 0644\): run chmod 600"),
    Mistake("no secret", lambda p: p.load_with_secret(None), AuthenticationError, "does not exist; create it with"),
    Mistake("short secret", lambda p: p.load_with_secret("abc"), AuthenticationError, "is shorter than 16 characters"),
    Mistake("another Python", Place.load_with_another_python, RemoteProtocolError,
            r"the client on .* runs CPython 3\.9; use the same minor version of Python on both sides"),
    # What is sent to them
    Mistake("dataset with a lock", lambda p: p.load(WithLock()), SerializationError,
            r"dataset\.lock is a _thread\.lock, which cannot be pickled .*RPCDataset\(workers, MyDataset, \*args\)"),
    Mistake("dataset with a lock deep inside", lambda p: p.load(Nested()), SerializationError,
            r"dataset\.readers\['train'\]\.lock is a _thread\.lock"),
    Mistake("collate function with a lock", lambda p: p.load(collate_fn=WithLock().__getitem__), SerializationError,
            r"collate_fn\S* is a _thread\.lock, .*: open it on first use instead of in the constructor"),
    Mistake("module missing on the node", lambda p: p.load(only_here.Images()), SerializationError,
            "No module named 'only_here' on .*; it must be importable there too: send it with py_modules="),
    Mistake("RPCDataset in a dataset", lambda p: p.load(Subset(p.dataset(), [1])), LocalProtocolError,
            r"an RPCDataset belongs to this process and cannot be sent: to use a part of it, .*Subset"),
    # The dataset
    Mistake("what is made is no dataset", lambda p: p.dataset(NoDataset), TypeError,
            "NoDataset made no dataset: it has no __getitem__, and is no IterableDataset"),
    Mistake("argument too many", lambda p: p.dataset(Items, 8, 9), TypeError, r"__init__\(\) takes from 1 to 2"),
    Mistake("constructor that fails", lambda p: p.dataset(lambda: 1 / 0), ZeroDivisionError, "division by zero"),
    Mistake("constructor that is killed", lambda p: p.dataset(lambda: os.kill(os.getpid(), signal.SIGKILL)),
            ConnectionLostError, "without an answer; if its session was killed, .* log .* says so"),
    Mistake("attribute misspelt", lambda p: p.dataset().sise, AttributeError, "'Items' object has no attribute 'sise'"),
    Mistake("length too large", lambda p: p.load(Shorter()), IndexError,
            r"list index out of range.*index 5 at position 5, batch 5, worker \d+ \(pid \d+\)"),
    Mistake("constructor of the base class forgotten", lambda p: p.load(NoSetUp(), sampler=[0]), AttributeError,
            "'NoSetUp' object has no attribute 'size'.*index 0 at position 0"),
    Mistake("file missing on the node", lambda p: p.load(NoFile()), FileNotFoundError,
            r"No such file or directory: 'images/0\.png'.*index 0 at position 0, batch 0, worker"),
    Mistake("tensor on a card", lambda p: p.load(OnCard()), (AssertionError, RuntimeError), "CUDA|NVIDIA"),
    Mistake("crash", lambda p: p.load(Crashes(), max_retries=2), ConnectionLostError,
            r"batch 5 \(indices \[5\]\) has ended 2 workers in a row: .*SIGSEGV .* while it loaded sample 5"),
    Mistake("hang, with a limit of the loader", lambda p: p.load(Sleeps(), timeout=0.3), RuntimeError,
            r"DataLoader timed out after 0\.3 seconds"),
    Mistake("hang, with a limit of tasks", lambda p: p.load(Sleeps(), task_timeout=0.2, max_retries=1), RPCTimeoutError,
            r"took longer than 0\.2 s while it loaded sample 0(.|\n)*in __getitem__"),
    Mistake("all samples bad", lambda p: p.load(Broken(), on_error="skip", max_skipped=3), BadSamplesError,
            "4 samples were skipped in this pass, more than max_skipped=3; .*: ValueError: image 3 is broken"),
    # Functions
    Mistake("collate function that fails", lambda p: p.load(collate_fn=drop_labels, batch_size=4), TypeError,
            r"'int' object is not subscriptable.*collating batch 0 of indices \[0, 1, 2, 3\], worker"),
    Mistake("collate function that is none", lambda p: p.load(collate_fn=5), TypeError,
            "not callable.*collating batch 0"),
    Mistake("samples of different size", lambda p: p.load(Uneven(), batch_size=2), RuntimeError,
            r"stack expects each tensor to be equal size.*collating batch 0 of indices \[0, 1\]"),
    Mistake("None as a sample", lambda p: p.load(WithNone(), batch_size=4), Exception, "NoneType.*collating batch 0"),
    Mistake("init function that fails", lambda p: p.load(worker_init_fn=no_scratch), OSError,
            r"no scratch disk.*worker_init_fn\(\d\), worker"),
    # Passes and states
    Mistake("iterator in a fork", go_on_in_a_fork, LocalProtocolError,
            r"this iterator belongs to process \d+, of which"),
    Mistake("state of torchdata", lambda p: p.go_on(p.loader(), {"_index_sampler_state": None}), ValueError,
            "this is not a state of this version's RPCDataloader"),
]

# fmt: on


@pytest.fixture(scope="module")
def other_program():
    """Answers every connection as a web server does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        while True:
            try:
                connection, _peer = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    yield "{}:{}".format(*listener.getsockname())
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture(scope="module")
def server(zygote, tmp_path_factory):
    """The node server of all mistakes. At the end, nothing is left of them."""
    folder = tmp_path_factory.mktemp("left")
    close_client()
    descriptors = set(os.listdir("/proc/self/fd"))
    with (
        pytest.MonkeyPatch.context() as patch,
        quick_server(zygote, "--host", "127.0.0.1", "--port", "0", "--num-workers", "2") as server,
    ):
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", None)
        yield server
        gc.collect()
        close_client()
        wait_until(lambda: not server.processes(), what="processes of mistakes")
        wait_until(lambda: not any(thread.name.startswith("rpcdl") for thread in threading.enumerate()), what="threads")
        assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert os.listdir(folder) == []


@pytest.fixture
def place(server, other_program, tmp_path, monkeypatch, zygote):
    """Afterwards, the same process loads, and no worker is left."""
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    opened = []

    def serve():
        opened.append(quick_server(zygote, "--num-workers", "1"))
        return opened[-1].__enter__()

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and nobody listens
        unused = "{}:{}".format(*nobody.getsockname())
        yield (found := Place(server.address, unused, other_program, tmp_path, monkeypatch, serve))
    for each in opened:
        each.__exit__(None, None, None)
    monkeypatch.undo()
    if found.is_impatient:
        close_client()
    assert [int(index) for index in RPCDataloader(Items(), workers=server.address, num_workers=1)] == [*range(8)]
    gc.collect()
    wait_until(lambda: "rpcdl-worker" not in map(process_name, server.processes()), what="workers of a mistake")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake_is_named(place, mistake):
    with pytest.raises(mistake.error) as caught:
        mistake.do(place)
    error = caught.value
    text = " ".join([str(error), *getattr(error, "__notes__", ()), str(error.__cause__ or "")])  # Python 3.10: no notes
    found = re.search(mistake.words, text)
    assert found, text
