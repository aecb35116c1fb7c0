"""What is defined in the client's ``__main__`` or in a function, tested with two interpreters joined by pipes.

``CLIENT`` runs as a script, and meanwhile as a child of it that multiprocessing spawned, where its ``__main__`` has
another name. It starts ``WORKER`` and runs each of its ``check_`` functions; the tests here report what became of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rpcdataloader

PIPE = """
import struct
from rpcdataloader.wire import exceptions, pickling
from rpcdataloader.wire.slabs import PageablePool

pool = PageablePool()

def send(stream, encoded, kind=b"R"):
    sizes = [len(encoded.payload), *(buffer.nbytes for buffer in encoded.buffers)]
    stream.write(kind + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
    for part in (encoded.payload, *encoded.buffers):
        stream.write(part)
    stream.flush()

def receive(stream):
    kind = stream.read(1)
    if not kind:
        raise SystemExit
    (count,) = struct.unpack("<I", stream.read(4))
    size, *sizes = struct.unpack(f"<{count}Q", stream.read(8 * count))
    payload = stream.read(size)
    blocks = [pool.allocate(size) for size in sizes]
    for block in blocks:
        stream.readinto(block.view)
    return kind, payload, blocks
"""

WORKER = """
import sys
import pipe
from rpcdataloader.wire import exceptions, pickling

def serve():
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while True:
        _, payload, blocks = pipe.receive(stdin)
        try:
            function, args = pickling.loads(payload, blocks, adopt_main=True)
            encoded = pickling.dumps_reply(function(*args))
        except BaseException as error:
            encoded = pickling.Encoded(exceptions.dumps_exception(error, "the worker"), [])
            pipe.send(stdout, encoded, b"E")
        else:
            pipe.send(stdout, encoded)
"""

CLIENT = '''
import abc, collections, copy, dataclasses, enum, functools, gc, json, multiprocessing, pickle, subprocess, sys
import traceback, typing, weakref
import torch
import pipe
from rpcdataloader.wire import exceptions, pickling

last_reply = b""
worker = None

def call(function, *args):
    global last_reply
    pipe.send(worker.stdin, pickling.dumps((function, args)))
    kind, last_reply, blocks = pipe.receive(worker.stdout)
    if kind == b"E":
        raise exceptions.loads_exception(last_reply)
    return pickling.loads(last_reply, blocks)

def same(x):
    return x

def snapshot(cls):
    return {name: id(value) for name, value in vars(cls).items() if name != "__slotnames__"}  # a cache of copyreg

# --- what the script defines ---

FACTOR = 3

def times(x):
    return helper(x) * FACTOR

def helper(x):
    return x

def factorial(n):
    return 1 if n == 0 else n * factorial(n - 1)

@functools.lru_cache
def cached(n):
    return n

def decorate(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 1
    wrapper.undecorated = function
    return wrapper

@decorate
def decorated(x, *, y=1):
    return x + y

class Plain:
    """Its documentation."""
    count = 0

    def __init__(self, x=0):
        self.x = x

    def method(self):
        return self.x * FACTOR

    @property
    def double(self):
        return 2 * self.x

    @classmethod
    def make(cls, x):
        return cls(x)

    @staticmethod
    def constant():
        return 5

    class Inner:
        class Innermost:
            pass

class Derived(Plain):
    def method(self):
        return super().method() + 1

class Meta(type):
    def shout(cls):
        return cls.__name__.upper()

class WithMeta(metaclass=Meta):
    pass

class Abstract(abc.ABC):
    @abc.abstractmethod
    def work(self): ...

class Concrete(Abstract):
    def work(self):
        return "done"

T = typing.TypeVar("T")

class Box(typing.Generic[T]):
    def __init__(self, item):
        self.item = item

@dataclasses.dataclass
class Record:
    x: int
    tensor: torch.Tensor
    tags: list = dataclasses.field(default_factory=list)

@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int = 1

class Color(enum.Enum):
    RED = 1
    BLUE = 2
    def lower(self):
        return self.name.lower()

class Number(enum.IntEnum):
    ONE = 1

class Permission(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()

Pair = collections.namedtuple("Pair", "left right")

class Typed(typing.NamedTuple):
    x: int
    y: str = "y"

class Failure(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)
        self.code = code

CLASSES = [Plain, Plain.Inner, Plain.Inner.Innermost, Derived, Meta, WithMeta, Abstract, Concrete, Box]
CLASSES += [Record, Frozen, Color, Number, Permission, Pair, Typed, Failure]

def instances():
    return [
        Plain(2), Plain.Inner(), Plain.Inner.Innermost(), Derived(3), WithMeta(), Concrete(), Box(3),
        Record(1, torch.ones(2)), Frozen(4), Color.BLUE, Number.ONE, Permission.READ | Permission.WRITE,
        Pair(1, 2), Typed(1),
    ]

# --- functions that run on the worker ---

def spoil(x):
    Plain.count = 99
    Plain.method = None
    Plain.added = lambda: 1
    Color.extra = 5
    return Plain(1), Color.RED, Plain

def pickle_by_name(x):
    return type(pickle.loads(pickle.dumps(x))) is type(x) and copy.deepcopy(x).x == x.x

def is_adopted(*names):
    main = sys.modules["__main__"]
    return [hasattr(main, name) for name in names]

made = []

def make_instance():
    class Made:
        def __init__(self):
            self.value = FACTOR
    made.append(Made)
    sys.made = Made
    return Made()

def is_made_here(x):
    return type(x) is sys.made

def make_function(n):
    offset = torch.ones(2)
    return lambda x: x + n + offset

def remember(x):
    sys.remembered = x

def recall():
    return sys.remembered

def fail():
    raise Failure(3, "text")

def state_of_class(cls):
    return cls.count

# --- checks ---

def check_instances_come_back_with_the_classes_of_the_script():
    sent = instances()
    for there, here in zip(call(same, sent), sent):
        assert type(there) is type(here), (type(there), type(here))
    received = call(same, sent)
    assert received[0].method() == 6 and received[0].double == 4
    assert received[3].method() == 10
    assert received[6].item == 3
    assert received[7].tensor.tolist() == [1, 1] and received[7].tags == []
    assert received[8] == Frozen(4)
    assert received[12] == (1, 2) and received[13] == Typed(1)

def check_members_of_enums_come_back_as_themselves():
    assert call(same, Color.RED) is Color.RED
    assert call(same, {Color.BLUE: Number.ONE}) == {Color.BLUE: Number.ONE}
    assert call(lambda: Color.BLUE.lower()) == "blue"

def check_classes_come_back_as_themselves():
    for cls in CLASSES:
        assert call(same, cls) is cls, cls
    assert call(lambda: [Plain, Color, Pair]) == [Plain, Color, Pair]
    assert call(lambda: WithMeta.shout()) == "WITHMETA"

def check_results_created_on_the_worker_have_the_classes_of_the_script():
    received = call(lambda: [Plain(5), Record(1, torch.zeros(3)), Color["RED"], Pair(1, 2), Concrete()])
    assert [type(x) for x in received] == [Plain, Record, Color, Pair, Concrete]
    assert received[4].work() == "done"

def check_classes_of_the_script_are_unchanged():
    before = [snapshot(cls) for cls in CLASSES]
    for _ in range(3):
        call(same, instances())
        call(same, CLASSES)
        call(lambda: instances())
    assert [snapshot(cls) for cls in CLASSES] == before

def check_what_the_worker_does_to_a_class_stays_there():
    before = snapshot(Plain), snapshot(Color)
    thing, color, cls = call(spoil, Plain(1))
    assert type(thing) is Plain is cls and color is Color.RED
    assert (snapshot(Plain), snapshot(Color)) == before
    assert thing.method() == 3

def check_no_code_of_the_script_is_in_a_reply():
    call(same, instances())
    assert b"cloudpickle" not in last_reply, last_reply
    call(same, [CLASSES, times, decorated])
    assert b"cloudpickle" not in last_reply, last_reply

def check_change_of_a_class_reaches_the_worker():
    class Local:
        count = 1
    assert call(state_of_class, Local) == 1
    Local.count = 2
    assert call(state_of_class, Local) == 2

def check_worker_can_pickle_by_name():
    assert call(pickle_by_name, Plain(3))
    call(same, [times, Color])
    assert call(is_adopted, "Plain", "times", "Color", "Local", "<lambda>") == [True] * 3 + [False] * 2

def check_cached_function_of_the_script_is_refused():
    try:
        call(cached, 1)
    except Exception as error:
        assert "put it into a module of its own" in str(error), error
    else:
        raise AssertionError("not raised")

def check_functions_run_on_the_worker():
    assert call(times, 5) == 15
    assert call(factorial, 10) == 3628800
    assert call(decorated, 1, ) == 3
    assert call(functools.partial(decorated, y=10), 1) == 12
    assert call(Plain(7).method) == 21
    assert call(Plain.make, 3).x == 3
    assert call(Plain.constant) == 5
    assert call(lambda x: times(x) + FACTOR, 1) == 6

def check_functions_come_back_as_themselves():
    for function in (times, factorial, decorated, snapshot):
        assert call(same, function) is function, function
    assert call(lambda: [times, decorated])[1] is decorated
    assert call(same, lambda: FACTOR)() == 3
    assert call(same, decorated.undecorated)(1) == 2
    assert call(same, Plain(3).method).__func__ is Plain.method

def check_function_of_the_worker_comes_back_by_value():
    function = call(make_function, 10)
    assert function(1).tolist() == [12, 12]
    assert call(function, 2).tolist() == [13, 13]
    assert call(lambda: times)(2) == 6

def check_closures_carry_what_they_hold():
    state = {"tensor": torch.arange(100_000), "plain": Plain(3)}
    received = call(lambda: (state["plain"], state["tensor"] + 1))
    assert type(received[0]) is Plain and received[1][-1] == 100_000

def check_local_class_comes_back_as_itself():
    class Local:
        items = []
        def method(self):
            return self.__class__, Plain
    Data = dataclasses.make_dataclass("Data", ["x"])
    Point = collections.namedtuple("Point", "x y")
    class Kind(enum.Enum):
        A = 1
    for _ in range(2):
        received = call(same, [Local(), Data(1), Point(1, 2), Kind.A, Local])
        assert [type(x) for x in received] == [Local, Data, Point, Kind, type]
        assert received[3] is Kind.A and received[4] is Local
    assert call(lambda: Local().method()) == (Local, Plain)

def check_lost_local_class_is_made_again():
    def go():
        class Lost:
            def value(self):
                return 17
        call(remember, Lost())
        return weakref.ref(Lost)
    lost = go()
    gc.collect()
    assert lost() is None
    assert call(recall).value() == 17

def check_class_of_the_worker_is_known_when_it_goes_back():
    made = call(make_instance)
    assert made.value == 3
    assert call(is_made_here, made)
    assert type(call(same, made)) is type(made)

def check_old_instances_keep_their_class_when_the_script_defines_it_again():
    global Again
    class Again:
        pass
    Again.__qualname__ = "Again"
    old, old_class = Again(), Again
    call(remember, old)
    class Again:
        pass
    Again.__qualname__ = "Again"
    call(same, Again())
    assert type(call(recall)) is old_class is not Again
    assert type(call(same, Again())) is Again

def check_exceptions_of_the_script_keep_their_type():
    try:
        call(fail)
    except Failure as error:
        assert type(error) is Failure and error.code == 3 and error.args == (3, "text")
        assert "in fail" in str(error.__cause__)
    else:
        raise AssertionError("not raised")

def check_nothing_sent_is_kept():
    class Big:
        pass
    big = Big()
    function = lambda: big
    call(same, function)
    alive = weakref.ref(function), weakref.ref(Big)
    del function, big, Big
    gc.collect()
    assert alive[0]() is None and alive[1]() is None

def main(output):
    global worker
    command = [sys.executable, "-c", "import worker_loop; worker_loop.serve()"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    results = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                results[name] = ""
            except BaseException:
                results[name] = traceback.format_exc()
    worker.stdin.close()
    worker.wait(20)
    worker.stdout.close()
    with open(output, "w") as file:
        json.dump(results, file)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=main, args=(sys.argv[1] + "/spawned",))
    child.start()
    main(sys.argv[1] + "/script")
    child.join()
    sys.exit(child.exitcode)
'''

CHECKS = re.findall(r"def (check_\w+)", CLIENT)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("definitions")
    for name, source in {"pipe": PIPE, "worker_loop": WORKER, "client": CLIENT}.items():
        (folder / f"{name}.py").write_text(source)
    root = Path(rpcdataloader.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, folder / "client.py", folder], env=environment, timeout=100, check=True)
    return {way: json.loads((folder / way).read_text()) for way in ("script", "spawned")}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("way", ["script", "spawned"])
def test_definitions(results, way, check):
    assert results[way][check] == "", results[way][check]
