"""Changes of a dataset, in any order with passes, workers, and sessions that die: each copy against a model."""

from __future__ import annotations

import copy
import operator
import random
from types import SimpleNamespace

import pytest

from rpcdataloader.client import mutable
from rpcdataloader.client.discovery import Local
from rpcdataloader.client.mutable import MutableDataset
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.host import state
from rpcdataloader.host.state import Change, append_change, assign, catch_up, changes_after, last_of


class Journal:
    """A dataset whose changes read what those before them have set."""

    def __init__(self):
        self.a = self.b = self.scaled = 0
        self.entries = []

    @property
    def c(self):
        return self.scaled

    @c.setter
    def c(self, number):
        self.scaled += number * self.a

    def note(self, number):
        self.entries.append((number, self.a, self.b, random.random()))


class Process:
    """A process that has the dataset, and numbers of changes that it has made."""

    def __init__(self, parent=None):
        self.dataset = Journal() if parent is None else copy.deepcopy(parent.dataset)
        self.made = {} if parent is None else dict(parent.made)

    def catch_up(self, key, changes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "_made", self.made)
            return catch_up(self.dataset, key, changes)


class Session(Process):
    """A session of this machine, as the client knows it: born with the dataset as it was constructed."""

    address, is_local = "node:1", True
    connection = SimpleNamespace(release=lambda _key: None)

    def __init__(self):
        super().__init__()
        self.is_usable = True

    def is_born_with(self, _key):
        return True

    def call(self, _function, _dataset, key, changes):
        self.catch_up(key, changes)
        return SimpleNamespace(wait=lambda: None)


class Dataset(MutableDataset):
    """One that has a worker for questions."""

    def __init__(self):
        super().__init__("Journal", None, shared=True, is_iterable=False, where=Local())
        self.asked = Process()

    def _worker(self):
        return SimpleNamespace(session=SimpleNamespace(has=None))

    def _answer(self, _worker, _function, _self, key, changes):
        return self.asked.catch_up(key, changes)


class Pass:
    def __init__(self, dataset, expected):
        self.changes, self.expected = dataset.begin_pass(self), expected


@pytest.fixture(autouse=True)
def _generators(monkeypatch):
    monkeypatch.setattr(mutable, "freeze", lambda content, **_options: content)
    with generators_restored():
        yield


@pytest.mark.parametrize("seed", range(60))
def test_workers_have_the_changes_with_which_their_pass_began_each_once(seed):
    choices, dataset, other = random.Random(seed), Dataset(), Session()
    other.address = "node:2"
    sessions, passes, workers = [Session(), other], [], []

    def change():
        number = choices.randrange(1000)
        if choices.random() < 0.6:
            dataset.change(assign, choices.choice("abc"), number)
        else:
            dataset.change(operator.methodcaller("note", number))

    def fail():
        with pytest.raises(TypeError):
            dataset.change(len)

    def begin():
        passes.append(Pass(dataset, vars(copy.deepcopy(dataset.asked.dataset))))

    def begin_again():  # persistent workers
        one = choices.choice(passes)
        told = last_of(one.changes)
        one.changes, one.expected = dataset.begin_pass(one), vars(copy.deepcopy(dataset.asked.dataset))
        for owner, worker in workers:
            if owner is one:
                worker.catch_up(dataset.key, changes_after(told, one.changes))

    def end():
        ended = passes.pop(choices.randrange(len(passes)))
        dataset.end_pass(ended)
        workers[:] = [(owner, worker) for owner, worker in workers if owner is not ended]

    def build():
        dataset.build_on(choices.choice(sessions))

    def die():
        place = choices.randrange(2)
        sessions[place].is_usable, address = False, sessions[place].address
        sessions[place] = Session()
        sessions[place].address = address

    def open_worker():
        if built := [session for session in sessions if dataset.is_on(session)]:
            worker, one = Process(choices.choice(built)), choices.choice(passes)
            worker.catch_up(dataset.key, changes_after(dataset.made_everywhere(), one.changes))
            workers.append((one, worker))

    for _ in range(60):
        step = choices.choice(
            [change, change, fail, begin, begin_again, end, build, build, die, open_worker, open_worker]
        )
        if passes or step not in (begin_again, end, open_worker):
            step()
        for one, worker in workers:
            assert vars(worker.dataset) == one.expected
    for one in passes:
        dataset.end_pass(one)
    for session in sessions:
        dataset.build_on(session)
        assert vars(session.dataset) == vars(dataset.asked.dataset)
        assert dataset.is_current(session)


def test_list_of_changes_grows_with_no_attribute_that_is_set_again():
    changes = ()
    for number, name in enumerate(["a", "b", "a", None, "a", "b", "b"], start=1):
        changes = append_change(changes, Change(number, name, None, 0))
    assert [change.number for change in changes] == [2, 3, 4, 5, 7]
    assert [change.number for change in changes_after(3, changes)] == [4, 5, 7]


class Slotted:
    __slots__ = ("slot",)


class Careful:
    kind = 1

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)


@pytest.mark.parametrize(
    ("dataset", "name", "is_plain"),
    [
        (Journal(), "a", True),
        (Journal(), "new", True),
        (Journal(), "note", True),  # a method, in place of that of the class
        (Journal(), "c", False),
        (Journal(), "__class__", False),
        (Slotted(), "slot", True),
        (Careful(), "kind", False),
    ],
)
def test_an_attribute_is_plain_if_no_code_of_the_class_runs_when_it_is_set(dataset, name, is_plain):
    value = type("Other", (type(dataset),), {}) if name == "__class__" else 3
    assert assign(dataset, name, value) is is_plain
    assert name == "c" or getattr(dataset, name) == value
