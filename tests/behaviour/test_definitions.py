"""What a script defines, and changes: what reaches whom, and when."""

from __future__ import annotations

import re

import pytest

from tests.support.zygote import Script

BEGIN = """
import sys
from torch.utils.data import Dataset
from rpcdataloader import RPCDataloader, RPCDataset, rpc_async

address = sys.argv[1]

class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

def load(dataset, **options):
    options = {"batch_size": 2, "collate_fn": list, "num_workers": 1, **options}
    workers = {} if isinstance(dataset, RPCDataset) else {"workers": address}
    return RPCDataloader(dataset, **workers, **options)

def call(function, *args):
    return rpc_async(address, function, args).wait()
"""


@pytest.fixture
def passes(zygote, shared_server):
    """Run a script, whose assertions hold."""

    def run(source: str) -> Script:
        ended = zygote.start(BEGIN + source, shared_server.address, ends_quickly=True).wait(60)
        assert ended.status == 0, ended.errors
        return ended

    return run


def test_change_during_a_pass_reaches_the_next_one_and_workers_that_are_replaced_in_this_one_do_not_see_it(passes):
    passes("""
import os

scale, script = 1, sys.argv[0]

class Scaled(Numbers):
    def __getitem__(self, index):
        if index == 2 and os.path.exists(script):
            os.remove(script)  # once
            os._exit(1)
        return index * scale

loader = load(Scaled(), collate_fn=lambda samples: (samples, scale), prefetch_factor=1)
batches = iter(loader)
scale = 10
assert list(batches) == [([0, 1], 1), ([2, 3], 1)]
assert not os.path.exists(script)
assert list(loader) == [([0, 10], 10), ([20, 30], 10)]
""")


def test_change_that_follows_the_beginning_of_a_pass_at_once_does_not_reach_its_workers(passes):
    passes("""
scale = 1

class Scaled(Numbers):
    def __getitem__(self, index):
        return index * scale

first = load(Scaled())
batches = iter(first)
scale = 10
other = RPCDataset(address, Scaled)  # brings the change into the session from which workers of the first are forked
assert list(load(other)) == [[0, 10], [20, 30]]
assert list(batches) == [[0, 1], [2, 3]]
""")


@pytest.mark.parametrize("options", ["", ", collate_fn=collate"])
def test_names_of_the_dataset_are_the_dataset_of_the_loader(passes, options):
    passes(f"""
import torch

class Counting(Numbers):
    seen = ()
    def __getitem__(self, index):
        self.seen = *self.seen, index
        return index, num_seen()

def num_seen():
    return len(dataset.seen), len(HELD["dataset"].seen)

class Collate:
    def __len__(self):  # false where it has no content
        return 0
    def __call__(self, samples):
        return torch.utils.data.default_collate(samples)

dataset, collate = Counting(), Collate()
HELD = {{"dataset": dataset}}
batches = RPCDataloader(dataset, 2, num_workers=1, workers=address{options})
assert [seen.tolist() for _indices, (seen, _held) in batches] == [[1, 2], [3, 4]]
assert [held.tolist() for _indices, (_seen, held) in batches] == [[1, 2], [3, 4]]
""")


@pytest.mark.parametrize("place", ["address", "'local:1'"])
def test_changes_reach_the_length_of_an_rpc_dataset_and_so_the_order_of_its_samples(passes, place):
    passes(f"""
class Counted(Numbers):
    def __len__(self):
        return number

number = 4
dataset = RPCDataset({place}, Counted)
assert len(dataset) == 4
number = 6
assert len(dataset) == 6
assert list(load(dataset)) == [[0, 1], [2, 3], [4, 5]]
""")


def test_changes_reach_what_an_rpc_dataset_is_asked(passes):
    passes("""
class Scaled(Numbers):
    def __getitem__(self, index):
        return index * scale

scale = 1
dataset = RPCDataset(address, Scaled)
assert dataset[2] == 2
scale = 10
assert dataset[2] == 20
dataset.changed = True
scale = 100
assert dataset[2] == 200
""")


def test_changes_reach_a_question_after_one_that_could_not_be_sent_or_answered(passes):
    passes("""
import threading

class Scaled(Numbers):
    def __getitem__(self, index):
        return index * scale

scale = 1
dataset = RPCDataset(address, Scaled)
for scale, wrong in (10, threading.Lock()), (100, None):
    try:
        dataset[wrong]
    except Exception:
        pass
    assert dataset[2] == 2 * scale
""")


def test_changes_reach_functions_that_the_dataset_of_a_loader_holds(passes):
    passes("""
class Each(Numbers):
    def __init__(self, *functions):
        self.functions = functions

    def __getitem__(self, index):
        return [function(index) for function in self.functions]

def counting(function):
    calls = {"extra": 0}
    def call(index):
        return function(index) + calls["extra"]
    call.calls = calls
    return call

scale = 1

def scaled(index):
    return index * scale

counted = counting(scaled)

def make_local():
    added = [0]
    return lambda index: index + added[0] + scale, added

local, added = make_local()
loader = load(Each(scaled, counted, local), collate_fn=list, batch_size=4)
assert [*loader] == [[[index, index, index + 1] for index in range(4)]]
scale, counted.calls["extra"], added[0] = 2, 10, 100
assert [*loader] == [[[2 * index, 2 * index + 10, index + 102] for index in range(4)]]
scaled.__code__ = (lambda index: -index).__code__
scale = 3
assert [*loader][0][3][2] == 106
""")


