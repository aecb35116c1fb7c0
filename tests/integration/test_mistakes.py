"""Mistakes that users make: what is done, which exception comes, and in which words.

After each of them the same process loads as if nothing had happened, and no worker is left; after all of them, no
process, thread, descriptor or file is.
"""

from __future__ import annotations

import dataclasses
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
from torch.utils.data import Dataset, IterableDataset, Subset

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.client.client import close_client
from rpcdataloader.errors import (
    AuthenticationError,
    BadSamplesError,
    ConnectError,
    ConnectionLostError,
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
    RPCTimeoutError,
    SerializationError,
)
from rpcdataloader.wire import channel
from tests.conftest import TIMEOUT_SCALE, process_name, wait_until
from tests.integration.quick import quick_server


class Items(Dataset):
    def __init__(self, size=8):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


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


class Generators(Items):
    def __getitem__(self, index):
        return (part for part in range(index))


class OnCard(Items):
    def __getitem__(self, index):
        return torch.zeros(1, device="cuda")


class GivesUp(Items):
    def __getitem__(self, index):
        sys.exit("I give up")


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


class NoLength:
    def __getitem__(self, index):
        return index


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

    def load_as(self, **changes):
        """As a process with another Python, for example."""
        true = channel.local_identity
        fake = lambda *args: dataclasses.replace(true(*args), **changes)  # noqa: E731
        self.monkeypatch.setattr("rpcdataloader.client.worker.local_identity", fake)
        self.load(workers=self.same)

    def state_after(self, num_batches, loader):
        iterator = iter(loader)
        for _ in range(num_batches):
            next(iterator)
        return loader.state_dict()

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
    Mistake("no server at all", lambda p: p.in_vain(workers=[p.nobody, f"unix:{p.folder}/socket"]), ConnectError,
            r"cannot connect to 127\.0\.0\.1:\d+: connection refused"),
    Mistake("no server for the dataset", lambda p: p.in_vain(lambda: RPCDataset(p.nobody, Items)), ConnectError,
            "connection refused"),
    Mistake("host that does not exist", lambda p: p.load(workers="nosuchhost.invalid:6543"), ConnectError,
            r"cannot connect to nosuchhost\.invalid:6543: the host name does not resolve"),
    Mistake("port of another program", lambda p: p.load(workers=p.other), (ConnectionLostError, RemoteProtocolError),
            "perhaps it is no node server|the peer sent no message"),
    Mistake("workers of an RPCDataset", lambda p: RPCDataloader(p.dataset(), workers=p.address), ValueError,
            "workers contradicts the RPCDataset, which has its own: leave it out"),
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
    Mistake("another Python", lambda p: p.load_as(python_version="3.9.1"), RemoteProtocolError,
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
    Mistake("module missing for the dataset", lambda p: p.dataset(only_here.Images), SerializationError,
            "No module named 'only_here'"),
    Mistake("env too late", lambda p: RPCDataloader(p.dataset(), env=["X"]), ValueError,
            "env is too late for an RPCDataset"),
    Mistake("RPCDataset in a dataset", lambda p: p.load(Subset(p.dataset(), [1])), LocalProtocolError,
            r"an RPCDataset belongs to this process and cannot be sent: to use a part of it, .*Subset"),
    # The dataset
    Mistake("what is made is no dataset", lambda p: p.dataset(NoDataset), TypeError,
            "NoDataset made no dataset: it has no __getitem__, and is no IterableDataset"),
    Mistake("argument too many", lambda p: p.dataset(Items, 8, 9), TypeError, r"__init__\(\) takes from 1 to 2"),
    Mistake("constructor that fails", lambda p: p.dataset(lambda: 1 / 0), ZeroDivisionError, "division by zero"),
    Mistake("no length", lambda p: p.load(NoLength()), TypeError, r"object of type 'NoLength' has no len\(\)"),
    Mistake("attribute misspelt", lambda p: p.dataset().sise, AttributeError, "'Items' object has no attribute 'sise'"),
    Mistake("length too large", lambda p: p.load(Shorter()), IndexError,
            r"list index out of range.*index 5 at position 5, batch 5, worker \d+ \(pid \d+\)"),
    Mistake("index too large", lambda p: p.load(Shorter(), sampler=[1, 99]), IndexError,
            "index 99 at position 1, batch 1"),
    Mistake("constructor of the base class forgotten", lambda p: p.load(NoSetUp(), sampler=[0]), AttributeError,
            "'NoSetUp' object has no attribute 'size'.*index 0 at position 0"),
    Mistake("file missing on the node", lambda p: p.load(NoFile()), FileNotFoundError,
            r"No such file or directory: 'images/0\.png'.*index 0 at position 0, batch 0, worker"),
    Mistake("tensor on a card", lambda p: p.load(OnCard()), (AssertionError, RuntimeError), "CUDA|NVIDIA"),
    Mistake("generator as a sample", lambda p: p.load(Generators()), TypeError,
            "default_collate: batch must contain tensors, .*; found <class 'generator'>"),
    Mistake("generator as a batch", lambda p: p.load(Generators(), batch_size=None), SerializationError,
            r"result\[1\] is a generator, which cannot be pickled .*: what a worker sends back must consist of"),
    Mistake("sys.exit", lambda p: p.load(GivesUp()), RemoteError, r"worker \d+ .* raised SystemExit: I give up"),
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
    Mistake("state without workers", lambda _: RPCDataloader(Items()).state_dict(), LocalProtocolError,
            "this loader has no workers, so it is torch's own, which cannot resume: give num_workers=1 or more"),
    Mistake("state of another kind", lambda p: p.go_on(p.loader(Stream()), p.state_after(1, p.loader())), ValueError,
            "the state is of a loader with a map-style dataset, but the dataset here is an iterable-style dataset"),
    Mistake("state of another dataset", lambda p: p.go_on(p.loader(Items(3)), p.state_after(6, p.loader())), ValueError,
            r"SequentialSampler\(length=8\), and here is SequentialSampler\(length=3\): go on with the same length"),
    Mistake("state of another batch size", lambda p: p.go_on(p.loader(batch_size=4),
            p.state_after(1, p.loader(batch_size=2))),
            ValueError, r"batch_size=2\), and here is BatchSampler\(batch_size=4\): go on with the same batch size"),
    Mistake("state of torchdata", lambda p: p.go_on(p.loader(), {"_index_sampler_state": None}), ValueError,
            "this is not a state of this version's RPCDataloader"),
    Mistake("no state", lambda p: p.go_on(p.loader(), None), TypeError,
            r"must be what state_dict\(\) returned, .*but is a NoneType"),
]

