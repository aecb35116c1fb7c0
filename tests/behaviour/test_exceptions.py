"""Whatever user code raises, the trainer gets it where torch's loader raises it, as it was raised, and may go on."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import traceback

import pytest
from torch.utils.data import Dataset, IterableDataset

import rpcdataloader
from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.errors import RemoteError, RemoteTraceback, SerializationError
from tests.support import failures, kinds
from tests.support.comparison import assert_same
from tests.support.failures import AS_TEXT, EXITS, LEFT_OUT, MAKERS, Failures
from tests.support.streams import Parts

pytestmark = pytest.mark.usefixtures("clean_client")

# Beginning of the paths of the package's own frames. The folder around it may have its name, too.
PACKAGE = os.path.join(os.path.dirname(rpcdataloader.__file__), "")


def steps(iterator):
    """What each ``next`` gives: a batch or an exception, up to the end."""
    found = []
    for _ in range(100):
        try:
            found.append(next(iterator))
        except BaseException as exc:
            found.append(exc.with_traceback(None))
            if type(exc) is StopIteration and not exc.args:
                return found
    raise AssertionError(f"no end: {found}")


def load(make_loader, indices, dataset=None):
    """Pass over samples without batches, of which some are failures."""
    return steps(iter(make_loader(dataset or Failures(), sampler=indices, batch_size=None, collate_fn=kinds.as_is)))


def attributes(exc):
    """All that is public and no method."""
    names = {name for name in dir(exc) if not name.startswith("_") and hasattr(exc, name)} - LEFT_OUT
    return {name: value for name in sorted(names) if not callable(value := getattr(exc, name))}


# As it was raised

ALL = MAKERS | EXITS


@pytest.fixture(scope="module")
def raised(shared_server):
    """What arrives of each, from one pass."""
    indices = [item for number, name in enumerate(ALL) for item in (name, number)]
    found = load(functools.partial(RPCDataloader, workers=shared_server.address), indices)
    assert found[1::2] == list(range(len(ALL)))
    return dict(zip(ALL, found[::2], strict=False))


@pytest.mark.parametrize("name", ALL)
def test_exception_is_what_it_was_and_its_cause_names_the_worker_and_shows_its_traceback(raised, name):
    expected, actual = ALL[name](), raised[name]
    if name in EXITS:  # which would end a process
        assert type(actual) is RemoteError
        assert re.fullmatch(rf"worker \d+ \(pid \d+\) on \S+ \(\S+\) raised {name}", str(actual))
    elif name in AS_TEXT:
        assert type(actual) is RemoteError
        assert str(actual).endswith(f"{type(expected).__qualname__}: {expected}")
    elif name != "stop":
        if name == "local class":
            assert (type(actual).__name__, type(actual).__base__) == ("LocalError", Exception)
        else:
            assert type(actual) is type(expected)
        assert str(actual) == str(expected)
        wanted, found = attributes(expected), attributes(actual)
        if name.startswith("group"):
            wanted, found = ([(type(e), e.args) for e in _leaves(group)] for group in (expected, actual))
        assert_same(found, wanted)
    cause = actual.__cause__
    assert type(cause) is RemoteTraceback
    assert re.search(r"^worker \d+ \(pid \d+\) on \S+ \(\S+\):$", str(cause), re.MULTILINE), str(cause)
    assert "in __getitem__" in str(cause)
    assert name == "stop" or PACKAGE not in str(cause)  # it begins with the code of the user
    shown = "".join(traceback.format_exception_only(expected)).splitlines() if name != "recursion" else []
    lines = [line.lstrip(" |") for line in str(cause).splitlines()]
    assert all(line.lstrip(" |") in lines for line in shown)


def _leaves(exc):
    return [leaf for member in exc.exceptions for leaf in _leaves(member)] if hasattr(exc, "exceptions") else [exc]


def test_cause_shows_chains_and_notes(raised):
    cause = str(raised["chain"].__cause__)
    for text in ("KeyError: 'the innermost'", "direct cause", "TypeError: the one between", "during handling"):
        assert text.lower() in cause.lower()
    if hasattr(BaseException, "add_note"):
        assert "while reading\nsample 17" in cause
        assert raised["chain"].__notes__[:-1] == ["while reading\nsample 17"]


class Forgetful(Exception):
    def __getattr__(self, name):
        return self.fields[name]


class Forgetfuls(dict):
    def __missing__(self, index):
        raise Forgetful


def test_exception_whose_attributes_fail_ends_no_worker(workers):
    first, second, third, _end = load(functools.partial(RPCDataloader, workers=workers), range(3), Forgetfuls({2: 2}))
    assert {type(first), type(second)} == {Forgetful}
    assert third == 2


def cancelled_elsewhere(pid):
    if os.getpid() != pid:
        raise asyncio.CancelledError
    return Rebuilt()


class Rebuilt(Exception):
    """Its rebuilding raises something else in the trainer."""

    def __reduce__(self):
        return cancelled_elsewhere, (os.getpid(),)


class Rebuilts(dict):
    def __missing__(self, index):
        raise Rebuilt


def test_exception_whose_rebuilding_raises_anything_ends_no_worker(workers):
    first, second, _end = load(functools.partial(RPCDataloader, workers=workers), range(2), Rebuilts({1: 1}))
    assert type(first) is RemoteError
    assert "Rebuilt" in str(first)
    assert second == 1


def fail_at_five(samples):
    if 5 in samples:
        raise ValueError("five")
    return samples


class Five(Dataset):
    def __getitem__(self, index):
        return fail_at_five([index])


class FiveAtOnce(Dataset):
    def __getitems__(self, indices):
        return fail_at_five(indices)


class FiveInStream(IterableDataset):
    def __iter__(self):
        for index in range(7):
            yield fail_at_five([index])


SAMPLES = [3, 2, 6, 5, 0]


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="the cause has it in Python 3.10")
@pytest.mark.parametrize("where", ["inline", "workers"])
@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"dataset": Five()}, r"index 5 at position 3, batch 1"),
        ({"dataset": Five(), "batch_size": None}, r"index 5 at position 3, batch 3"),
        ({"dataset": FiveAtOnce()}, r"indices \[6, 5\] at position 2, batch 1"),
        ({"dataset": range(7), "collate_fn": fail_at_five}, r"collating batch 1 of indices \[6, 5\]"),
        ({"dataset": FiveInStream(), "sampler": None}, r"position 5 of stream 0, batch 2"),
        ({"dataset": Parts([7]), "sampler": None, "collate_fn": fail_at_five}, r"collating batch 2 of stream 0"),
    ],
)
def test_exception_names_its_sample(workers, where, options, note):
    chosen = {"workers": workers, "num_workers": 1} if where == "workers" else {"workers": where}
    loader = RPCDataloader(**{"batch_size": 2, "sampler": SAMPLES, **options, **chosen})
    with pytest.raises(ValueError, match="five") as caught:
        list(loader)
    where = rf", worker \d+ \(pid \d+\) on \S+ \({re.escape(workers)}\)" if where == "workers" else ""
    (found,) = caught.value.__notes__
    assert re.fullmatch(note + where, found), found


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="the cause has it in Python 3.10")
def test_exception_of_a_constructor_or_a_call_names_its_node_as_the_script_does(workers):
    for attempt, process in (
        (lambda: RPCDataset(workers, fail_at_five, [5]), "the session"),
        (lambda: rpc_async(workers, fail_at_five, ([5],)).wait(), r"worker \d+"),
    ):
        with pytest.raises(ValueError, match="five") as caught:
            attempt()
        (found,) = caught.value.__notes__
        assert re.fullmatch(rf"raised by {process} \(pid \d+\) on \S+ \({re.escape(workers)}\)", found), found
        assert str(caught.value.__cause__).startswith(f"\n{found.removeprefix('raised by ')}:\n")


# Where torch raises it


class StoppedAtOnce(Dataset):
    def __len__(self):
        return 40

    def __getitems__(self, indices):
        return fail_if_in(indices, 20)


def fail_if_in(indices, index):
    if index in indices:
        raise StopIteration("no more")
    return indices


def stop_at_two(samples):
    return fail_if_in(samples, 2)


STOPS = {
    "sample of a batch": (
        lambda: {"dataset": Failures(), "batch_sampler": [[0, 1], [2, "stop"], [4]], "collate_fn": kinds.as_is},
        [[0, 1], "Failures.__getitem__(stop)", [4]],
    ),
    "samples at once": (
        lambda: {"dataset": StoppedAtOnce(), "batch_size": 20, "collate_fn": len},
        [20, f"StoppedAtOnce.__getitems__([{', '.join(map(str, range(20, 36)))}, ... 20 in all])"],
    ),
    "collate": (
        lambda: {"dataset": range(5), "batch_size": 2, "collate_fn": stop_at_two},
        [[0, 1], "collate_fn", [4]],
    ),
    "collate of the rest of a stream": (
        lambda: {"dataset": Parts([3]), "batch_size": 2, "collate_fn": stop_at_two},
        [[0, 1], "collate_fn"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", ["inline", "workers"])
@pytest.mark.parametrize("name", STOPS)
def test_stop_iteration_of_user_code_is_an_error_in_place_of_its_batch(workers, name, where):
    """With torch, the epoch ends there, without a word."""
    make, expected = STOPS[name]
    options = {"workers": workers, "num_workers": 1} if where == "workers" else {"workers": where}
    loader = RPCDataloader(**make(), **options)
    *found, end = steps(iter(loader))
    assert type(end) is StopIteration
    assert len(found) == len(expected)
    for step, text in zip(found, expected, strict=True):
        if not isinstance(text, str):
            assert step == text
            continue
        assert type(step) is RuntimeError
        assert str(step) == f"{text} raised StopIteration, which would have ended the epoch"
        cause = step.__cause__
        assert "StopIteration: " in str(cause) if where == "workers" else type(cause) is StopIteration
    assert loader.state_dict()["num_batches"] == len(expected)


# Before the first sample


@pytest.mark.parametrize("build", ["node", "worker"])
@pytest.mark.parametrize("name", ["required arguments", "lock", "class with a lock", "chain", "KeyboardInterrupt"])
def test_error_of_the_constructor_of_a_dataset(workers, name, build):
    with pytest.raises(BaseException) as caught:  # noqa: PT011  what it is is compared below
        next(iter(RPCDataloader(RPCDataset(workers, failures.fail, name, build=build))))
    exc = caught.value
    if name in EXITS or name in AS_TEXT:
        assert type(exc) is RemoteError
        assert str(exc).endswith(name if name in EXITS else str(MAKERS[name]()))
    else:
        assert type(exc) is type(MAKERS[name]())
        assert_same(attributes(exc), attributes(MAKERS[name]()))
    assert "in fail" in str(exc.__cause__)


# What cannot be sent, or not be received


class Refusing:
    """Cannot be rebuilt in the trainer."""

    def __reduce__(self):
        return failures.fail, ("of the system, only text",)


class Odd:
    def __getitem__(self, index):
        return {"lock": {"a": [failures.WithLock("x").lock]}, "refuses": Refusing(), "fine": 3}[index]


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("lock", r"\['a'\]\[0\] is a _thread.lock, which cannot be pickled"),
        ("refuses", r"cannot be rebuilt: OSError: text"),
    ],
)
def test_batch_that_cannot_be_brought_over_is_named_and_the_next_one_comes(workers, index, text):
    error, fine, _end = load(functools.partial(RPCDataloader, workers=workers), [index, "fine"], Odd())
    assert type(error) is SerializationError, error.__cause__
    assert re.search(text, str(error))
    assert fine == 3
