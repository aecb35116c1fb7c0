"""``make mutants``: which small changes of the package does no test notice?

::

    python -m tests.mutants                            # 60 mutants of each room: hours
    python -m tests.mutants plan wire --mutants 20     # some rooms, fewer mutants
    python -m tests.mutants fetch --without tests/unit/fetch/test_seeding.py

A mutant has one operator, number or word of one line replaced, by Cosmic Ray's operators. Places are drawn by a fixed
seed; annotations and the options of decorators are left out. Each mutant runs in a copy of the working tree, in a
process forked from this one, which has imported torch. A test that fails, or a run that takes too long, has killed it.
Survivors are listed: some of them change nothing that can be seen.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import ast
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401  # once for all mutants
from cosmic_ray.ast import ast_nodes, get_ast_from_path  # type: ignore[import-not-found]
from cosmic_ray.mutating import mutate_code  # type: ignore[import-not-found]
from cosmic_ray.plugins import get_operator, operator_names  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[2]

# By room of the package: the tests that hold what it does, the quick ones first.
TESTS = {
    "plan": "unit/plan simulation/test_simulation.py simulation/test_demand.py behaviour/test_auto.py",
    "diagnosis": "unit/diagnosis simulation/test_diagnosis.py behaviour/test_diagnosis.py behaviour/test_trace.py",
    "wire": "unit/wire unit/test_status_report.py behaviour/test_batches.py behaviour/test_exceptions.py "
    "behaviour/test_attacks.py behaviour/test_copies.py behaviour/test_shared_memory.py behaviour/test_tls.py",
    "fetch": "unit/fetch behaviour/test_bad_samples.py behaviour/test_differential.py behaviour/test_transform.py "
    "behaviour/test_library_streams.py behaviour/test_resume.py",
    "client": "unit/client behaviour/test_rpc.py behaviour/test_dataset.py behaviour/test_recovery.py",
    "server": "unit/server behaviour/test_server.py behaviour/test_launch.py behaviour/test_stacks.py "
    "behaviour/test_deaths.py behaviour/test_security.py behaviour/test_forward_output.py behaviour/test_status.py",
    "loader": "unit/loader behaviour/test_loader.py behaviour/test_differential.py behaviour/test_resume.py "
    "behaviour/test_device.py behaviour/test_transform.py behaviour/test_words.py behaviour/test_diagnosis.py "
    "behaviour/test_elastic.py behaviour/test_auto.py behaviour/test_distributed.py behaviour/test_dataset.py "
    "behaviour/test_trace.py behaviour/test_replay.py behaviour/test_resume_table.py behaviour/test_recovery.py "
    "behaviour/test_pool_node.py",
}
# Of Cosmic Ray's operators: one that fails at an exception whose name has a dot, and those that change nothing for
# small numbers, None and members of enumerations.
LEFT_OUT = {"core/ExceptionReplacer"} | {
    f"core/ReplaceComparisonOperator_{pair}" for pair in ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")
}
OUTPUT = "output of tests"
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not chaos", "--timeout", "60"]


class Mutant(NamedTuple):
    """One replacement, the ``occurrence``-th that an operator can make in a file."""

    path: str
    line: int
    operator: str
    occurrence: int


def unseen(source: str) -> Iterator[tuple[int, int]]:
    """Line and column of every character where a change of an annotation, or of ``slots=True``, would begin."""
    for node in ast.walk(ast.parse(source)):
        found = [getattr(node, name, None) for name in ("annotation", "returns")]
        found += [option for call in getattr(node, "decorator_list", ()) for option in getattr(call, "keywords", ())]
        for part in found:
            if part is not None and part.lineno == part.end_lineno:
                yield from ((part.lineno, column) for column in range(part.col_offset, part.end_col_offset))


def draw(room: str, number: int, seed: int) -> list[Mutant]:
    """Draw places of a room's files, and one change for each."""
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for path in sorted((ROOT / "rpcdataloader" / room).glob("*.py")):
        tree, left_out = get_ast_from_path(path), set(unseen(path.read_text()))
        for name in operator_names():
            operator_class = get_operator(name)
            if operator_class.arguments() or name in LEFT_OUT:
                continue
            positions = (start for node in ast_nodes(tree) for start, _ in operator_class().mutation_positions(node))
            for occurrence, start in enumerate(positions):
                if start not in left_out:
                    mutant = Mutant(str(path.relative_to(ROOT)), start[0], name, occurrence)
                    places.setdefault((mutant.path, *start), []).append(mutant)
    chance = random.Random(f"{seed} {room}")
    drawn = chance.sample(sorted(places), min(number, len(places)))
    return [chance.choice(places[place]) for place in drawn]


def run_pytest(folder: Path, tests: list[str]) -> None:
    """Run tests in this process, and end it."""
    os.setsid()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)  # for programs that import nothing from the current folder
    output = os.open(OUTPUT, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for descriptor in range(3):
        os.dup2(output, descriptor)
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rpcdataloader", "tests")]:
        del sys.modules[name]
    os._exit(pytest.main([*OPTIONS, *tests]))


def passes(folder: Path, tests: list[str], seconds: float) -> bool:
    """Whether the tests pass in a folder, and within this time."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            run_pytest(folder, tests)
        os._exit(1)
    deadline = time.monotonic() + seconds
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.02)
    return found[1] == 0


def try_out(mutants: list[Mutant], folder: Path, tests: list[str], minutes: float) -> tuple[int, int]:
    """Return how many were tried, and how many of them no test noticed."""
    began = time.monotonic()
    if not passes(folder, tests, 1800.0):
        sys.exit(f"these fail without any mutant: {' '.join(tests)}\n{(folder / OUTPUT).read_text()[-3000:]}")
    limit = 30.0 + 3 * (time.monotonic() - began)
    num_tried = num_alive = 0
    for mutant in mutants:
        if time.monotonic() > began + 60 * minutes:
            break
        path = folder / mutant.path
        source = path.read_text()
        path.write_text(mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence))
        if passes(folder, tests, limit):
            num_alive += 1
            print(f"{mutant.path}:{mutant.line} {mutant.operator} ({mutant.occurrence})", flush=True)
        path.write_text(source)
        num_tried += 1
    return num_tried, num_alive


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(TESTS)} (default: all)")
    parser.add_argument("--mutants", type=int, default=60, help="how many of each room (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="draw others (default: 0)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no further mutant of a room after them")
    parser.add_argument("--without", nargs="+", default=[], help="files of tests that are left out")
    args = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with tempfile.TemporaryDirectory(prefix="rpcdl-mutants-") as name:
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
        for path in filter(None, tracked):
            if (ROOT / path).exists() and path not in args.without:
                (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, Path(name) / path)
        for room in args.rooms or TESTS:
            mutants = draw(room, args.mutants, args.seed)
            tests = [f"tests/{path}" for path in TESTS[room].split()]
            num_tried, num_alive = try_out(mutants, Path(name), tests, args.minutes)
            killed = (num_tried - num_alive) / max(1, num_tried)
            print(f"| {room} | {num_tried} | {killed:.0%} |", flush=True)


if __name__ == "__main__":
    main()