# Those that are found before anything is started.
ARGUMENTS = [
    # Where the workers are, and what they load
    Mistake("port missing", lambda p: p.load(workers="node07"), ValueError,
            "cannot read the address 'node07': write host:port"),
    Mistake("port is a word", lambda p: p.load(workers="node07:port"), ValueError,
            "cannot read the address 'node07:port': write"),
    Mistake("address with a scheme", lambda p: p.load(workers="tcp://node07:6543"), ValueError,
            "write host:port"),
    Mistake("a number of workers for addresses", lambda p: p.load(workers=4), TypeError,
            "workers must be a string or a list of strings, but is 4"),
    Mistake("no address", lambda p: p.load(workers=[]), ValueError, "workers names no worker; write host:port"),
    Mistake("one address twice", lambda p: p.load(workers=[p.address] * 2), ValueError, "more than once"),
    Mistake("no local worker", lambda _: RPCDataloader(Items(), workers="local:0"), ValueError, "asks for no worker"),
    Mistake("two numbers of workers", lambda _: RPCDataloader(Items(), workers="local:2", num_workers=3), ValueError,
            "workers='local:2' and num_workers=3 contradict each other"),
    Mistake("a class for an instance", lambda p: p.load(Items), TypeError,
            r"dataset is a class: give an object, or RPCDataset\(workers, Items, \.\.\.\)"),
    Mistake("an instance for a class", lambda p: p.dataset(Items()), TypeError,
            "must be a callable that makes the dataset, but is a Items; an instance is given to RPCDataloader"),
    Mistake("workers and class swapped", lambda p: RPCDataset(*[Items, p.address]), TypeError, "workers come first"),
    Mistake("no dataset", lambda p: p.load(5), TypeError, "dataset of type int has no __getitem__"),
    Mistake("iterator for a dataset", lambda p: p.load(iter([1])), TypeError, "list_iterator has no __getitem__"),
    # Arguments of torch's loader
    Mistake("batch of none", lambda p: p.load(batch_size=0), ValueError, "batch_size should be a positive integer"),
    Mistake("sampler and shuffle", lambda p: p.load(sampler=[1], shuffle=True), ValueError,
            "mutually exclusive with shuffle"),
    Mistake("batch sampler and drop_last", lambda p: p.load(batch_sampler=[[1]], drop_last=True), ValueError,
            "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last"),
    Mistake("batch sampler and batch size", lambda p: p.load(batch_sampler=[[1]], batch_size=4), ValueError,
            "batch_sampler option is mutually exclusive"),
    Mistake("drop_last without batches", lambda p: p.load(batch_size=None, drop_last=True), ValueError,
            "auto-batching"),
    Mistake("shuffled stream", lambda p: p.load(Stream(), shuffle=True), ValueError, "unexpected|unspecified shuffle"),
    Mistake("negative workers", lambda p: p.load(num_workers=-1), ValueError,
            "num_workers option should be non-negative"),
    Mistake("workers as text", lambda p: p.load(num_workers="2"), TypeError,
            "num_workers must be a whole number or 'auto', but is '2'"),
    Mistake("nothing prefetched", lambda p: p.load(prefetch_factor=0), ValueError, "must be at least 1, but is 0"),
    Mistake("negative timeout", lambda p: p.load(timeout=-1), ValueError, "timeout option should be non-negative"),
    Mistake("argument misspelt", lambda p: p.load(worker=1), TypeError, "unexpected keyword argument 'worker'"),
    # Our own
    Mistake("negative retries", lambda p: p.load(max_retries=-1), ValueError,
            "max_retries must be at least 1, but is -1"),
    Mistake("retries as text", lambda p: p.load(max_retries="3"), TypeError,
            "max_retries must be a number, but is '3'"),
    Mistake("unknown on_error", lambda p: p.load(on_error="ignore"), ValueError, "must be 'raise' or 'skip'"),
    Mistake("skipping without workers", lambda _: RPCDataloader(Items(), on_error="skip"), ValueError,
            "on_error='skip' needs workers: give workers or num_workers"),
    Mistake("names of exceptions", lambda p: p.load(retry_on="OSError"), TypeError, "must be exception classes"),
    Mistake("negative patience", lambda p: p.load(reconnect_timeout=-1), ValueError,
            "reconnect_timeout must be a number"),
    Mistake("limit as text", lambda p: p.load(task_timeout="5"), TypeError,
            "task_timeout must be a number, but is '5'"),
    Mistake("rank too high", lambda p: p.load(partition=(2, 2)), ValueError, "rank must be 0 to world size - 1"),
    Mistake("card without a driver", lambda p: p.load(device="cuda"), ValueError,
            "device='cuda' is not available: torch"),
    Mistake("card misspelt", lambda p: p.load(device="gpu"), ValueError, "device='gpu' is not available"),
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


@pytest.mark.parametrize("mistake", ARGUMENTS, ids=lambda mistake: mistake.name)
def test_mistake_in_the_arguments_is_named_before_anything_is_started(tmp_path, monkeypatch, mistake):
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    place = Place("127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:1", tmp_path, monkeypatch, None)
    with pytest.raises(mistake.error, match=mistake.words):
        mistake.do(place)
    assert set(threading.enumerate()) == threads
    assert set(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake_is_named(place, mistake):
    with pytest.raises(mistake.error) as caught:
        mistake.do(place)
    error = caught.value
    text = " ".join([str(error), *getattr(error, "__notes__", ()), str(error.__cause__ or "")])  # Python 3.10: no notes
    found = re.search(mistake.words, text)
    assert found, text


def test_another_torch_is_a_warning(place, caplog):
    place.load_as(torch="1.0")
    assert f"{place.same} differs from this client: torch: " in caplog.text


def test_two_loaders_of_one_dataset_do_not_disturb_each_other(place):
    dataset = place.dataset()
    loaders = RPCDataloader(dataset), RPCDataloader(dataset, shuffle=True)
    batches = list(zip(*loaders, strict=True))
    assert [int(index) for index, _other in batches] == [*range(8)]
    assert sorted(int(index) for _index, index in batches) == [*range(8)]
