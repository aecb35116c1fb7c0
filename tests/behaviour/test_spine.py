"""The spine: what two plain epochs over TCP run through, which is what whoever follows a batch must read."""

from __future__ import annotations

import ast
import operator
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import rpcdataloader
from tests.conftest import TIMEOUT_SCALE
from tests.support import tracing

PACKAGE = Path(rpcdataloader.__file__).parent

# Each commit may only lower the lines; files become more where one is split. What is optional attaches to the spine,
# and is not on it.
MOST_FILES = 95
MOST_LINES = 5355

# Timers that fire on a busy machine, in both runs, and waits that are none on an idle one: the counts of one commit
# were up to this far apart.
NOISE = 25

# What the diagnosis says of a run, in 78 to 124 lines, depends on its times: these are not counted.
OF_TIMES = {"diagnosis/verdict.py", "diagnosis/words.py"}

SCRIPT = """
import subprocess, sys
import torch
from rpcdataloader import RPCDataloader
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return torch.full((3, 64, 64), float(index)), index
command = [sys.executable, "-m", "rpcdataloader.launch", "--port", "0", "--num-workers", "2", "--log-level", "warning"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    address = server.stdout.readline().split()[2]
    loader = RPCDataloader(Images(), batch_size=8, shuffle=True, num_workers=2, workers=[address])
    for epoch in range(2):
        assert sum(len(labels) for images, labels in loader) == 400
    server.terminate()
"""


def test_two_plain_epochs_run_through_no_more_than_they_did(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, "utf-8")
    # Of lines that only a busy machine runs, most go: the spine is what each of two runs needs.
    runs = [lines_run(tmp_path, tmp_path / name) for name in ("first", "second")]
    spine = {
        name: count_lines(name, bytes(map(operator.and_, ran, runs[1].get(name, bytes(len(ran))))))
        for name, ran in runs[0].items()
    }
    spine = {name: lines for name, lines in spine.items() if lines}
    found = "\n".join(f"{lines:5} {name}" for name, lines in sorted(spine.items(), key=lambda item: -item[1]))
    assert len(spine) <= MOST_FILES, f"more files: {len(spine)}\n{found}"
    num_lines = sum(lines for name, lines in spine.items() if name not in OF_TIMES)
    assert num_lines <= MOST_LINES + NOISE, f"more lines: {num_lines}\n{found}"


def lines_run(folder: Path, notes: Path) -> dict[str, bytes]:
    """Run the script; returns a byte for each line of each module, which is 1 if that was run."""
    notes.mkdir()
    subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        check=True,
        timeout=60 * TIMEOUT_SCALE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*tracing.__path__, str(PACKAGE.parent)]),
            "SPINE_PACKAGE": str(PACKAGE),
            "SPINE_NOTES": str(notes),
        },
    )
    return {file.name.replace(":", "/"): file.read_bytes() for file in notes.iterdir()}


def count_lines(name: str, ran: bytes) -> int:
    """The lines of the statements in function bodies that were run, without comments, docstrings and blank lines."""
    text = (PACKAGE / name).read_text("utf-8")
    lines = text.splitlines()
    found: set[int] = set()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for first, last in statements(function.body):
                if any(ran[first : last + 1]):
                    found.update(range(first, last + 1))
    return sum(bool(line := lines[number - 1].strip()) and not line.startswith("#") for number in found)


def statements(body: list[ast.stmt]) -> Iterator[tuple[int, int]]:
    """First and last line of each statement, at any depth; of a compound one, up to its first block."""
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(statement, "handlers", [])]
        blocks += [case.body for case in getattr(statement, "cases", [])]
        if not any(blocks):
            yield statement.lineno, statement.end_lineno or statement.lineno
            continue
        yield statement.lineno, max(statement.lineno, next(block for block in blocks if block)[0].lineno - 1)
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):  # whose own bodies come on their own
            for block in blocks:
                yield from statements(block)
