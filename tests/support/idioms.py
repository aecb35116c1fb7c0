"""What scripts and notebooks do in ``__main__``, as one script: an idiom for each way in which a process may differ.

``python idioms.py torch:fork`` loads the dataset of each idiom twice, and prints what came, as JSON. Other ways are
``torch:spawn`` and ``torch:forkserver``; ``apart:fork``, with a worker for each idiom; ``rpc:WORKERS`` for our workers,
``built:WORKERS`` for our ``RPCDataset`` on them; and ``rpc:WORKERS/CONTEXT`` for those of a multiprocessing context. A
new worker loads each of the two epochs, as one batch; between them, the script may change what it has defined. torch's
workers are shared by all idioms, as each costs much: so idioms must not meet.

Tests do not import it: definitions of a module are found by their names.
"""

from __future__ import annotations

import abc
import collections.abc
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import enum
import functools
import json
import logging
import math
import operator
import os
import os.path as paths
import pickle
import random
import string
import sys
import threading
import typing
import weakref
import xml.dom.minidom
from collections import namedtuple
from math import floor as round_down
from os import environ
from random import random as draw

import numpy as numbers_of_python
import torch
import typing_extensions
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

import __main__

IDIOMS = []


@dataclasses.dataclass
class Idiom:
    name: str
    make: object  # makes the dataset
    collate: object
    init: object
    change: object  # between the epochs; may return another dataset
    show: object  # in the script, of a batch
    may_share: bool  # whether it may share its worker with others


def plain(samples):
    return samples


def idiom(name, make, collate=plain, init=None, change=None, show=None, may_share=True):
    IDIOMS.append(Idiom(name, make, collate, init, change, show, may_share))


class Four(Dataset):
    def __len__(self):
        return 4