def test_globals_that_contain_others_follow_what_changes_in_these(passes):
    passes("""
class Holder:
    def __init__(self, table):
        self.table = table

table = {"a": 1}
holder, listed, both = Holder(table), [table], (table, [table])

class Reading(Numbers):
    def __getitem__(self, index):
        return holder.table["a"], listed[0]["a"], both[1][0]["a"], holder.table is table is both[0]

def negate(index):
    return -index

def twice(function):
    return lambda index: 2 * function(index)

doubled = twice(negate)

class Calling(Numbers):
    def __getitem__(self, index):
        return doubled(index)

reading, calling = load(Reading()), load(Calling())
assert [*reading] == [[(1, 1, 1, True)] * 2] * 2
assert [*calling] == [[0, -2], [-4, -6]]
table["a"] = 5
negate.__code__ = (lambda index: index).__code__
assert [*reading] == [[(5, 5, 5, True)] * 2] * 2
assert [*calling] == [[0, 2], [4, 6]]
""")


def test_persistent_workers_keep_what_they_have(passes):
    passes("""
scale = 1

class Scaled(Numbers):
    def __getitem__(self, index):
        return index * scale

loader = load(Scaled(), persistent_workers=True)
assert list(loader) == [[0, 1], [2, 3]]
scale = 10
assert list(loader) == [[0, 1], [2, 3]]
assert list(load(Scaled())) == [[0, 10], [20, 30]]
""")


def test_persistent_workers_begin_each_pass_with_the_values_of_small_shared_tensors(passes):
    passes("""
import torch

def shared():
    return torch.zeros(1).share_memory_()

def make():
    of_transform, of_collate = shared(), shared()
    return of_transform, lambda: int(of_transform), of_collate, lambda samples: (*samples[0], int(of_collate))

of_script, of_both, (of_transform, transform, of_collate, collate) = shared(), shared(), make()
parameter = torch.nn.Parameter(shared())
weights = torch.eye(2).to_sparse()  # has no memory that could be shared

class Told(Numbers):
    def __init__(self):
        self.own, self.both, self.transform = shared(), of_both, transform

    def __getitem__(self, index):
        return int(of_script), int(of_both), int(self.own), int(self.both), int(parameter), self.transform()

told = Told()
loader = load(told, collate_fn=collate, persistent_workers=True)
for epoch in 0, 1, 0, 2:
    for each in of_script, of_both, of_transform, of_collate, told.own, parameter.detach():
        each.fill_(epoch)
    assert [*loader] == [(epoch,) * 7] * 2
""")


def test_subclasses_that_nothing_names_reach_workers(passes):
    passes("""
class Plugin:
    pass

class First(Plugin):
    pass

class Second(First):
    pass

def names(plugin):
    return sorted(name for each in plugin.__subclasses__() for name in [each.__name__, *names(each)])

class Asks(Numbers):
    def __getitem__(self, index):
        return names(Plugin)

assert names(Plugin) == ["First", "Second"]
assert list(load(Asks(), collate_fn=list)) == [[names(Plugin)] * 2] * 2
""")


def test_calls_change_what_later_calls_find_and_bring_what_the_script_has_changed(passes):
    passes("""
entries, factor = {}, 2

def put(name, value):
    global latest
    entries[name] = latest = value

def get():
    return entries, latest, factor

call(put, "a", 1)
assert call(get) == ({"a": 1}, 1, 2)
factor = 3
call(put, "b", 2)
assert call(get) == ({"a": 1, "b": 2}, 2, 3)
entries = {"c": 3}
assert call(get) == ({"c": 3}, 2, 3)
def get():
    return "other", entries
assert call(get) == ("other", {"c": 3})
""")


def test_of_a_class_only_those_attributes_are_set_that_the_script_has_changed(passes):
    passes("""
class Table:
    numbers, epoch, removed = {}, 0, 1

class Fills(Numbers):
    def __init__(self):
        Table.numbers[1] = "one"

    def __getitem__(self, index):
        return Table.numbers.get(index), Table.epoch, hasattr(Table, "removed")

dataset = RPCDataset(address, Fills)
for epoch in range(3):
    Table.epoch = epoch
    if epoch == 2:
        del Table.removed
    assert list(load(dataset))[0] == [(None, epoch, epoch < 2), ("one", epoch, epoch < 2)]
""")


KINDS = """
import functools
import io

import torch
from torch import nn

class Base:
    __slots__ = ("size",)

class Sized(Base):
    def __init__(self):
        self.size, self.name = 1, "a"

table, weight = torch.zeros(2), nn.Parameter(torch.zeros(2))
alias = table
part = functools.partial(int, base=2)
sized, text = Sized(), io.StringIO()

class Rows:
    def __len__(self):
        return 2

    def __getitem__(self, _index):
        values = table.tolist(), alias.tolist(), weight.tolist(), part("11"), sized.size, sized.name, text.getvalue()
        return repr(values)
"""


