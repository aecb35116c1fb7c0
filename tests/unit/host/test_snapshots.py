"""What has changed in modules since they were imported: in workers, see ``tests/behaviour/test_definitions.py``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from rpcdataloader.host import sources
from rpcdataloader.host.snapshots import Deleted, snapshots

MODULE = """
import contextvars
import functools
import logging
import os
import random
import threading

logger, lock, handle, memo = logging.getLogger("own"), threading.Lock(), None, {}
level, table, text = 1, {"a": [1]}, "a" * 5000
alias = table

class Limits:
    by_name = {"a": 1}
    one = None

    class Inner:
        depth = 1

    @classmethod
    def get(cls):
        cls.one = cls.one or cls()
        return cls.one

    def __len__(self, more=1):
        return more

    def size_of(self, more=()):
        return 1

limits = Limits()

def fill(value, seen=[]):
    seen.append(value)

@functools.singledispatch
def size_for(value):
    return 0

@functools.cache
def cached(value):
    return value

def counter(count=0):
    table = {}

    class Counted:
        limit = 1

    def get():
        return count, table

    def put(key):
        nonlocal count
        count, table[key] = count + 1, 1

    return get, put, Counted

count_of, count_up, Counted = counter()
get_limits = limits.get
draw, seed = (lambda source: (source.random, source.seed))(random.Random(1))
local, variable = threading.local(), contextvars.ContextVar("variable")
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make and import a module of the script's own."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(source, name="own_module"):
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)
        snapshots.forget(name)


@pytest.fixture
def own(make):
    return make(MODULE)


def found(name="own_module"):
    """What was found, without values."""
    values = snapshots.find(sources.recorder.look())
    return {key.partition(":")[2]: value for key, value in values.items() if key.startswith(f"{name}:")}