class Each(Four):
    """A function of the index."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, index):
        return self.function(index)


# --- globals

scale = 3


def scaled(index):
    return index * scale


def rescale():
    global scale
    scale = 5


idiom("a constant, changed between epochs", functools.partial(Each, scaled), change=rescale)

level = 1


def set_level(_worker):
    global level
    level = 10


def levelled(index):
    return index * level


def with_level(samples):
    return samples, level


idiom("a global that worker_init_fn sets", functools.partial(Each, levelled), with_level, set_level)

MISSING = object()


def with_gaps(index):
    return MISSING if index == 2 else index


def without_gaps(samples):
    return [sample for sample in samples if sample is not MISSING]


idiom("a sentinel", functools.partial(Each, with_gaps), without_gaps)


def give(index, otherwise=MISSING):
    return otherwise if index else index


idiom("a sentinel as a default", functools.partial(Each, give), without_gaps)

CONFIG = {"size": 2, "names": ["a"]}


def configured(index):
    return CONFIG["size"] * index, len(CONFIG["names"])


def reconfigure():
    CONFIG["size"] = 7
    CONFIG["names"].append("b")


idiom("a dict that is changed in place", functools.partial(Each, configured), change=reconfigure)

loaded = None


def load_once(index):
    global loaded
    if loaded is None:
        loaded = {"by": index}
    return loaded["by"]


idiom("a global filled on first use", functools.partial(Each, load_once))

counted = 0


def count(index):
    global counted
    counted += 1
    return counted


def with_count(samples):
    return samples, counted


idiom("a counter", functools.partial(Each, count), with_count)

FIRST = SECOND = {"number": 1}


def put_first(index):
    FIRST["number"] += index
    return 0


def get_second(samples):
    return SECOND["number"]


idiom("two names of one object", functools.partial(Each, put_first), get_second)

if __name__ in ("__main__", "__mp_main__"):
    guarded = 4


def use_guarded(index):
    return guarded + index


idiom("a global under a condition", functools.partial(Each, use_guarded))


def by_globals(index):
    return globals()[("scaled_by_name", "CONSTANT_BY_NAME")[index % 2]]


def scaled_by_name(index):
    return -index


CONSTANT_BY_NAME = 9


def show_kinds(batch):
    return [type(each).__name__ for each in batch]


idiom("globals()[name]", functools.partial(Each, by_globals), show=show_kinds)


def by_globals_with_default(index):
    return globals().get("TABLE_BY_NAME", {}).get(index), len(globals().get("LIST_BY_NAME", ()))


TABLE_BY_NAME, LIST_BY_NAME = {1: "one"}, [1, 2]

idiom("globals().get(name)", functools.partial(Each, by_globals_with_default))


def by_module(index):
    return sys.modules[__name__].function_by_module(index)


def function_by_module(index):
    return index + 20


idiom("getattr(sys.modules[__name__], name)", functools.partial(Each, by_module))


def by_main(index):
    return __main__.FOR_MAIN + index


FOR_MAIN = 30

idiom("import __main__", functools.partial(Each, by_main))


def sum(values):  # of the script, in place of Python's
    return "sum", list(values)


def shadowed(index):
    return sum(range(index))


idiom("a name of Python's, defined anew", functools.partial(Each, shadowed))

NUMBERS = numbers_of_python.arange(100_000)
TENSOR = torch.arange(10)


def of_arrays(index):
    NUMBERS[index] += 1
    return int(NUMBERS[index]), int(TENSOR[index])


idiom("arrays", functools.partial(Each, of_arrays))

random.seed(5)
ORDER = random.sample(range(10), 4)
generator_of_script = random.Random(6)


def drawn(index):
    return ORDER[index], generator_of_script.randrange(1000)


idiom("seeds at the top, a generator", functools.partial(Each, drawn))

LOCK, LOCAL, EVENT, CONDITION = threading.Lock(), threading.local(), threading.Event(), threading.Condition()
LOCAL.value, CONTEXT = 5, contextvars.ContextVar("context", default=6)


def locked(index):
    with LOCK, CONDITION:
        return getattr(LOCAL, "value", None), CONTEXT.get(), EVENT.is_set(), index


idiom("a lock, an event", functools.partial(Each, locked))

logger = logging.getLogger(__name__)
logger.setLevel(logging.ERROR)


def logs(index):
    logger.info("index %d", index)
    return logger.isEnabledFor(logging.INFO), logger.level


idiom("a logger", functools.partial(Each, logs))

# --- modules


def with_modules(index):
    return float(numbers_of_python.sqrt(index)), paths.join("a", "b"), round_down(index / 2), string.digits[index]


idiom("aliases of modules", functools.partial(Each, with_modules))


def with_part(index):
    return xml.dom.minidom.parseString(f"<a>{index}</a>").documentElement.tagName


idiom("a part of a package", functools.partial(Each, with_part))


def imports_late(index):
    import fractions as parts

    return str(parts.Fraction(index, 2))


idiom("an import in a function", functools.partial(Each, imports_late))

math.answer = 42
string.Template.delimiter = "%"


def patched(index):
    return math.answer + index, string.Template("%a $a").substitute(a=index)


idiom("a library that the script patches", functools.partial(Each, patched))


class Label(str):
    pass


def labels(index):
    return Label(f"label {index}")


def as_numbers(batch, *, collate_fn_map=None):
    return [int(text.split()[1]) for text in batch]


default_collate_fn_map[Label] = as_numbers

idiom("a type registered with torch's collate", functools.partial(Each, labels), torch.utils.data.default_collate)

# --- functions


def counting(function):
    @functools.wraps(function)
    def call(*args):
        call.calls += 1
        return function(*args), call.calls

    call.calls = 0
    return call


@counting
def decorated(index):
    return index


def with_calls(samples):
    return samples, decorated.calls


idiom("a decorator that counts", functools.partial(Each, decorated), with_calls)


def repeated(times):
    def decorate(function):
        @functools.wraps(function)
        def call(value):
            for _ in range(times):
                value = function(value)
            return value

        return call

    return decorate


@repeated(3)
def doubled(value):
    return 2 * value


idiom("a decorator with arguments", functools.partial(Each, doubled))


def make_counter():
    number = 0

    def increment(by):
        nonlocal number
        number += by
        return number

    def get():
        return number

    return increment, get


increment, get_number = make_counter()


def incremented(index):
    return increment(index)


def with_number(samples):
    return samples, get_number()


idiom("functions that share a variable", functools.partial(Each, incremented), with_number)

num_computed = 0


@functools.cache
def computed(index):
    global num_computed
    num_computed += 1
    return index * 2


def computes(index):
    return computed(index // 2)


def with_computed(samples):
    return samples, num_computed, computed.cache_info().hits


idiom("functools.lru_cache", functools.partial(Each, computes), with_computed)


@functools.singledispatch
def describe(value):
    return "other"


@describe.register
def _(value: int):
    return "int"


@describe.register(str)
def _(value):
    return "str"


def describes(index):
    return describe(index), describe(str(index)), describe(1.5)


idiom("functools.singledispatch", functools.partial(Each, describes))


class Pairs:
    """Only a sequence as the script says so."""

    def __init__(self, index):
        self.index = index


collections.abc.Sequence.register(Pairs)


def kinds_of(index):
    pairs = Pairs(index)
    return isinstance(pairs, collections.abc.Sequence), isinstance(pairs, collections.abc.Mapping)


idiom("a class registered with an abstract one of a library", functools.partial(Each, kinds_of))


class OneField:
    value: int = dataclasses.field(default=dataclasses.MISSING)


OneField = dataclasses.dataclass(OneField)


def own_of_each_process(index):
    (field,) = dataclasses.fields(OneField)
    environ["IDIOM"] = str(index)
    return os.environ["IDIOM"], field.default is dataclasses.MISSING, seeded(draw, 3) == seeded(random.random, 3)


def seeded(function, number):
    random.seed(number)
    return function()


idiom("objects of which each process has one", functools.partial(Each, own_of_each_process))

power_of_two = functools.partial(pow, 2)
negative = lambda value: -value  # noqa: E731


def with_partial(index):
    return power_of_two(index), negative(index)


idiom("functools.partial, a lambda with a name", functools.partial(Each, with_partial))


def even(number):
    return number == 0 or odd(number - 1)


def odd(number):
    return number != 0 and even(number - 1)


idiom("functions that call each other", functools.partial(Each, even))


def remembers(index, seen=[]):  # noqa: B006
    seen.append(index)
    return len(seen)


def with_seen(samples):
    return samples, remembers.__defaults__[0]


idiom("a mutable default", functools.partial(Each, remembers), with_seen)


@contextlib.contextmanager
def doubled_scale():
    yield 6


def in_context(index):
    with doubled_scale() as found:
        return found * index


idiom("a context manager", functools.partial(Each, in_context))


def before(index):
    return "before", index


def use_before(index):
    return before(index)


def redefine_function():
    exec("def before(index):\n    return 'after', index, scale > 0", vars(__main__))


idiom("a function that is defined again", functools.partial(Each, use_before), change=redefine_function)


def make_in_function():
    class Local:
        limit = scale * 0 + 2

        def get(self):
            return self.limit

    return Local().get()


def with_local_class(index):
    return make_in_function() + index


idiom("a class in a function", functools.partial(Each, with_local_class))


class Transformed(Four):
    def __init__(self, *transforms):
        self.transforms = transforms

    def __getitem__(self, index):
        for transform in self.transforms:
            index = transform(index)
        return index


idiom("functions as arguments", functools.partial(Transformed, scaled_by_name, doubled, operator.neg))

HANDLERS = {}


def handler(name):
    def register(function):
        HANDLERS[name] = function
        return function

    return register


@handler("even")
def handle_even(index):
    return "even", index


@handler("odd")
def handle_odd(index):
    return "odd", index, len(HANDLERS)


def handled(index):
    return HANDLERS[("even", "odd")[index % 2]](index)


idiom("a registry of functions", functools.partial(Each, handled))

# --- classes


class Table:
    numbers = {}


class FillsTable(Four):
    def __init__(self):
        Table.numbers = {index: 10 * index for index in range(4)}

    def __getitem__(self, index):
        return Table.numbers.get(index)


def with_table(samples):
    return samples, len(Table.numbers)


idiom("a table in a class, filled by a constructor", FillsTable, with_table)


class Vocabulary(Four):
    words = []

    def __init__(self):
        self.words.extend(["a", "b"])

    def __getitem__(self, index):
        return self.words[index % 2], len(self.words)


def with_vocabulary(samples):
    return samples, len(Vocabulary.words)


idiom("a list in a class, filled by a constructor", Vocabulary, with_vocabulary)


class Settings:
    factor, offset = 2, 100


class UsesSettings(Four):
    def __getitem__(self, index):
        Settings.offset += 1
        return Settings.factor * index + Settings.offset


def change_settings():
    Settings.factor = 4


idiom("an attribute of a class, changed between epochs", UsesSettings, change=change_settings)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2

    @property
    def darker(self):
        return DARKER[self]

    @classmethod
    def _missing_(cls, value):
        return cls.RED


DARKER = {Colour.RED: "maroon", Colour.BLUE: "navy"}


def coloured(index):
    return Colour(index), Colour(index).darker


def only_blue(samples):
    return [index for index, (colour, _name) in enumerate(samples) if colour is Colour.BLUE], samples


def show_colours(batch):
    return batch[0], [colour is Colour(colour.value) and name for colour, name in batch[1]]


idiom("an enumeration", functools.partial(Each, coloured), only_blue, show=show_colours)


class Planet(enum.Enum):
    MERCURY = 3, 2
    EARTH = 6, 6
    HOME = 6, 6

    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius

    @property
    def density(self):
        return self.mass / self.radius


class Labelled(enum.Enum):
    def __new__(cls, value, label):
        made = object.__new__(cls)
        made._value_, made.label = value, label
        return made

    ONE = 1, "one"
    TWO = 2, "two"


def planets(index):
    return Planet.HOME is Planet.EARTH, Planet["HOME"].density, Planet.MERCURY.mass, Labelled(1 + index % 2).label


idiom("members with attributes, aliases", functools.partial(Each, planets))


class Permission(enum.IntFlag):
    READ = enum.auto()
    WRITE = enum.auto()
    ALL = READ | WRITE


class Mode(str, enum.Enum):
    TRAIN = "train"
    TEST = "test"


def permitted(index):
    both = Permission.READ | Permission.WRITE
    return (
        bool(Permission(index) & both),
        Permission(index) is Permission["ALL"],
        both == Permission.ALL,
        Mode.TRAIN == "train",
        Mode("test").name,
    )


idiom("flags, an enumeration of strings", functools.partial(Each, permitted))


@dataclasses.dataclass(frozen=True)
class Point:
    row: int
    column: int = 0
    tags: list = dataclasses.field(default_factory=list, compare=False)


@dataclasses.dataclass(slots=True)
class Sample:
    image: int
    points: list


def pointed(index):
    return Sample(index, [Point(index), Point(index, 1)])


def first_points(samples):
    return [sample.points[0] for sample in samples], {Point(1): "one"}.get(samples[1].points[0])


def show_points(batch):
    return [type(point) is Point and dataclasses.astuple(point) for point in batch[0]], batch[1]


idiom("dataclasses", functools.partial(Each, pointed), first_points, show=show_points)

Place = namedtuple("Spot", ["row", "column"])


class Named(typing.NamedTuple):
    name: str
    place: Place = Place(1, 2)


class Typed(typing.TypedDict):
    number: int


def placed(index):
    return Named(f"name {index}"), Typed(number=index)


def look_at_places(samples):
    return [(type(named) is Named, type(named.place) is Place, named.place.row, typed) for named, typed in samples]


idiom("named tuples, typed dicts", functools.partial(Each, placed), look_at_places)


Value = typing.TypeVar("Value")


class Partly(Typed, total=False):
    text: str


class Extended(typing_extensions.TypedDict):
    number: int


class MoreExtended(Extended):
    text: typing_extensions.NotRequired[str]


ByCall = typing.TypedDict("ByCall", {"a number": int})
Parameters = typing.ParamSpec("Parameters")
Seconds = typing.NewType("Seconds", int)


def typed_dicts(index):
    made = Partly(number=index), MoreExtended(number=index), ByCall({"a number": index})
    return made, [sorted(kind.__optional_keys__) for kind in (Partly, MoreExtended)], typing.is_typeddict(ByCall)


class Timed(typing.NamedTuple):
    seconds: Seconds = Seconds(1)


class Calls(typing.Generic[Parameters]):
    pass


def new_types(index):
    return Timed(), Seconds.__name__, Seconds.__module__ == new_types.__module__, Calls[[int]] is not None


if sys.version_info >= (3, 12):
    exec(
        """