def test_objects_that_have_more_than_attributes_reach_workers_as_the_script_has_changed_them(passes):
    passes(f"""
import pathlib
sys.path.insert(0, str(pathlib.Path(__file__).parent))
pathlib.Path(__file__).with_name("kinds.py").write_text({KINDS!r})
import kinds

loader = load(kinds.Rows())
for number in range(1, 3):
    kinds.table[0] = number
    kinds.weight.data.fill_(number)
    kinds.part.keywords["base"] = 2 + number
    kinds.sized.size, kinds.sized.name = number, "b" * number
    kinds.text.write("c")
    assert (here := [[kinds.Rows()[0]] * 2]) == (there := list(loader)), (here, there)
""")


LOCKED = """
lock = 1

class Rows:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index
"""


def test_what_cannot_be_sent_keeps_no_variables_of_the_loop(passes):
    passes(f"""
import gc, pathlib, weakref
sys.path.insert(0, str(pathlib.Path(__file__).parent))
pathlib.Path(__file__).with_name("locked.py").write_text({LOCKED!r})
import locked
exec("locked.lock = (each for each in [])")

class Model:
    pass

def train():
    model = Model()
    assert [*load(locked.Rows())] == [[0, 1]]
    return weakref.ref(model)

gc.disable()
assert train()() is None
""")


LARGE = """
import numpy as np, torch

array, given, late = np.zeros(1 << 15), np.zeros(1 << 15), None

def fill():
    global late
    late = np.full(1 << 16, 3.0)

class Rows:
    def __len__(self):
        return 2

    def __getitem__(self, _index):
        return array[-1].item(), given.sum().item(), None if late is None else late.sum().item()
"""


def test_large_arrays_reach_workers_as_the_script_has_changed_them(passes):
    passes(f"""
import pathlib
import numpy as np
sys.path.insert(0, str(pathlib.Path(__file__).parent))
pathlib.Path(__file__).with_name("large.py").write_text({LARGE!r})
import large

large.array[-1] = 1
large.given = np.ones(1 << 17)
large.fill()
assert [*load(large.Rows())] == [[(1.0, 1 << 17, 3 << 16)] * 2]
""")


def test_what_a_script_assigns_in_its_modules_reaches_workers_whatever_its_name_or_kind(passes):
    passes("""
import pathlib
sys.path.insert(0, str(pathlib.Path(__file__).parent))
pathlib.Path(__file__).with_name("named.py").write_text(
    "import cmath as kind\\nclass Rows:\\n    def __len__(self): return 2\\n"
    "    def __getitem__(self, index): return kind.__name__\\n"
)
import named
import math

assert list(load(named.Rows())) == [["cmath"] * 2]
named.kind = math
assert list(load(named.Rows())) == [["math"] * 2]

def doubled(self, index):
    return 2 * index

named.Rows.__getitem__ = doubled
assert list(load(named.Rows())) == [[0, 2]]
""")


def test_functions_that_name_modules_of_their_own_class_reach_workers(passes):
    """Those of torch.backends are such, which scripts set where they seed."""
    passes("""
import torch

def seed_everything(worker):
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(worker)

assert list(load(Numbers(), worker_init_fn=seed_everything)) == [[0, 1], [2, 3]]
""")


SETTINGS = """
import types

options, table, level = types.SimpleNamespace(size=1), {"a": 1}, 1

def set_up(value):
    global level
    level = value

class Rows:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return options.size, len(table), level
"""

DERIVED = """
from settings import Rows, options

size = options.size

class Derived(Rows):
    def __getitem__(self, index):
        return size, *super().__getitem__(index)
"""


@pytest.mark.parametrize("made", ["settings.Rows()", "RPCDataset(address, settings.Rows)"])
def test_what_a_script_changes_in_its_own_modules_reaches_workers(passes, made):
    passes(f"""
import pathlib
sys.path.insert(0, str(pathlib.Path(__file__).parent))
pathlib.Path(__file__).with_name("settings.py").write_text({SETTINGS!r})
import settings
from settings import options, set_up

options.size = 2
loader = load({made})
assert [*loader] == [[(2, 1, 1)] * 2] * 2
settings.table["b"] = 2
set_up(3)
assert [*loader] == [[(2, 2, 3)] * 2] * 2
""")