CHANGES = {
    "own.level = 2": "level[=]",
    "own.level = True": "level[=]",
    "own.text = 'a' * 5001": "text[=]",
    "own.new = 3": "new[=]",
    "del own.level": "level[=]",
    "own.table['a'].append(2)": "table[...] alias[...]",
    "own.table = {'a': [1]}": "table[=]",
    "own.limits.size = 2": "limits[...]",
    "own.Limits.by_name['b'] = 2": "Limits.by_name[...]",
    "own.Limits.Inner.depth = 2": "Limits.Inner.depth[=]",
    "own.Limits.new = 2": "Limits.new[=]",
    "del own.Limits.one": "Limits.one[=]",
    "own.Limits.get().size = 2": "Limits.one[=]",
    "own.Limits.size_of = None": "Limits.size_of[=]",
    "own.Limits.__init__ = lambda self: None": "Limits.__init__[=]",
    "own.Limits.__len__.__defaults__ = (2,)": "Limits.__len__.__defaults__[...]",
    "own.Limits.size_of.attribute = 2": "Limits.size_of.attribute[...]",
    "own.Limits = type('Limits', (), {})": "Limits[=]",
    "own.fill(1)": "fill.__defaults__[...]",
    "own.fill = own.cached": "fill[=]",
    "own.size_for.register(int, abs)": "size_for.registry[...]",
    "own.size_for.table = {}": "size_for.table[...]",
    "vars(own).update(level=2)": "level[=]",
    "own.cached(1)": "",
    "own.lock.acquire()": "",
    "own.logger.setLevel(10)": "logger[...]",
    "own.logger.disabled = True": "logger[...]",
    "own.count_up('a')": "count_of.<count>[...] count_of.<table>[...] count_up.<count>[...] count_up.<table>[...]",
    "own.Counted.limit = 2": "Counted.limit[=]",
    "own.Counted.itself = own.Counted": "Counted.itself[=]",
    "own.seed(2)": "seed[...]",
    "own.local.size = 2": "local[...]",
    "own.variable.set(2)": "variable[...]",
    "own.level = own.level": "",
    "own.logger = own.os": "",
    "own.handle = own.os": "",
    "import torch\nown.handle = torch.utils.data.DataLoader([1])": "",
    "own.limits.get": "",
    "own.Limits.__doc__ = 'text'": "",
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_found_by_whatever_means(own, change):
    assert found() == {}
    exec(change, {"own": own})
    assert found().keys() == set(CHANGES[change].split())


OTHERS = """
import random

import used
from used import options

literal = 5
doubled, where = used.size * 2, used.__name__
table = {"size": options["size"]}

class Reader:
    size = used.size
    unchanged = 1

    def read(self, size=used.size):
        return size

reader = Reader()
"""


@pytest.fixture
def uses(make):
    """Make ``others``, after a change of ``used``."""

    def uses(change, source=OTHERS):
        used = make("size, options, level = 4, {'size': 4}, 1\nclass Config:\n    size = 4\n", "used")
        exec(change, {"used": used})
        return make(source, "others")

    return uses


ALL_OF_IT = {"doubled", "where", "table", "Reader.size", "Reader.read.__defaults__", "reader", "options"}


@pytest.mark.parametrize(
    ("change", "source", "names"),
    [
        ("", OTHERS, set()),
        ("used.size = 5", OTHERS, ALL_OF_IT),
        ("used.options['size'] = 5", OTHERS, ALL_OF_IT),
        ("used.Config.size = 5", OTHERS, ALL_OF_IT),
        ("used.size = 5", "import importlib\nsize = importlib.import_module('used').size", {"size"}),
        ("used.size = 5", "level = {}", set()),
        ("used.size = 5", "import used\nlevel = 1", set()),
        ("", "import random\nsize = random.random()\nlevel = 1", {"size"}),
        ("", "import numpy\nsize = numpy.random.rand()", {"size"}),
        ("", "import torch\nsize = torch.rand(1)", {"size"}),
        ("", "import random\nsize = random.Random(1).random()", set()),
    ],
)
def test_data_of_a_module_that_a_node_may_import_otherwise_has_changed(uses, change, source, names):
    import torch  # noqa: F401  # of which a module may draw

    uses(change, source)
    assert found("others").keys() == {f"{name}[...]" for name in names}


def test_change_reaches_modules_that_use_it_by_others_and_no_others_that_draw_numbers(make):
    used = make("size = 4", "used")
    make("import used\ndef build():\n    return used.size", "between")
    used.size = 5
    make("import between\nsize = between.build()", "others")
    make("import random\nsize = random.random()", "drawing")
    assert (found("between"), found("others"), [*found("drawing")]) == ({}, {"size[...]": 5}, ["size[...]"])


def test_module_is_no_other_for_what_modules_change_in_each_other(make):
    make("names = {}", "used")
    make("import used\nused.names['first'] = 1\nsize = [1] * 2", "first")
    make("import used\nused.names['second'] = 1\nsize = [1] * 2", "second")
    assert ([*found("used")], found("first"), found("second")) == (["names[...]"], {}, {})


def test_module_that_imports_one_that_draws_numbers_has_drawn_none_itself(make, tmp_path):
    (tmp_path / "drawing.py").write_text("import random\nsize = random.random()")
    make("size = [1] * 2\nimport json\ndef load():\n    pass\n__import__(str.join('', ['draw', 'ing']))", "others")
    assert ([*found("drawing")], found("others")) == (["size[...]"], {})
    sys.modules.pop("drawing")
    snapshots.forget("drawing")


def test_present_values_are_found_and_what_was_changed_once_counts_for_good(own):
    own.level, own.table["b"] = 2, 2
    own.Limits.one = 3
    del own.handle
    assert found() == {
        "level[=]": 2,
        "table[...]": own.table,
        "alias[...]": own.table,
        "Limits.one[=]": 3,
        "handle[=]": Deleted,
    }
    own.level, own.handle = 1, None
    del own.table["b"], own.Limits.one
    assert found() == {
        "level[=]": 1,
        "table[...]": own.table,
        "alias[...]": own.table,
        "Limits.one[=]": Deleted,
        "handle[=]": None,
    }
    own.Limits = 3
    assert "Limits.one[=]" not in found()
    del own.Limits
    assert "Limits.one[=]" not in found()


def test_what_may_stay_as_a_node_has_it(own):
    def may_stay(name, value=1, kind="="):
        return snapshots.may_stay(f"own_module:{name}[{kind}]", value)

    assert may_stay("Limits.one")  # which a method sets
    assert may_stay("memo", kind="...")
    assert not any(map(may_stay, ("handle", "memo", "table", "level", "new", "Limits.by_name.a")))
    values = {"table": {}, "limits": own.limits, "options": argparse.Namespace(), "bar": threading.Event()}
    found = {name: may_stay(name, value, "...") for name, value in values.items()}
    assert found == {"table": False, "limits": False, "options": False, "bar": True}


def test_reloaded_module_has_changed_since_its_reload_alone_but_for_what_had_changed_before(own):
    own.level = 2
    importlib.reload(own)
    own.table["b"] = 2
    assert found() == {"level[=]": 1, "table[...]": own.table, "alias[...]": own.table}


def test_module_that_is_imported_again_is_compared_with_itself(own, make):
    del sys.modules["own_module"]
    again = make(MODULE)
    assert found() == {}
    own.level, again.handle = 2, 3
    assert found() == {"handle[=]": 3}


def test_module_that_is_loaded_by_its_path_is_compared(tmp_path):
    path = tmp_path / "by_path.py"
    path.write_text("level = 1")
    spec = importlib.util.spec_from_file_location("by_path", path)
    module = sys.modules["by_path"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.level = 2
    assert found("by_path") == {"level[=]": 2}
    del sys.modules["by_path"]
    snapshots.forget("by_path")


@pytest.mark.usefixtures("own")
def test_what_a_module_changes_in_another_one_has_changed(make):
    make("import own_module\nown_module.level = 2", "other_module")
    assert (found(), found("other_module")) == ({"level[=]": 2}, {})


def test_import_that_fails_tells_nothing_of_what_watches_it(make):
    with pytest.raises(ZeroDivisionError) as error:
        make("1 / 0", "failing_module")
    assert sources.__file__ not in {str(entry.path) for entry in error.traceback}


def test_module_with_values_that_fail_when_asked_is_imported(make):
    module = make("""
class Lazy:
    __class__ = property(lambda self: 1 / 0)

    def __getattr__(self, name):
        raise ValueError(name)

    __eq__ = __bool__ = __len__ = __hash__ = None

lazy, level = Lazy(), 1
""")
    module.level = 2
    assert found() == {"level[=]": 2}


def test_module_with_a_class_of_its_own_is_compared_and_a_lazy_one_once_it_has_run(make, tmp_path):
    make("""
import sys, types

class Own(types.ModuleType):
    size = property(lambda self: self.level)

level = 1
sys.modules[__name__].__class__ = Own
""").level = 2
    assert found() == {"level[=]": 2}
    path = tmp_path / "lazy_module.py"
    path.write_text("level = 1")
    spec = importlib.util.spec_from_file_location("lazy_module", path)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules["lazy_module"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert found("lazy_module") == {}
    assert type(module) is not types.ModuleType
    module.level += 1
    assert found("lazy_module") == {"level[=]": 2}
    del sys.modules["lazy_module"]
    snapshots.forget("lazy_module")


def test_module_that_replaces_itself_is_left_alone(make):
    make("import sys, types\nsys.modules[__name__] = types.SimpleNamespace(__spec__=__spec__, level=1)")
    assert found() == {}


def test_table_that_a_thread_changes_meanwhile_breaks_nothing(own):
    ends = threading.Event()

    def change():
        while not ends.is_set():
            own.memo[len(own.memo) % 1000] = [own.memo.copy()]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20):
            assert found().keys() <= {"memo[...]"}
    finally:
        ends.set()
        thread.join()


EARLY = """
import sys
import types
sys.path.insert(0, sys.argv[1])
import early
early.level = 2
early.options.update(b=2)
early.found["a"] = 2
import rpcdataloader, late
early.text = late.text = "b"
from rpcdataloader.host import sources
from rpcdataloader.host.snapshots import snapshots
print(*sorted(snapshots.find(sources.recorder.look())))
print(*map(snapshots.has_all_of, ("early", "late", "between", "missing")))
print(sys.modules["between"].__spec__.__class__.__name__)
"""


def run(tmp_path, script):
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(sources.__file__).parents[2])}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_modules_that_were_imported_early_are_compared_with_their_source_and_themselves(tmp_path):
    (tmp_path / "early.py").write_text("import os\nlevel = 1\noptions = {}\nfound = dict(a=1)\nhost = os.getpid()\n")
    (tmp_path / "between.py").write_text("import rpcdataloader\nlevel = 1\ntable = {'a': 1}")
    (tmp_path / "late.py").write_text("import between\ntext = 'a'")
    changed = "early:level[=] early:options[...] early:text[=] late:text[=]"
    assert run(tmp_path, EARLY) == [changed, "False True True False", "ModuleSpec"]


def test_module_that_imports_this_package_first_is_compared_with_itself_after_its_import(tmp_path):
    (tmp_path / "between.py").write_text("import rpcdataloader, os\nlevel = 1\nwhere = os.getpid()\ntable = {'a': 1}")
    script = EARLY.replace("import early\n", "import between\nbetween.table['b'] = 2\n")
    lines = [line for line in script.splitlines() if "early" not in line or "has_all_of" in line]
    (tmp_path / "late.py").write_text("text = 'a'")
    assert run(tmp_path, "\n".join(lines)) == ["between:table[...]", "False True True False", "ModuleSpec"]