type Pairs[Kind] = list[tuple[Kind, Seconds]]


def pairs(index) -> Pairs[int]:
    return [(index, Seconds(1))], str(pairs.__annotations__["return"])


idiom("a type statement", functools.partial(Each, pairs))
"""
    )


class Header(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint8), ("size", ctypes.c_uint32), ("name", ctypes.c_char * 4)]
    _pack_, _layout_ = 1, "ms"


class Headers(ctypes.Union):
    _fields_ = [("one", Header), ("all", Header * 2)]


class Magic(ctypes.BigEndianStructure):
    _fields_ = [("number", ctypes.c_uint32), ("sizes", ctypes.c_uint16 * 2)]


class Count(ctypes.c_uint8):
    pass


def structures(index):
    content = bytes(range(index, index + 9))
    header, magic = Header.from_buffer_copy(content), Magic.from_buffer_copy(content)
    numbers = magic.number, magic.sizes[1], Count(index + 255).value
    return header.kind, header.size, header.name, ctypes.sizeof(Header), Headers(one=header).all[0].size, numbers


@typing.runtime_checkable
class Sized(typing.Protocol[Value]):
    def size(self) -> Value: ...


class MakesDataclass(type):
    def __new__(cls, name, bases, namespace):
        return dataclasses.dataclass(super().__new__(cls, name, bases, namespace))


@typing_extensions.dataclass_transform()
class Model(metaclass=MakesDataclass):
    number: int

    def size(self):
        return self.number


def models(index):
    return repr(Model(index)), isinstance(Model(index), Sized), isinstance(index, Sized)


def make_kinds():
    class Local(typing.TypedDict):
        number: int

    class More(Local):
        text: str

    class Pair(ctypes.Structure):
        _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_int)]

    kind = typing.NewType("kind", int)
    return lambda index: (Local(number=index), More(number=kind(index), text=""), Pair(index, 1).first)


kinds_of_function = make_kinds()


def local_kinds(index):
    return kinds_of_function(index)


for function in typed_dicts, new_types, structures, models, local_kinds:
    idiom(f"kinds of classes: {function.__name__}", functools.partial(Each, function))
del function


class Slotted:
    __slots__ = ("__hidden", "value")

    def __init__(self, value):
        self.value, self.__hidden = value, -value

    def both(self):
        return self.value, self.__hidden


class MoreSlots(Slotted):
    __slots__ = "more"


def slotted(index):
    found = MoreSlots(index)
    found.more = 1
    with contextlib.suppress(AttributeError):
        found.other = 1
    return found


def show_slots(batch):
    return [(type(each) is MoreSlots, each.both(), each.more, hasattr(each, "other")) for each in batch]


idiom("__slots__", functools.partial(Each, slotted), show=show_slots)


class Lazy(Four):
    computed = 0

    @functools.cached_property
    def table(self):
        Lazy.computed += 1
        return [0, 1, 4, 9]

    def __getitem__(self, index):
        return self.table[index], Lazy.computed


idiom("functools.cached_property", Lazy)


class Base(Four):
    def __init__(self, first=1):
        super().__init__()
        self.first = first

    def __getitem__(self, index):
        return ["base", self.first]


class Mixin:
    def __getitem__(self, index):
        return ["mixin", *super().__getitem__(index)]


class Derived(Mixin, Base):
    def __init__(self):
        super().__init__(first=2)

    def __getitem__(self, index):
        return [index, *super().__getitem__(index)]


idiom("inheritance with super()", Derived)


class Celsius:
    def __init__(self):
        self._degrees = 0

    @property
    def degrees(self):
        return self._degrees

    @degrees.setter
    def degrees(self, value):
        self._degrees = max(value, 1)

    @classmethod
    def of(cls, degrees):
        made = cls()
        made.degrees = degrees
        return made

    @staticmethod
    def name():
        return Celsius.__name__


def warm(index):
    return Celsius.of(index).degrees, Celsius.name()


idiom("properties, methods of classes", functools.partial(Each, warm))


class Box(typing.Generic[Value]):
    def __init__(self, value: Value):
        self.value = value


class Numbers(Four, typing.Generic[Value]):
    def __getitem__(self, index: int) -> Box[Value]:
        return Box[int](index).value, Box[int].__origin__ is Box, Numbers.__parameters__ == (Value,)


idiom("generics, type variables", Numbers[int])


class Plugin:
    registry = {}

    def __init_subclass__(cls, *, name, **options):
        super().__init_subclass__(**options)
        if name in Plugin.registry:
            raise ValueError(f"{name} is there already")
        Plugin.registry[name] = cls


class One(Plugin, name="one"):
    value = 1


class Two(Plugin, name="two"):
    value = 2


def plugged(index):
    found = Plugin.registry[("one", "two")[index % 2]]
    return found().value, found is (One, Two)[index % 2], len(Plugin.registry), len(Plugin.__subclasses__())


idiom("__init_subclass__", functools.partial(Each, plugged))


class Registering(type):
    made = []

    def __init__(cls, name, bases, content):
        super().__init__(name, bases, content)
        cls.number = content["wanted"]
        Registering.made.append(name)


class Registered(metaclass=Registering):
    wanted = 5


class Single(type):
    instances = {}

    def __call__(cls, *args):
        if cls not in Single.instances:
            Single.instances[cls] = super().__call__(*args)
        return Single.instances[cls]


class Manager(metaclass=Single):
    def __init__(self):
        self.tasks = []


MANAGER = Manager()


def managed(index):
    Manager().tasks.append(index)
    return Manager() is MANAGER, len(MANAGER.tasks), Registered.number, Registering.made


def with_tasks(samples):
    return samples, MANAGER.tasks


idiom("metaclasses", functools.partial(Each, managed), with_tasks)


class Singleton:
    _instance = None

    def __new__(cls):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.names = []
        return cls._instance


def single(index):
    Singleton().names.append(index)
    return len(Singleton().names)


def with_names(samples):
    return samples, Singleton().names


idiom("a singleton", functools.partial(Each, single), with_names)


class Registry:
    def __init__(self):
        self.entries = {}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.entries[name]


REGISTRY = Registry()


def fill_registry(worker):
    REGISTRY.entries["size"] = 7


def registered(index):
    return REGISTRY.size + index


def with_registry(samples):
    return samples, len(REGISTRY.entries)


idiom("an object with state", functools.partial(Each, registered), with_registry, fill_registry)


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...


class Square(Shape):
    def __init__(self, side):
        self.side = side

    def area(self):
        return self.side**2


@Shape.register
class Elsewhere:
    pass


@typing.runtime_checkable
class HasArea(typing.Protocol):
    def area(self): ...


def shaped(index):
    with contextlib.suppress(TypeError):
        Shape()
        return "abstract"
    return Square(index).area(), isinstance(Elsewhere(), Shape), isinstance(Square(1), HasArea)


idiom("abstract classes, protocols", functools.partial(Each, shaped))


class Positive:
    def __set_name__(self, owner, name):
        self.name = f"_{name}"

    def __get__(self, instance, owner):
        return self if instance is None else getattr(instance, self.name)

    def __set__(self, instance, value):
        setattr(instance, self.name, abs(value))


class WithDescriptor:
    value = Positive()


def described(index):
    found = WithDescriptor()
    found.value = -index
    return found.value, vars(found)


idiom("a descriptor", functools.partial(Each, described))


class Outer:
    class Inner:
        limit = 3

        def __eq__(self, other):
            return type(other) is type(self)

    made = Inner()


def nested(index):
    return Outer.Inner(), Outer.made == Outer.Inner()


def show_nested(batch):
    return [(type(inner) is Outer.Inner, same) for inner, same in batch]


idiom("a class in a class", functools.partial(Each, nested), show=show_nested)

Dynamic = type("Dynamic", (), {"value": 8, "get": lambda self: self.value})


def dynamic(index):
    return Dynamic().get() + index


idiom("a class made by type()", functools.partial(Each, dynamic))


class NotFound(LookupError):
    def __init__(self, name, code=1):
        super().__init__(name)
        self.code = code


def raises(index):
    try:
        raise NotFound("name", index)
    except LookupError as error:
        return type(error) is NotFound, error.code


idiom("an exception", functools.partial(Each, raises))


class Node:
    def __init__(self, value):
        self.value = value


def copied(index):
    node = pickle.loads(pickle.dumps(Node(index)))
    return type(copy.deepcopy(node)) is Node, node.value


idiom("pickle and copy in a worker", functools.partial(Each, copied))

PICKLED = b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x08__main__\x94\x8c\x08OnlyHere\x94\x93\x94)\x81\x94."


class OnlyHere:
    pass


def unpickled(index):
    return type(pickle.loads(PICKLED)).__name__


idiom("a file of pickled objects", functools.partial(Each, unpickled))

KEPT = Node(3)
CACHE = weakref.WeakValueDictionary({"kept": KEPT})


def weak(index):
    return CACHE["kept"] is KEPT, len(CACHE)


idiom("weak references", functools.partial(Each, weak))


class Cell(Four):
    def __getitem__(self, index):
        return "first", index


def run_cell_again():
    exec("class Cell(Four):\n    def __getitem__(self, index):\n        return 'second', index", vars(__main__))
    return Cell()


def make_cell():
    return Cell()


idiom("a class whose cell is run again", make_cell, change=run_cell_again)


class Split(Four):
    roots = {"train": "a", "test": "b"}

    def __init__(self, split):
        self.split = split

    def __getitem__(self, index):
        return self.roots[self.split], len(self.roots)


idiom("a dataset of a class", functools.partial(Split, "train"))
idiom("a second dataset of that class", functools.partial(Split, "test"))


class Records(Four):
    def __init__(self):
        self.opened, self.loaded = None, 0

    def open(self, worker):
        self.opened = True

    def __getitem__(self, index):
        self.loaded += 1
        return index, self.opened

    def collate(self, samples):
        return samples, self.loaded


class Whole:
    """The dataset of an idiom, for others of its functions."""

    made = None


def make_records():
    Whole.made = Records()
    return Whole.made


def make_part():
    return Subset(Records(), [0, 1, 3])


VOCABULARY = {"a": 1}


class Worded(Four):
    def __init__(self):
        self.vocabulary = VOCABULARY

    def __getitem__(self, index):
        self.vocabulary.setdefault(str(index), index)
        return len(VOCABULARY)


def with_worded(samples):
    return samples, len(VOCABULARY)


idiom("a dict that is a global and an attribute", Worded, with_worded)


@torch.no_grad()
def without_gradients(index):
    return torch.is_grad_enabled(), index * scale_of_library


scale_of_library = 2

idiom("a decorator of a library", functools.partial(Each, without_gradients))


class Collator:
    def __init__(self, pad):
        self.pad, self.calls = pad, 0

    def __call__(self, samples):
        self.calls += 1
        return samples, self.pad, self.calls


idiom("collate_fn with state", functools.partial(Each, scaled_by_name), Collator(9))
WHOLE = Records()


def make_whole():
    return WHOLE


def collate_by_name(samples):
    return samples, WHOLE.loaded


def open_by_name(worker):
    WHOLE.opened = "by name"


idiom("the dataset as a global", make_whole, collate_by_name, open_by_name)
idiom("methods of the dataset", Records, Records.collate, Records.open)
idiom("methods of a dataset of which this is a part", make_part, Records.collate, Records.open)


def informed(index):
    info = get_worker_info()
    return type(info.dataset) is Each, info.dataset.function is informed


idiom("get_worker_info()", functools.partial(Each, informed), may_share=False)


class Tokenizer:
    def __init__(self):
        self.ids = collections.defaultdict(int)

    def encode(self, text):
        self.ids[text] += 1
        return self.ids[text]


class Texts(Four):
    def __init__(self):
        self.tokenizer = Tokenizer()
        self.same = self.tokenizer

    def __getitem__(self, index):
        self.tokenizer.encode("a")
        return self.same.encode("a")


idiom("an object shared within a dataset", Texts)


def switchable(function):
    state = {"on": True}

    @functools.wraps(function)
    def call(*args):
        return function(*args) if state["on"] else ("off", call.level)

    call.state, call.level = state, 0
    return call


class Switched(Four):
    @switchable
    def __getitem__(self, index):
        return index


def switch_off():
    Switched.__getitem__.state["on"] = False
    Switched.__getitem__.level = 3


idiom("the state of a method's decorator, changed between epochs", Switched, change=switch_off)


def make_local():
    factor = 2

    class Local(Four):
        def __getitem__(self, index):
            return factor * index

    def change():
        nonlocal factor
        factor = 5

    return Local, change


Local, change_factor = make_local()
made_local = Local
del Local  # it has no name in the script
idiom("a variable that a local class uses, changed between epochs", lambda: made_local(), change=change_factor)

NAMESPACE = {"__name__": "__main__", "Four": Four}
exec(
    """