CHANGED = """
import functools
import types

options, table, level, __C = types.SimpleNamespace(size=1), {"a": 1}, 1, {}

def set_up(value):
    global level
    level = value
    return value

def options_of():
    return options

def change_globals(**values):
    globals().update(values)

def size_of():
    return getattr(size_of, "size", len(sizes_of.table)) + size_for(0)

def sizes_of():
    pass

sizes_of.table = {}

@functools.singledispatch
def size_for(value):
    return 0

@size_for.register
def _(value: str):
    return 1

def unregistered(value):
    return 5

def fill(mapping, key):
    mapping[key] = 1

def fill_own(key):
    __C[key] = 1

class Rows:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return options.size, len(table), level, num_own() + size_of()

def num_own(more=0):
    return len(__C) + Holder.get().count + more

class Holder:
    one, _count = None, 0
    count = property(lambda self: self._count, lambda self, count: setattr(self, "_count", count))

    @classmethod
    def get(cls):
        cls.one = cls.one or cls()
        return cls.one
"""


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ("changed.options.size, changed.level = 2, 2", (2, 1, 2, 0)),
        ("[changed.options.size, _] = 2, 2", (2, 1, 1, 0)),
        ("for changed.level in range(3): pass", (1, 1, 2, 0)),
        ("def main():\n    import changed as other\n    other.level = 2\nmain()", (1, 1, 2, 0)),
        ("def main():\n    from changed import table\n    table['b'] = 2\nmain()", (1, 2, 1, 0)),
        ("for name, value in {'level': 2}.items():\n    setattr(changed, name, value)", (1, 1, 2, 0)),
        ("vars(changed)['level'] = 2", (1, 1, 2, 0)),
        ("changed.__dict__.update(level=2)", (1, 1, 2, 0)),
        ("changed.fill(changed.table, 'b')", (1, 2, 1, 0)),
        ("changed.fill_own('b')", (1, 1, 1, 1)),
        ("found = changed.set_up(2)", (1, 1, 2, 0)),
        ("if changed.set_up(2): pass", (1, 1, 2, 0)),
        ("print(changed.set_up(2))", (1, 1, 2, 0)),
        ("run = lambda: changed.set_up(2)\nrun()", (1, 1, 2, 0)),
        ("own = changed.options_of()\nown.size = 2", (2, 1, 1, 0)),
        ("changed.options_of().size = 2", (2, 1, 1, 0)),
        ("changed.change_globals(level=2)", (1, 1, 2, 0)),
        ("changed.size_of.size = 2", (1, 1, 1, 2)),
        ("changed.sizes_of.table['b'] = 2", (1, 1, 1, 1)),
        ("@changed.size_for.register\ndef _(value: int):\n    return 4", (1, 1, 1, 4)),
        ("from changed import size_for\nsize_for.register(int, lambda value: 4)", (1, 1, 1, 4)),
        ("changed.size_for.register(int, changed.unregistered)", (1, 1, 1, 5)),
        ("changed.Holder.get().count = 3", (1, 1, 1, 3)),
        ("changed.Holder.one = changed.Holder()\nchanged.Holder.one._count = 3", (1, 1, 1, 3)),
        (
            "def apply(module, **own):\n    [setattr(module, *each) for each in own.items()]\napply(changed, level=2)",
            (1, 1, 2, 0),
        ),
        ("exec('changed.level = 2')", (1, 1, 2, 0)),
        ("exec('level = 2', vars(changed))", (1, 1, 2, 0)),
        ("from unittest import mock\nmock.patch('changed.level', 2).start()", (1, 1, 2, 0)),
        ("import pytest\npytest.MonkeyPatch().setitem(changed.table, 'b', 2)", (1, 2, 1, 0)),
        ("import operator\noperator.setitem(changed.table, 'b', 2)", (1, 2, 1, 0)),
        ("for each in [changed.options]:\n    each.size = 2", (2, 1, 1, 0)),
        ("exec('changed.num_own = lambda: 7')", (1, 1, 1, 7)),
        ("exec('changed.num_own.__defaults__ = (7,)')", (1, 1, 1, 7)),
        ("exec('changed.Holder.count = 7')", (1, 1, 1, 7)),
        ("exec('changed.Holder._count = 7')", (1, 1, 1, 7)),
    ],
)
def test_changes_of_own_modules_are_found_however_they_are_written(passes, change, seen):
    passes(f"""
import pathlib
sys.path.insert(0, str(pathlib.Path(__file__).parent))
pathlib.Path(__file__).with_name("changed.py").write_text({CHANGED!r})
import changed

{change}
assert [*load(changed.Rows())] == [[{seen}] * 2] * 2
""")


COMPUTED = """
import random

import settings
from settings import options

sizes, drawn = list(range(settings.level)), random.random()

class Reader:
    def __init__(self):
        self.size = options.size

reader = Reader()

class Rows(settings.Rows):
    limit = settings.level * 2

    def __getitem__(self, index, level=settings.level):
        return len(sizes), drawn, reader.size, self.limit, level
"""


@pytest.mark.parametrize("made", ["computed.Rows()", "RPCDataset(address, computed.Rows)"])
def test_what_a_module_has_computed_from_another_after_a_change_or_drawn_is_that_of_the_script(passes, made):
    passes(f"""
import pathlib
folder = pathlib.Path(__file__).parent
sys.path.insert(0, str(folder))
(folder / "settings.py").write_text({SETTINGS!r})
(folder / "computed.py").write_text({COMPUTED!r})
import settings
settings.level, settings.options.size = 3, 4
import computed

assert [*load({made})] == [[(3, computed.drawn, 4, 6, 3)] * 2] * 2
""")


