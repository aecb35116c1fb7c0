"""The dataset in this process: whether it can be imported, built, inherited by a fork and pickled."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from rpcdataloader.check import probe
from rpcdataloader.check.compare import kind_of
from rpcdataloader.check.probe import Description, Failure, failure_of
from rpcdataloader.check.report import Report, in_bytes, in_seconds
from rpcdataloader.client.datasets import dumps_named
from rpcdataloader.errors import SerializationError
from rpcdataloader.loader.dataset import RPCDataset
from rpcdataloader.loader.seeding import generators_restored
from rpcdataloader.server.datasets import why_not_shared
from rpcdataloader.server.processes import num_threads, open_files
from rpcdataloader.wire.diagnose import USER_ERRORS

_MAX_NAMES = 10

_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"


@dataclass(frozen=True, slots=True)
class Local:
    """What is known of the dataset here.

    Attributes:
        make: Makes it, on nodes too.
        build: How: once per ``node``, or in each ``worker``.
        built: The dataset in a tuple, or nothing if only nodes can build it.
    """

    make: Callable[[], Any]
    build: str
    built: tuple[Any, ...]


def build_here(target: str, report: Report, *, may_fail: bool) -> Local:
    """Import and build the dataset.

    Args:
        target: ``MODULE:FACTORY``.
        may_fail: Nodes may have the files that are missing here.

    Raises:
        Stop: It cannot be had.
    """
    # Before the import: a session that builds the dataset imports it, too.
    threads, files = num_threads(), open_files()
    given = import_object(target, "imports", report)
    is_factory = _is_factory(given)
    if is_factory:
        _check_arguments(given, target, report)
    make = given if is_factory else functools.partial(probe.unchanged, given)
    built = _build(make, target, may_fail, report)
    if not built:
        return Local(make, "node", built)
    # An instance is pickled, and starts nothing when it is rebuilt.
    build = _check_fork(threads, files, report) if is_factory else "node"
    if not _pickles(built[0], target, is_factory, report) and not is_factory:
        make = functools.partial(_look_up, *split_name(target))
    return Local(make, build, built)


def split_name(text: str, form: str = "MODULE:NAME") -> tuple[str, str]:
    """Module and name.

    Raises:
        ValueError: It is not of this form.
    """
    module, colon, name = text.partition(":")
    if module.endswith(".py") or "/" in module:
        stem = module.removesuffix(".py").rpartition("/")[2]
        raise ValueError(f"{text!r} names a file; name the module instead, as in {stem}:{name or 'make'}")
    if not colon or not re.fullmatch(_NAME, module) or not re.fullmatch(_NAME, name):
        raise ValueError(f"{text!r} is not of the form {form}, such as mydata:make_dataset")
    return module, name


def import_object(target: str, name: str, report: Report) -> Any:
    """The object that ``MODULE:NAME`` names.

    Args:
        name: Of the finding.

    Raises:
        Stop: There is none.
    """
    module_name, attribute = split_name(target)
    if os.getcwd() not in [os.path.abspath(entry) for entry in sys.path]:
        sys.path.insert(0, os.getcwd())
    start = time.perf_counter()
    try:
        module = importlib.import_module(module_name)
    except SystemExit:
        text = f"{module_name} ends the program when it is imported: put what is not for import below "
        raise report.stop(name, text + 'if __name__ == "__main__":') from None
    except USER_ERRORS as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            text = f"no module {error.name!r}, neither in {os.getcwd()} nor elsewhere on sys.path"
            raise report.stop(name, text) from None
        failure = failure_of(error)
        raise report.stop(name, f"importing {module_name} raised {failure.what}", failure.frames) from None
    seconds = time.perf_counter() - start
    try:
        found = attrgetter(attribute)(module)
    except AttributeError:
        has = _names_of(module)
        text = f"module {module_name} has no {attribute!r}" + (f"; it has {', '.join(has)}" if has else "")
        raise report.stop(name, text) from None
    if name == "imports":
        where = getattr(module, "__file__", None) or "built in"
        report.ok(name, f"{module_name} in {in_seconds(seconds)}: {where}", import_seconds=seconds)
    return found


def _names_of(module: ModuleType) -> list[str]:
    """What else could have been meant: its own functions and classes, and datasets."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, Dataset) or (callable(value) and getattr(value, "__module__", "") == module.__name__))
    ][:_MAX_NAMES]