factor = 3


class Executed(Four):
    def __getitem__(self, index):
        return multiplied(index)


def multiplied(index):
    return factor * index
""",
    NAMESPACE,
)

idiom(
    "a global of code that exec runs, changed between epochs",
    lambda: NAMESPACE["Executed"](),
    change=functools.partial(operator.setitem, NAMESPACE, "factor", 4),
)


class Counting(Four):
    def __init__(self, holder, get):
        self.holder, self.get = holder, get

    def __getitem__(self, index):
        self.get(self.holder)[index] = 1
        return index


class Tally:
    def __init__(self, counts):
        self.counts = counts

    def __call__(self, samples):
        return samples, len(self.counts)


class Holder:
    __slots__ = ("content",)

    def __init__(self, content):
        self.content = content


def share(hold, get):
    counts = {}
    return functools.partial(Counting, hold(counts), get), Tally(counts)


def argument_of(function):
    return function.args[0]


for place, *how in (
    ("slots", Holder, operator.attrgetter("content")),
    ("an OrderedDict", lambda counts: collections.OrderedDict(content=counts), operator.itemgetter("content")),
    ("a deque", lambda counts: collections.deque([counts]), operator.itemgetter(0)),
    ("a partial function", functools.partial(functools.partial, plain), argument_of),
):
    idiom(f"what a dataset has in {place}, and collate_fn, too", *share(*how))
del place, how


def share_variable():
    opened = None

    def open_in_worker(worker):
        nonlocal opened
        opened = worker + 1

    def get(index):
        return index, opened

    return functools.partial(Each, get), plain, open_in_worker


idiom("a variable of a function that worker_init_fn sets", *share_variable())

# --- what loads them


def bound(function, dataset):
    """The method of the dataset, or of the one that it is a part of, for a function of its class."""
    owner = dataset.dataset if isinstance(dataset, Subset) else dataset
    is_method = getattr(function, "__qualname__", "").startswith("Records.")
    return getattr(owner, function.__name__) if is_method else function


def loader_of(kind, workers, context, dataset, each):
    collate, init = bound(each.collate, dataset), bound(each.init, dataset)
    options = {"batch_size": 4, "timeout": 20, "collate_fn": collate, "worker_init_fn": init}
    if context:
        options["multiprocessing_context"] = context
    if kind == "torch":
        return DataLoader(dataset, num_workers=1, **options)
    from rpcdataloader import RPCDataloader

    places = {"num_workers": 1} if workers.startswith("local") else {"workers": workers, "num_workers": 1}
    if kind == "built":
        return RPCDataloader(dataset, num_workers=1, **options)
    return RPCDataloader(dataset, **places, **options)


def make(kind, workers, each):
    if kind != "built":
        return each.make()
    from rpcdataloader import RPCDataset

    return RPCDataset(workers, each.make)


def result(each, batches):
    show = each.show or plain
    return repr([show(batch) for batch in batches])  # at once: later epochs may change it


def attempt(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def run_apart(kind, workers, context):
    """Each idiom with workers of its own."""
    found = {}
    for each in IDIOMS:

        def both(each=each):
            dataset = make(kind, workers, each)
            first = result(each, loader_of(kind, workers, context, dataset, each))
            changed = each.change() if each.change else None
            dataset = dataset if changed is None else changed
            return [first, result(each, loader_of(kind, workers, context, dataset, each))]

        epochs = attempt(both)
        found[each.name] = epochs if isinstance(epochs, list) else [epochs]
    return found


class Together(Dataset):
    """All idioms in one worker."""

    def __init__(self, datasets):
        self.datasets = datasets

    def __len__(self):
        return len(self.datasets)

    def __getitem__(self, number):
        dataset, collate = self.datasets[number]
        return attempt(lambda: collate([dataset[index] for index in range(len(dataset))]))


class InitAll:
    def __init__(self, functions):
        self.functions = functions

    def __call__(self, worker):
        for function in self.functions:
            function(worker)


def run_together(context):
    """All idioms with one worker per epoch, which costs seconds; those that cannot be pickled are left out."""
    shared = [each for each in IDIOMS if each.may_share]
    made = {each.name: each.make() for each in shared}
    found = {each.name: [] for each in shared}
    for epoch in range(2):
        sent = []
        for each in shared:
            dataset = made[each.name]
            parts = dataset, bound(each.collate, dataset), bound(each.init, dataset)
            reason = None if context == "fork" else attempt(lambda parts=parts: pickle.dumps(parts) and None)
            found[each.name] += [reason] if reason else []
            if not reason:
                sent.append((each, parts))
        datasets = Together([(dataset, collate) for _each, (dataset, collate, _init) in sent])
        init = InitAll([init for _each, (*_parts, init) in sent if init is not None])
        options = {"num_workers": 1, "multiprocessing_context": context, "timeout": 60}
        loader = DataLoader(datasets, None, collate_fn=plain, worker_init_fn=init, **options)
        for (each, _parts), batch in zip(sent, loader, strict=True):
            found[each.name].append(attempt(lambda each=each, batch=batch: result(each, [batch])))
        for each in shared if epoch == 0 else ():
            if each.change and (changed := each.change()) is not None:
                made[each.name] = changed
    return found


def main():
    kind, _colon, where = sys.argv[1].partition(":")
    workers, _slash, context = where.partition("/")
    if kind == "torch":
        found = run_together(workers)
    elif kind == "apart":
        found = run_apart("torch", "", workers)
    else:
        found = run_apart(kind, workers, context or None)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