LATE = """
import settings

limit = settings.level * 2

class Rows(settings.Rows):
    def __getitem__(self, index):
        import {lazily}
        return limit, {lazily}.level, settings.level
"""


def test_module_that_a_worker_imports_late_computes_from_what_the_script_had_then(passes):
    passes(f"""
import pathlib
folder = pathlib.Path(__file__).parent
sys.path.insert(0, str(folder))
(folder / "settings.py").write_text({SETTINGS!r})
(folder / "training.py").write_text({LATE.format(lazily="settings")!r})
(folder / "validation.py").write_text({LATE.format(lazily="imported")!r})
(folder / "third.py").write_text({LATE.format(lazily="unknown")!r})
for name in "imported", "unknown":
    (folder / (name + ".py")).write_text("from settings import level")
import settings, training, validation, third, imported

settings.level = 3
seen = []
for dataset in training.Rows(), validation.Rows(), third.Rows():
    seen += [*load(dataset)][0][:1]
# A worker that torch forks has not imported the last one, either.
assert seen == [(2, 3, 3), (2, 1, 3), (2, 3, 3)]
""")


TAKEN = """
import settings
from settings import options, table

held = {}

class Rows:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        is_held = held["options"] is settings.options and held["table"]["b"] == 2
        return options.size, options is settings.options, len(table), table is settings.table, is_held
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_object_that_several_modules_have_is_one_in_workers(passes, when):
    passes(f"""
import pathlib, types
folder = pathlib.Path(__file__).parent
sys.path.insert(0, str(folder))
(folder / "settings.py").write_text({SETTINGS!r})
(folder / "taken.py").write_text({TAKEN!r})
import settings
if {when!r} == "after":
    import taken
settings.options = types.SimpleNamespace(size=2)
settings.table["b"] = 2
import taken
if {when!r} == "after":
    taken.options = settings.options
exec("taken.held['options'], taken.held['table'] = settings.options, settings.table")

loader = load(taken.Rows())
got = [*loader]; assert got == [[(2, True, 2, True, True)] * 2] * 2, got
settings.options.size = settings.table["c"] = 3
got = [*loader]; assert got == [[(3, True, 3, True, True)] * 2] * 2, got
""")


HIDDEN = """
import contextvars, functools, logging, random, threading

def counter(count=0):
    table = {}

    class Counted:
        limit = 1

    def get():
        return count, len(table), Counted.limit

    def put(key):
        nonlocal count
        count, table[key] = count + 1, 1

    return get, put, Counted

get, put, Counted = counter()

def doubled(function):
    options = {"factor": 2}

    @functools.wraps(function)
    def call():
        return function() * options["factor"]

    call.configure = options.update
    return call

@doubled
def one():
    return 1

class Limits:
    size = 1

    def set(self, size):
        self.size = size

    def get(self):
        return self.size

set_size, get_size = (lambda limits: (limits.set, limits.get))(Limits())
local, variable = threading.local(), contextvars.ContextVar("variable", default=1)
logger = logging.getLogger("package.hidden")

class Rows:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        is_on = logger.isEnabledFor(logging.DEBUG), logger.isEnabledFor(logging.ERROR)
        return *get(), one(), get_size(), getattr(local, "size", None), variable.get(), is_on
"""


def test_changes_of_variables_that_functions_close_over_methods_threads_and_loggers_reach_workers(passes):
    passes(f"""
import logging, pathlib
sys.path.insert(0, str(pathlib.Path(__file__).parent))
pathlib.Path(__file__).with_name("hidden.py").write_text({HIDDEN!r})
import hidden

loader = load(hidden.Rows())
assert [*loader] == [[(0, 0, 1, 2, 1, None, 1, (False, True))] * 2] * 2
hidden.put("a")
hidden.Counted.limit = 3
hidden.one.configure(factor=5)
hidden.set_size(6)
hidden.local.size = 7
hidden.variable.set(8)
logging.getLogger("package").setLevel(logging.DEBUG)
assert [*loader] == [[(1, 1, 3, 5, 6, 7, 8, (True, True))] * 2] * 2
logging.disable(logging.CRITICAL)
assert [*loader] == [[(1, 1, 3, 5, 6, 7, 8, (False, False))] * 2] * 2
""")


OF_THE_NODE = """
import os, random

where, level, flag = os.environ.get("WHERE"), 1, 1
folder = {"where": where}

class Rows:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return where, folder["where"], level, globals().get("flag")
"""


@pytest.fixture
def passes_with(passes):
    """Run a script that has imported this as ``own``."""

    def run(own, source):
        return passes(f"""
import os
import pathlib
sys.path.insert(0, str(pathlib.Path(__file__).parent))
pathlib.Path(__file__).with_name("own.py").write_text({own!r})
os.environ["WHERE"] = "script"
import own
{source}
""")

    return run


def test_what_a_module_finds_on_its_machine_is_that_of_the_node_until_the_script_changes_it(passes_with):
    passes_with(
        OF_THE_NODE,
        """
assert (own.where, own.folder) == ("script", {"where": "script"})
loader = load(own.Rows())
exec("own.level = 2")
if not own.where:
    own.where = "elsewhere"