def _is_factory(given: Any) -> bool:
    """Whether to call it; otherwise it is the dataset."""
    is_dataset = not isinstance(given, type) and hasattr(given, "__getitem__")
    return callable(given) and not is_dataset and not isinstance(given, Dataset)


def _check_arguments(factory: Callable[..., Any], target: str, report: Report) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of compiled code: calling it will tell
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [one.name for one in parameters if one.default is one.empty and one.kind not in optional]
    if missing:
        called = target.partition(":")[2]
        text = f"{target} needs arguments ({', '.join(missing)}): name a function without any, that gives them"
        example = f"def make(): return {called}({', '.join(f'{name}=...' for name in missing)})"
        raise report.stop("builds", text, [example])


def _build(make: Callable[[], Any], target: str, may_fail: bool, report: Report) -> tuple[Any, ...]:
    """The dataset in a tuple, or nothing if it can be built on the nodes only, perhaps."""
    start = time.perf_counter()
    try:
        # The nodes' generators will be in the same state.
        with generators_restored():
            dataset = make()
    except USER_ERRORS as error:
        failure = failure_of(error)
        if not may_fail:
            raise report.stop("builds", f"{target} raised {failure.what}", failure.frames) from None
        report.note("builds", f"not on this machine, where it raised {failure.what}", failure.frames)
        return ()
    seconds = time.perf_counter() - start
    if fault := _why_no_dataset(dataset, target):
        raise report.stop("builds", fault)
    description = probe.describe(dataset)
    check_length(description, report)
    report.ok("builds", f"{shown_as(description)} in {in_seconds(seconds)}", build_seconds=seconds)
    return (dataset,)


def _why_no_dataset(dataset: Any, target: str) -> str:
    if dataset is None:
        return f"{target} gives None: is a return missing?"
    if isinstance(dataset, RPCDataset):
        return f"{target} gives an RPCDataset: name what that builds instead"
    if isinstance(dataset, DataLoader):
        return f"{target} gives {kind_of(dataset)}: name what makes its dataset instead"
    description = probe.describe(dataset)
    if isinstance(description, Description) and not description.style:
        return f"{target} gives {description.kind}, which has no __getitem__ and is no IterableDataset"
    return ""


def check_length(description: Description | Failure, report: Report) -> None:
    """Stop if it has no samples, or fails to say."""
    if isinstance(description, Failure):
        raise report.stop("builds", description.what, description.frames)
    if description.length == 0:
        text = f"{description.kind} is empty: its length is 0. Is the path right, and are there files below it?"
        raise report.stop("builds", text)


def shown_as(description: Description | Failure) -> str:
    """``mydata.Images of 1,000 samples``."""
    assert isinstance(description, Description)
    if description.style == "iterable":
        return f"{description.kind}, which is iterable,"
    if description.length is None:
        return f"{description.kind}, which has no length,"
    return f"{description.kind} of {description.length:,} samples"


def _check_fork(threads: int, files: set[tuple[int, int]], report: Report) -> str:
    """How to build it: ``node`` or ``worker``."""
    reason = why_not_shared(threads, files)
    if reason is None:
        report.ok("inherits", "built once per node, workers inherit it by a fork", build="node")
        return "node"
    remedy = 'RPCDataset(..., build="worker") says so on purpose, or do that on first use'
    report.note("inherits", f"each worker builds its own: {reason}; {remedy}", build="worker")
    return "worker"


def _pickles(dataset: Any, target: str, is_factory: bool, report: Report) -> bool:
    try:
        size_bytes = dumps_named((dataset,), {"dataset": dataset}).size_bytes
    except SerializationError as error:
        text = str(error).partition("): ")[0] + ")"
        if is_factory:
            remedy = f"give the loader RPCDataset(workers, {target.replace(':', '.')}), which works, and no instance"
            report.note("pickles", f"{text}: {remedy}", pickled_bytes=None)
        else:
            remedy = "make it in a function, for RPCDataset(workers, function), or open what that is on first use"
            report.fail("pickles", f"{text}: {remedy}", pickled_bytes=None)
        return False
    report.ok("pickles", f"{in_bytes(size_bytes)}, if an instance is given to RPCDataloader", pickled_bytes=size_bytes)
    return True


def _look_up(module: str, name: str) -> Any:
    """An instance of a module, where it cannot be sent."""
    return attrgetter(name)(importlib.import_module(module))
