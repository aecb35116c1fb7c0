"""Workers run the modules of the script as the script has imported them, whenever and wherever they import them."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("clean_client")

SOURCE = """
from torch.utils.data import Dataset


class Scaled(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index * {factor}
"""

_numbers = itertools.count()


class Edited:
    """A module of the user that is edited while the script runs."""

    def __init__(self, folder):
        self.name = f"edited{next(_numbers)}_{os.getpid()}"
        self.path = folder / f"{self.name}.py"

    def write(self, factor):
        self.path.write_text(SOURCE.format(factor=factor))
        os.utime(self.path, (factor, factor))
        importlib.invalidate_caches()

    def load(self):
        return importlib.import_module(self.name)


@pytest.fixture
def edited(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    found = Edited(tmp_path)
    found.write(1)
    yield found
    sys.modules.pop(found.name, None)


def batches(loader):
    (batch,) = loader
    return batch.tolist()


def loaded(dataset, address):
    """What an instance gives, and an RPCDataset."""
    built = RPCDataset(address, type(dataset))
    return batches(RPCDataloader(dataset, 3, workers=address)), batches(RPCDataloader(built, 3))


def test_folders_that_a_script_adds_to_its_path_later_reach_sessions_that_are_there(serve, tmp_path, monkeypatch):
    address = serve("--num-workers", "2").address
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        module = Edited(folder)
        module.write(2)
        monkeypatch.syspath_prepend(folder)
        assert loaded(module.load().Scaled(), address) == ([0, 2, 4], [0, 2, 4])


def test_reloaded_module_reaches_new_workers_and_instances_that_look_the_same(serve, edited):
    address = serve("--num-workers", "2").address
    module = edited.load()
    before = RPCDataloader(module.Scaled(), 3, workers=address)
    assert batches(before) == [0, 1, 2]
    edited.write(10)
    assert loaded(module.Scaled(), address) == ([0, 1, 2], [0, 1, 2])  # the script has the old one, too
    importlib.reload(module)
    assert loaded(module.Scaled(), address) == ([0, 10, 20], [0, 10, 20])


@pytest.mark.parametrize("is_preloaded", [False, True])
def test_node_server_that_has_other_code_than_the_script_uses_that_of_the_script(serve, edited, caplog, is_preloaded):
    module = edited.load()
    first = serve("--num-workers", "1").address
    assert batches(RPCDataloader(module.Scaled(), 3, workers=first)) == [0, 1, 2]
    edited.write(10)
    before = f"sys.path.insert(0, {str(edited.path.parent)!r})"
    later = serve("--num-workers", "1", *["--preload", edited.name] * is_preloaded, before=before)
    assert loaded(module.Scaled(), later.address) == ([0, 1, 2], [0, 1, 2])
    if not is_preloaded:
        assert f"of {edited.path} is not as the script has imported it: workers use what the script has" in caplog.text


@pytest.mark.parametrize("is_preloaded", [False, True])
def test_node_server_that_has_another_file_of_that_name_uses_the_source_of_the_script(
    serve, edited, tmp_path, is_preloaded
):
    module = edited.load()
    elsewhere = tmp_path / "node"
    elsewhere.mkdir()
    (elsewhere / edited.path.name).write_text(SOURCE.format(factor=7))
    before = f"sys.path.insert(0, {str(elsewhere)!r})"
    options = ["--preload", edited.name] if is_preloaded else []
    sys.path.remove(str(tmp_path))  # so that the node finds its own
    address = serve("--num-workers", "1", *options, before=before).address
    assert loaded(module.Scaled(), address) == ([0, 1, 2], [0, 1, 2])


def test_module_that_is_installed_on_the_node_is_that_of_the_node_which_says_so(serve, edited, tmp_path, caplog):
    module = edited.load()
    installed = tmp_path / "lib" / "python3" / "site-packages"
    installed.mkdir(parents=True)
    (installed / edited.path.name).write_text(SOURCE.format(factor=7))
    sys.path.remove(str(tmp_path))
    address = serve("--num-workers", "1", before=f"sys.path.insert(0, {str(installed)!r})").address
    assert loaded(module.Scaled(), address) == ([0, 7, 14], [0, 7, 14])
    assert f"module {edited.name} of {installed / edited.path.name} is installed here" in caplog.text


IN_SOME_ORDER = """
import os


def found():  # as a set of texts, which has another order in each process
    return ["cat", "dog", "horse"][:: -1 if "ON_A_NODE" in os.environ else 1]


{}


class Numbers:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index
"""
ON_A_NODE = 'os.environ["ON_A_NODE"] = "1"'


@pytest.mark.parametrize("is_preloaded", [False, True])
@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("CLASSES = found()", "CLASSES"),
        ("PAIRS = tuple(enumerate(found()))", "PAIRS"),
        ("INDEX = {each: number for number, each in enumerate(found())}", "INDEX"),
        ("SPLITS = {'train': found(), 'test': ['cat']}", "SPLITS['train']"),
        ("class Table:\n    class Inner:\n        names = found()", "Table.Inner.names"),
    ],
)
def test_lists_of_a_module_that_are_in_another_order_on_a_node_are_told(
    serve, edited, statement, name, is_preloaded, caplog
):
    edited.path.write_text(IN_SOME_ORDER.format(statement))
    before = f"{ON_A_NODE}; sys.path.insert(0, {str(edited.path.parent)!r})"
    address = serve("--num-workers", "1", *["--preload", edited.name] * is_preloaded, before=before).address
    where = re.escape(os.uname().nodename)
    text = rf"{re.escape(name)} of module {edited.name} .* on {where} .*order.*sorted\("
    loader = RPCDataloader(edited.load().Numbers(), 3, workers=address)
    assert [*loader, *loader][0].tolist() == [0, 1, 2]
    wait_until(lambda: re.search(text, caplog.text))
    assert len(re.findall(text, caplog.text)) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "CLASSES = sorted(found())",
        "CLASSES = set(found())",
        "UPPER = {each: each.upper() for each in found()}",
        "FEATURES = {'jpeg': len(found()[0]) == 3, 'png': len(found()[0]) == 5}",
        "PATHS = [f'/{found()[0]}', *found()]",
        "MIXED = [*found(), object()]",
        "MANY = found() * 20_000",
    ],
)
def test_lists_of_a_module_that_differ_otherwise_are_those_of_the_node(serve, edited, statement, caplog):
    edited.path.write_text(IN_SOME_ORDER.format(statement))
    address = serve("--num-workers", "1", before=ON_A_NODE).address
    assert batches(RPCDataloader(edited.load().Numbers(), 3, workers=address)) == [0, 1, 2]
    assert "order" not in caplog.text


@pytest.mark.parametrize("change", ["reverse()", "append('cow')"])
def test_list_that_the_script_has_changed_is_that_of_the_script_whatever_its_order_was(serve, edited, change):
    edited.path.write_text(IN_SOME_ORDER.format("CLASSES = found()"))
    module = edited.load()
    exec(f"module.CLASSES.{change}")
    address = serve("--num-workers", "1", before=ON_A_NODE).address
    loader = RPCDataloader(module.Numbers(), 3, workers=address, collate_fn=lambda _samples: module.CLASSES)
    assert list(loader) == [module.CLASSES]


def test_module_that_a_worker_imports_late_is_compared_then(serve, edited, caplog):
    edited.path.write_text(IN_SOME_ORDER.format("CLASSES = found()"))
    name = edited.load().__name__
    address = serve("--num-workers", "1", before=ON_A_NODE).address
    for _batch in RPCDataloader(range(3), 3, workers=address, collate_fn=lambda _: bool(importlib.import_module(name))):
        wait_until(lambda: "CLASSES of module" in caplog.text)


LOADED_BY_PATH = """
from pathlib import Path

factor = int((Path(__file__).parent / "factor.txt").read_text())


class Scaled:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index * factor
"""


def test_module_that_the_script_has_loaded_by_its_path_is_that_and_no_other_of_its_name(serve, edited, tmp_path):
    edited.write(7)  # which an import would find
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (chosen / "by_path.py").write_text(LOADED_BY_PATH)
    (chosen / "factor.txt").write_text("3")
    spec = importlib.util.spec_from_file_location(edited.name, chosen / "by_path.py")
    module = sys.modules[edited.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert loaded(module.Scaled(), serve("--num-workers", "2").address) == ([0, 3, 6], [0, 3, 6])


ASKS_FOR_ARGUMENTS = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=int)
factor = parser.parse_args().scale


class Scaled:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index * factor
"""


def test_module_that_parses_the_arguments_of_the_script_does_so_in_workers(serve, edited, monkeypatch):
    edited.path.write_text(ASKS_FOR_ARGUMENTS)
    monkeypatch.setattr(sys, "argv", ["train.py", "--scale", "3"])
    assert loaded(edited.load().Scaled(), serve("--num-workers", "2").address) == ([0, 3, 6], [0, 3, 6])


MAKES_FUNCTIONS = """
SCALE = 1
_seen = []


def make_init(value):
    def init(_worker):
        global SCALE
        SCALE = value
        _seen.append(value)

    return init


def make_transform():
    def transform(index):
        return index * SCALE, scale(), list(_seen)

    return transform


def make_scaled():
    return lambda index: index * SCALE


def scale():
    return SCALE


def make_dataset(transform):
    class Local:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return transform(index), SCALE

    return Local()
"""


def test_local_functions_of_a_module_share_its_globals_as_in_a_fork(serve, edited):
    edited.path.write_text(MAKES_FUNCTIONS)
    module = edited.load()
    options = {"batch_size": None, "collate_fn": tuple, "worker_init_fn": module.make_init(7), "num_workers": 1}
    for workers in None, serve("--num-workers", "1").address:
        loader = RPCDataloader(module.make_dataset(module.make_transform()), workers=workers, **options)
        assert list(loader) == [((0, 7, [7]), 7), ((7, 7, [7]), 7)]


def test_local_functions_of_a_module_bring_what_the_script_has_changed_there_and_take_nothing_back(
    serve, edited, monkeypatch
):
    edited.path.write_text(MAKES_FUNCTIONS)
    module = edited.load()
    monkeypatch.setattr(module, "SCALE", 5)
    address = serve("--num-workers", "1").address
    scaled, change = module.make_scaled(), module.make_init(9)
    assert list(RPCDataloader(range(2), None, workers=address, collate_fn=scaled)) == [0, 5]

    def change_there():
        change(0)
        return scaled

    assert rpc_async(address, lambda: change_there()(2)).wait() == 18
    assert rpc_async(address, change_there).wait()(2) == 10
    assert module.SCALE == 5


def test_local_functions_of_a_module_that_nodes_cannot_find_bring_what_they_need(serve, tmp_path, monkeypatch):
    path = tmp_path / "hidden" / "nowhere.py"
    path.parent.mkdir()
    path.write_text(MAKES_FUNCTIONS)
    spec = importlib.util.spec_from_file_location("nowhere", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "nowhere", module)
    spec.loader.exec_module(module)
    workers = serve("--num-workers", "1").address
    assert list(RPCDataloader(range(2), None, workers=workers, collate_fn=module.make_scaled())) == [0, 1]


WRAPS_FUNCTIONS = """
import contextlib
import functools


def make(kind):
    factor = 3

    def scaled(value):
        return factor * value

    @functools.cache
    def power(value):
        return factor * power(value - 1) if value else 1

    @functools.wraps(scaled)
    def wrapping(value):
        return scaled(value), wrapping.__name__

    @functools.singledispatch
    def dispatching(value):
        return dispatching(str(value)), dispatching.note

    @dispatching.register(int)
    def _(value):
        return dispatching(float(value))

    @dispatching.register(str)
    def _(value):
        return factor * value

    dispatching.note = "noted"

    @contextlib.contextmanager
    def managing(value):
        yield scaled(value)

    def entering(value):
        with managing(value) as found:
            return found

    class Method:
        @functools.lru_cache(maxsize=2)
        def __call__(self, value):
            return self.described(value)

        @functools.singledispatchmethod
        def described(self, value):
            return "other"

        @described.register
        def _(self, value: int):
            return scaled(value)

    made = {"lru_cache": functools.lru_cache(2)(scaled), "partial": functools.partial(pow, factor), "method": Method()}
    return {**made, "cache": power, "wraps": wrapping, "singledispatch": dispatching, "with": entering}[kind]
"""


@pytest.mark.parametrize("kind", ["lru_cache", "cache", "wraps", "partial", "singledispatch", "with", "method"])
def test_wrapped_local_functions_of_a_module_arrive(shared_server, edited, kind):
    edited.path.write_text(WRAPS_FUNCTIONS)
    made = edited.load().make(kind)
    expected = [made(index) for index in range(4)]

    class Wrapped:
        function = staticmethod(made)

        def __init__(self):
            self.held = made

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index, self.held(index), self.function(index)

    def collate(sample):
        return *sample, made(sample[0])

    loader = RPCDataloader(Wrapped(), None, workers=shared_server.address, collate_fn=collate)
    assert list(loader) == [(index, each, each, each) for index, each in enumerate(expected)]


def test_threads_may_run_one_loader(edited):
    edited.path.write_text("import sys\nsys.meet()")
    spec = importlib.util.spec_from_file_location(edited.name, edited.path)
    barrier = threading.Barrier(2)
    sys.meet = lambda: barrier.wait(10)
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(spec.loader.exec_module, [importlib.util.module_from_spec(spec) for _ in range(2)]))
    finally:
        del sys.meet