assert [*loader] == [[(None, None, 2, 1)] * 2] * 2
exec("own.folder['where'] = 'here'")
assert [*loader] == [[(None, "here", 2, 1)] * 2] * 2
exec("own.folder['where'], own.level = own.where, 1")  # as they were, which workers have not had
assert [*loader] == [[(None, "script", 1, 1)] * 2] * 2
""",
    )


def test_names_of_a_module_that_the_script_deletes_and_sets_again_are_deleted_and_set_in_workers(passes_with):
    passes_with(
        OF_THE_NODE,
        """
for dataset in own.Rows(), RPCDataset(address, own.Rows):
    loader = load(dataset)
    own.flag = 2
    assert [*loader] == [[(None, None, 1, 2)] * 2] * 2
    del own.flag
    assert [*loader] == [[(None, None, 1, None)] * 2] * 2
    vars(own)["flag"] = 3
    assert [*loader] == [[(None, None, 1, 3)] * 2] * 2
""",
    )


WITH_MEMO = """
table, seen, handle, level, opened = {"a": 1}, {}, None, 1, None

def open_one():
    global opened
    opened = (each for each in ())

class Rows:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return len(table), len(seen), handle is None, level
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("own.table['b'] = (each for each in ())", "workers of nodes do not get what has changed in own.table: "),
        ("own.table.update((n, str(n) * 50) for n in range(20_000))", "own.table: it has more than 1 MiB"),
        (
            "own.handle = (each for each in ())",
            "own.handle: cannot pickle 'generator' object; set it in worker_init_fn",
        ),
        ("own.seen['b'] = (each for each in ()); own.open_one()", ""),
        ("own.seen['b'] = only_here.Thing()", ""),
    ],
)
def test_what_cannot_be_sent_of_an_own_module_stays_as_it_is_on_nodes(passes_with, change, told):
    ended = passes_with(
        WITH_MEMO,
        f"""
path = pathlib.Path(__file__).with_name("only_here.py")
path.write_text("class Thing: pass")
import only_here
path.unlink()
exec({change!r} + "; own.level = 2")
for epoch in range(2):
    assert [*load(own.Rows())] == [[(1, 0, True, 2)] * 2] * 2
""",
    )
    assert ended.errors.count("workers of nodes do not get") == (told != "")
    assert told in ended.errors


def test_what_can_be_sent_only_later_reaches_the_workers_of_later_passes(passes_with):
    ended = passes_with(
        WITH_MEMO,
        """
loader = load(own.Rows())
own.table["b"] = (each for each in ())
for _ in range(2):
    assert [*loader] == [[(1, 0, True, 1)] * 2] * 2
own.table["b"] = 2
assert [*loader] == [[(2, 0, True, 1)] * 2] * 2
""",
    )
    assert ended.errors.count("workers of nodes do not get") == 1


def test_what_a_module_has_computed_from_another_stays_as_the_script_changes_that(passes):
    passes(f"""
import pathlib
folder = pathlib.Path(__file__).parent
sys.path.insert(0, str(folder))
(folder / "settings.py").write_text({SETTINGS!r})
(folder / "derived.py").write_text({DERIVED!r})
import derived

derived.options.size = 2
assert [*load(derived.Derived())] == [[(1, 2, 1, 1)] * 2] * 2
""")


def test_worker_that_is_forked_after_another_pass_has_begun_has_modules_and_settings_of_its_own_pass(passes_with):
    passes_with(
        "size, names = 1, ['a']\nclass Options:\n    level = 1",
        """
import signal, torch

class Seen(Numbers):
    def __len__(self):
        return 8

    def __getitem__(self, _index):
        return look(), os.getpid()

def look():
    return own.size, list(own.names), own.Options.level, own.limit, torch.get_default_dtype(), os.getcwd()

def change(number):
    folder = pathlib.Path(__file__).with_name(str(number))
    folder.mkdir()
    os.chdir(folder)
    own.limit = number
    torch.set_default_dtype((torch.float32, torch.float64)[number])

change(0)
batches = iter(load(Seen(), prefetch_factor=1))
((first, pid), _second) = next(batches)
assert first == look()
change(1)
own.size = own.Options.level = 2
own.names.append("b")
assert {seen[2:] for batch in load(Seen()) for seen, _pid in batch} == {look()[2:]}
os.kill(pid, signal.SIGKILL)
for batch in batches:
    for seen, other in batch:
        assert seen == first, (seen, first)
assert other != pid
""",
    )


SHARING = """
class Net:
    def __init__(self):
        self.weights = [[1], [2]]

NET = Net()
WEIGHTS = list(NET.weights)
TABLE = {"a": {"size": 1}, "b": {"size": 2}}
VIEW = list(TABLE.values())
RIGHT = ({1}, {2})
LEFT = RIGHT[:1]

class Holder:
    net = NET

def double():
    for weight in WEIGHTS:
        weight[0] *= 2

def read():
    return NET.weights[0][0]
"""


