from __future__ import annotations

import builtins
import importlib
import pickle
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch

from rpcdataloader.errors import RemoteError, RemoteTraceback, RPCTimeoutError
from rpcdataloader.wire import exceptions
from rpcdataloader.wire.exceptions import dumps_exception, loads_exception, name_sample

WHERE = "worker 3 (pid 123) on node07:6543"
LOCK = threading.Lock()

# Python 3.10 has none.
Group: Any = getattr(builtins, "ExceptionGroup", None)
BaseGroup: Any = getattr(builtins, "BaseExceptionGroup", None)


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"code {code}: {text}")
        self.code = code


class Formats(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(f"no such name: {name}")


class KeywordOnly(Exception):
    def __init__(self, *, reason: str) -> None:
        self.reason = reason

    def __str__(self) -> str:
        return f"because {self.reason}"


class OwnReduce(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.pair = first, second

    def __reduce__(self) -> Any:
        return OwnReduce, self.pair


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("cannot reduce")


class Interrupts(Exception):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class BadRebuild(Exception):
    def __reduce__(self) -> Any:
        return int, ("x",)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("in __str__")

    __repr__ = __str__


class ReadOnly(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("read-only")


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:
        return caught


def transfer(exc: BaseException) -> Exception:
    received = loads_exception(dumps_exception(raised(exc), WHERE))
    with pytest.raises(type(received)) as again:
        raise received
    assert again.value is received
    return received


def imported() -> ImportError:
    try:
        importlib.import_module("no_such_module_anywhere")
    except ImportError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("text", 3),
        KeyError("first line\nsecond line"),
        IndexError(),
        StopIteration(5),
        AssertionError("x"),
        OSError(2, "no such file", "/a/b"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        imported(),
        RuntimeError("CUDA error: out of memory"),
        torch.cuda.OutOfMemoryError("x"),
        RPCTimeoutError("the call took longer than 3 s"),
        OwnReduce(1, 2),
        getattr(np, "exceptions", np).AxisError(4, 2),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_exception_keeps_type_text_arguments_and_state(exc):
    received = transfer(exc)
    assert type(received) is type(exc)
    assert str(received) == str(exc)
    assert received.args == exc.args
    assert vars(received) == vars(exc)
    for name in ("errno", "filename", "start", "reason", "value", "path", "axis"):
        assert getattr(received, name, "unset") == getattr(exc, name, "unset")


@pytest.mark.parametrize(
    "exc",
    [TwoArguments(3, "text"), Formats("x"), KeywordOnly(reason="it rained"), BadReduce("x"), BadRebuild("x")],
    ids=lambda exc: type(exc).__name__,
)
def test_exception_that_does_not_survive_its_pickle_is_told_with_type_and_text(exc):
    received = transfer(exc)
    assert type(received) is RemoteError
    assert str(received) == f"{WHERE} raised {__name__}.{type(exc).__name__}: {exc}"
    assert str(received.__cause__).endswith(f"{type(exc).__name__}: {exc}")


def test_cause_shows_where_it_was_raised_and_the_traceback_there():
    cause = transfer(ValueError("bad sample")).__cause__
    assert isinstance(cause, RemoteTraceback)
    text = str(cause)
    assert text.startswith(f"\n{WHERE}:\n\nTraceback (most recent call last):\n")
    assert "in raised\n    raise exc\n" in text
    assert text.endswith("ValueError: bad sample")


def test_causes_and_contexts_are_in_the_text():
    def chain() -> BaseException:
        try:
            try:
                raise KeyError("innermost")
            except KeyError:
                raise TypeError("middle")  # noqa: B904
        except TypeError as error:
            try:
                raise ValueError("outer") from error
            except ValueError as outer:
                return outer

    text = str(transfer(chain()).__cause__)
    assert "KeyError: 'innermost'" in text
    assert "During handling of the above exception" in text
    assert "TypeError: middle" in text
    assert "direct cause" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_notes_arrive_with_the_exception_and_in_the_text():
    exc = ValueError("x")
    exc.add_note("in sample 17")
    received = transfer(exc)
    assert received.__notes__ == ["in sample 17"]
    assert "in sample 17" in str(received.__cause__)


@pytest.mark.parametrize("kind", [ValueError, ReadOnly, Formats, Unprintable, SystemExit])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_sample_is_a_note_with_the_worker(kind):
    exc = raised(kind("x"))
    name_sample(exc, "index 203")
    for _again in range(2):  # an exception may be raised more than once
        received = loads_exception(dumps_exception(exc, WHERE))
        if not _again:
            assert received.__notes__ == [f"index 203, {WHERE}"]
        assert not hasattr(received, "_rpcdataloader_sample")
    assert not hasattr(received, "__notes__")


def test_sample_stands_in_the_cause_where_python_has_no_notes(monkeypatch):
    monkeypatch.setattr(exceptions, "_HAS_NOTES", False)
    exc = raised(ValueError("x"))
    name_sample(exc, "index 203")
    received = loads_exception(dumps_exception(exc, WHERE))
    assert str(received.__cause__).endswith(f"ValueError: x\n\nindex 203, {WHERE}")
    assert not hasattr(received, "__notes__")


def test_frames_of_the_package_are_left_out_above_those_of_others():
    def fail() -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    def in_the_package(function: Any) -> Any:
        # As a frame of another file of the package would be.
        code = compile("def load(function):\n    function()\n", exceptions._PACKAGE + "fetch/load.py", "exec")
        names: dict[str, Any] = {}
        exec(code, names)
        return names["load"](function)

    with pytest.raises(ValueError, match="outer") as caught:
        in_the_package(fail)
    exc = caught.value.with_traceback(caught.tb.tb_next.tb_next)  # where the worker would have begun
    text = str(loads_exception(dumps_exception(exc, WHERE)).__cause__)
    assert text.count("in fail") == 2
    assert "in load" not in text
    with pytest.raises(TypeError) as caught:
        in_the_package(None)
    exc = caught.value.with_traceback(caught.tb.tb_next.tb_next)
    assert "in load" in str(loads_exception(dumps_exception(exc, WHERE)).__cause__)


def test_no_suggestion_is_made_of_the_names_where_it_is_raised_again(capsys):
    try:
        recieved  # noqa: B018
    except NameError as error:
        exc = transfer(error)  # which has a variable `received`
    sys.__excepthook__(type(exc), exc, exc.__traceback__)
    shown = capsys.readouterr().err
    assert shown.endswith("NameError: name 'recieved' is not defined\n")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
class TestGroups:
    def test_group_arrives_with_its_members(self):
        group = Group("several", [KeyError("a"), Group("inner", [ValueError("b")])])
        received = transfer(group)
        assert type(received) is Group
        assert received.message == "several"
        assert type(received.exceptions[0]) is KeyError
        assert str(received.exceptions[1].exceptions[0]) == "b"
        assert "KeyError: 'a'" in str(received.__cause__)

    def test_group_that_holds_an_exit_does_not_end_the_trainer(self):
        received = transfer(BaseGroup("several", [SystemExit(1)]))
        assert type(received) is RemoteError


@pytest.mark.parametrize("exc", [SystemExit(3), SystemExit(), KeyboardInterrupt(), GeneratorExit("x")])
def test_what_would_end_the_trainer_arrives_as_an_error_that_says_so(exc):
    received = transfer(exc)
    assert type(received) is RemoteError
    assert str(received).startswith(f"{WHERE} raised {type(exc).__name__}")
    assert type(exc).__name__ in str(received.__cause__)


class TestUnpicklable:
    def test_exception_that_refers_to_itself_arrives(self):
        exc = ValueError("x")
        exc.me = [exc]
        received = transfer(exc)
        assert str(received) == "x"

    def test_exception_that_interrupts_when_it_is_looked_at_is_told_as_text(self):
        received = transfer(Interrupts("x"))
        assert type(received) is RemoteError
        assert str(received).endswith("Interrupts: x")

    def test_tensors_in_an_exception_arrive(self):
        received = transfer(ValueError("bad batch", torch.arange(100_000)))
        assert received.args[1].equal(torch.arange(100_000))

    def test_class_that_does_not_exist_here_is_told_as_text(self, monkeypatch):
        module = types.ModuleType("only_there")
        exec("class Missing(Exception): pass", vars(module))
        monkeypatch.setitem(sys.modules, "only_there", module)
        payload = dumps_exception(module.Missing("gone"), WHERE)
        monkeypatch.delitem(sys.modules, "only_there")
        received = loads_exception(payload)
        assert type(received) is RemoteError
        assert str(received) == f"{WHERE} raised only_there.Missing: gone"

    def test_exception_that_cannot_be_shown_still_arrives(self):
        received = transfer(Unprintable("x"))
        assert type(received) is Unprintable
        assert "Unprintable" in str(received.__cause__)

    def test_exception_of_an_object_without_a_text_of_its_own_arrives(self):
        received = transfer(ValueError(TestUnpicklable(), "x"))
        assert type(received.args[0]) is TestUnpicklable

    def test_exception_that_does_not_let_itself_be_changed_arrives_with_a_cause(self):
        received = transfer(ReadOnly("x"))
        assert type(received) is ReadOnly
        assert str(received.__cause__).endswith("ReadOnly: x")

    def test_class_defined_by_the_task_arrives(self):
        class Local(Exception):
            pass

        received = transfer(Local(1, 2))
        assert type(received).__name__ == "Local"
        assert received.args == (1, 2)

    def test_exception_with_a_lock_is_told_as_text(self):
        exc = ValueError("held")
        exc.lock = LOCK
        assert type(transfer(exc)) is RemoteError


def test_endless_text_is_cut_in_the_middle():
    payload = dumps_exception(ValueError("x" * 10**7), WHERE)
    cause = str(loads_exception(payload).__cause__)
    assert len(cause) < 100_000
    assert "characters left out" in cause


@pytest.mark.parametrize("payload", [b"", b"garbage", pickle.dumps(3), pickle.dumps((1, 2))])
def test_payload_that_is_none_gives_an_error_all_the_same(payload):
    received = loads_exception(payload)
    assert type(received) is RemoteError
    assert "cannot be read" in str(received)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_payload_may_be_any_buffer(kind):
    assert str(loads_exception(kind(dumps_exception(ValueError("x"), WHERE)))) == "x"