def test_object_that_two_globals_have_is_one_in_workers(passes):
    passes(f"""{SHARING}
class Rows(Numbers):
    def __getitem__(self, index):
        VIEW[0]["size"] += index
        return TABLE["a"]["size"] == VIEW[0]["size"], LEFT[0] is RIGHT[0], Holder.net is NET

def collate(samples):
    double()
    return samples, read(), Holder.net.weights[0] is WEIGHTS[0]

for dataset in Rows(), RPCDataset(address, Rows):
    loader = load(dataset, collate_fn=collate)
    got = [*loader]; assert got == [([(True, True, True)] * 2, 2, True), ([(True, True, True)] * 2, 4, True)], got
    NET.weights[0][0] = 10  # which is in both
    got = [*loader]; assert [read for _, read, _ in got] == [20, 40], got
    NET = Holder.net = Net()
    got = [*loader]; assert got[0] == ([(True, True, True)] * 2, 1, False), got
    WEIGHTS = list(NET.weights)
    got = [*loader]; assert got[0] == ([(True, True, True)] * 2, 2, True), got
""")


def test_calls_keep_what_they_have_changed_in_an_object_that_two_globals_have(passes):
    passes(f"""{SHARING}
call(double)
assert call(lambda: (double(), read())[1]) == 2  # the first that uses both
assert call(read) == 2
call(double)
assert call(read) == 4
assert read() == 1
""")


def test_global_that_shares_an_object_with_one_in_use_is_not_sent_for_that(passes):
    passes("""
class Secret:
    def __reduce__(self):
        raise AssertionError("it is pickled")

TABLE = {"size": [1], "secret": Secret()}
SIZES = [TABLE["size"]]
assert call(lambda: SIZES) == [[1]]
""")


def test_tensors_that_are_views_of_the_same_memory_stay_so_in_a_dataset_and_among_globals(passes):
    passes("""
import torch

WHOLE = torch.zeros(4, 100)
ROW, SAME = WHOLE[1], {"whole": WHOLE.view(-1)}

class Views(Numbers):
    def __init__(self, size):
        self.part = [torch.arange(size, dtype=torch.int16)[2:]]
        self.bytes = self.part[0].view(torch.uint8)
        self.whole = torch.arange(size)
        self.start, self.column = self.whole[: size // 2], self.whole.view(-1, 4)[:, 1]
        self.apart = [*torch.zeros(2, size)]

    def __getitem__(self, index):
        self.part[0][0], self.column[0], self.apart[0][0], WHOLE[1, 3] = 258, 7, 9, 5
        found = self.bytes[:2].tolist(), self.whole[1].item(), self.start[1].item()
        return found, self.apart[1][0].item(), ROW[3].item(), SAME["whole"][103].item()

for size in 8, 80_000:
    for dataset in Views(size), RPCDataset(address, Views, size), RPCDataset(address, lambda views: views, Views(size)):
        got = [*load(dataset)]
        assert got == [[(([2, 1], 7, 7), 0.0, 5.0, 5.0)] * 2] * 2, got
""")


def test_plain_object_of_a_module_is_that_of_the_module_in_workers(passes_with):
    passes_with(
        "MISSING, OTHER = object(), object()\ndef get():\n    return MISSING, OTHER",
        """
from own import MISSING

ABSENT = object()

class Rows(Numbers):
    def __init__(self):
        self.others = [own.OTHER, MISSING, ABSENT]

    def __getitem__(self, index):
        missing, other = own.get()
        return missing is MISSING, [each is mine for each, mine in zip(self.others, (other, missing, ABSENT))]

for dataset in Rows(), RPCDataset(address, Rows):
    got = [*load(dataset)]; assert got == [[(True, [True, True, True])] * 2] * 2, got
""",
    )


def test_globals_that_the_script_deletes_are_deleted_in_the_workers_of_later_passes_and_for_calls(passes):
    passes("""
FLAG = TABLE = None

class Rows(Numbers):
    def __getitem__(self, index):
        return "FLAG" in globals(), look()

def look():
    try:
        return TABLE["size"]
    except NameError:
        return None

for dataset in Rows(), RPCDataset(address, Rows):
    FLAG, TABLE = True, {"size": 2}
    loader = load(dataset)
    got = [*loader]; assert got == [[(True, 2)] * 2] * 2, got
    assert call(look) == 2
    del FLAG, TABLE
    got = [*loader]; assert got == [[(False, None)] * 2] * 2, got
    assert call(look) is None
    TABLE = {"size": 3}
    got = [*loader]; assert got == [[(False, 3)] * 2] * 2, got
    assert call(look) == 3
""")


def test_second_dataset_of_a_script_leaves_the_first_as_it_is(passes):
    passes("""
class Vocabulary:
    words = []

class Texts(Numbers):
    def __init__(self, word):
        Vocabulary.words.append(word)

    def __getitem__(self, index):
        return list(Vocabulary.words)

first = RPCDataset(address, Texts, "a")
loader = load(first)
assert list(loader) == [[["a"]] * 2] * 2
second = RPCDataset(address, Texts, "b")  # they are of one class, and one process, as in the script
assert list(loader) == list(load(second)) == [[["a", "b"]] * 2] * 2
""")


def test_equal_instance_of_a_class_that_was_defined_again_is_of_the_new_one(passes):
    passes("""
loaders = []
for factor in (1, 10):
    exec(f"class Scaled(Numbers):\\n    def __getitem__(self, index):\\n        return index * {factor}")
    loaders.append(load(Scaled()))
    assert list(loaders[-1]) == [[0, factor], [2 * factor, 3 * factor]]
""")


def test_what_comes_back_is_the_object_of_the_script(passes):
    passes("""
MISSING = object()
before = MISSING, Numbers, call

def identity(value):
    return value

for value in before:
    assert call(identity, value) is value
assert (MISSING, Numbers, call) == before
""")


def test_local_class_is_one_in_all_messages_and_keeps_what_a_worker_has_set(passes):
    passes("""
def main():
    class Local(Numbers):
        seen = []

        def __getitem__(self, index):
            Local.seen.append(index)
            return index

    def collate(samples):
        return samples, list(Local.seen)

    assert list(load(Local(), collate_fn=collate)) == [([0, 1], [0, 1]), ([2, 3], [0, 1, 2, 3])]
    assert Local.seen == []

main()
""")


def test_large_global_travels_once_and_small_calls_stay_small(passes):
    passes("""
import numpy as np
from rpcdataloader.client import connection

sizes = []
with_lacking = connection.Connection._with_lacking

def measure(self, content, request):
    content = with_lacking(self, content, request)
    sizes.append(len(content.payload))
    return content

connection.Connection._with_lacking = measure

LARGE = np.arange(1 << 20)

class Rows(Numbers):
    def __getitem__(self, index):
        return int(LARGE[index])

def get(index):
    return int(LARGE[index])

dataset = RPCDataset(address, Rows)
for _epoch in range(2):
    assert list(load(dataset)) == [[0, 1], [2, 3]]
assert [call(get, number) for number in range(3)] == [0, 1, 2]
assert sum(size > 1 << 20 for size in sizes) == 1, sizes
assert max(sizes[-2:]) < 400, sizes
""")


def test_what_a_script_does_not_use_in_workers_is_sent_only_if_it_is_small(passes):
    passes("""
import numpy as np
from rpcdataloader.client import connection

sizes = []
with_definitions = connection.Encoded.with_definitions

def measure(self, lacking=None):
    content = with_definitions(self, lacking)
    sizes.append(len(content.payload))
    return content

connection.Encoded.with_definitions = measure

class Costly:
    def __reduce__(self):
        raise AssertionError("it is not used there")

class Model:
    weights, parts, costly = np.ones(1 << 20), [np.ones(1 << 20)], Costly()

def predict(model=np.ones(1 << 20)):
    return model

def small():
    return 5

class Asks(Numbers):
    def __getitem__(self, index):
        return [hasattr(sys.modules["__main__"], name) for name in ("Model", "predict", "small")]

assert list(load(RPCDataset(address, Asks)))[0] == [[False, False, True]] * 2
assert max(sizes) < 1 << 17
""")


def test_function_without_a_name_finds_what_python_and_the_script_define_later(passes):
    passes("""
class Calls(Numbers):
    def __init__(self, function):
        self.function = function

    def __getitem__(self, index):
        return self.function(index)

loader = load(Calls(lambda index: int(index) + (defined_later if index > 1 else 0)), batch_size=1, sampler=[0])
assert list(loader) == [[0]]
defined_later = 5
loader = load(loader.dataset, batch_size=1, sampler=[2])
assert list(loader) == [[7]]
""")


def test_references_among_the_globals_are_their_objects_in_the_worker(passes):
    passes("""
held = rpc_async(address, dict, rref=True).wait()

def put(value):
    held["value"] = value
    return len(held)

assert call(put, 1) == 1
assert call(lambda: dict(held)) == {"value": 1}

dataset = RPCDataset(address, Numbers)
assert list(load(dataset, collate_fn=lambda samples: (samples, dataset[0]))) == [([0, 1], 0), ([2, 3], 0)]
""")


UNSENDABLE = """
import sqlite3

DATABASE = sqlite3.connect(":memory:")

class Reader:
    handle = DATABASE

class Rows(Numbers):
    def __getitem__(self, index):
        {}

try:
    RPCDataset(address, Rows)
except Exception as error:
    sys.stdout.write(str(error))
"""


@pytest.mark.parametrize(
    ("use", "text"),
    [
        ("return DATABASE.execute('')", r"global DATABASE, which Rows.__getitem__ uses, is a sqlite3.Connection"),
        ("return (lambda: DATABASE)()", r"global DATABASE, which Rows.__getitem__ uses, is a sqlite3.Connection"),
        ("return Reader()", r"script's Reader, which Rows.__getitem__ uses, .*: Reader.handle is a sqlite3.Connection"),
    ],
)
def test_global_that_cannot_be_sent_is_named_with_its_user_and_what_to_do(passes, use, text):
    found = passes(UNSENDABLE.format(use)).output
    assert re.search(text, found), found
    assert "where it is used first" in found
    assert "RPCDataset(" not in found  # which the script does
