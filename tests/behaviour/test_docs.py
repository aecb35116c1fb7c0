"""The README and the pages in docs/: every snippet in them runs, and their tables match the code.

A page reads like one session. Its ``python`` blocks are one script, and its ``console`` blocks are typed in the folder
of that script. The line ``<!-- new script -->`` begins another session, in another folder, and
``<!-- needs: MODULE -->`` one that is run where that module is installed. In all of them, ``node01`` and ``node02``
are node servers of the tests. What a block prints is compared with the
lines below each command, or with the ``text`` block marked ``<!-- output -->``; ``...`` stands for anything, and so
does every number under ``<!-- output: numbers vary -->``. Further marks above a block: ``<!-- file: NAME -->``, to save
it under a name for all sessions of the page, and ``<!-- not run: reason -->``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import rpcdataloader
from rpcdataloader import ResumableDistributedSampler, RPCDataloader, RPCDataset, integrations, launch, pools
from rpcdataloader.__main__ import COMMANDS
from rpcdataloader.status.report import NodeAnswer, make_document
from tests.conftest import READY_LINE, TIMEOUT_SCALE, wait_until
from tests.support.peers import MessageType
from tests.support.quick import quick_server
from tests.support.zygote import Script, Zygote
from tests.unit.wire.test_status import CLIENT, LOOP, NODE

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": (ROOT / "README.md").read_text(),
    **{path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))},
}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        marks: Of the comment above it, such as ``{"file": "train.py"}``.
        line: Number of its first line in the page, from 0.
    """

    language: str
    marks: dict[str, str]
    line: int
    text: str

    @property
    def commands(self) -> list[tuple[str, str]]:
        """The commands of a console block, each with what it prints."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not parts[0], f"a console block begins with a command: {self.text}"
        # The shell's own comments are for the reader.
        commands = [part.partition("\n") for part in parts[1:]]
        return [(re.sub(r" {2,}# .*", "", command), output) for command, _, output in commands]


FENCED = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


# Begins a session; the first one of a page begins with the page.
SESSION = re.compile(r"^<!-- (?:new script|needs: (?P<module>\S+)) -->$", re.MULTILINE)
# The name of the page, and a number where it has several.
SESSIONS = [
    f"{page} {number}" if SESSION.search(text) else page
    for page, text in PAGES.items()
    for number in range(len(SESSION.findall(text)) + 1)
]


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, or of one session of it."""
    page, _, number = page.partition(" ")
    begins = [0, *(match.start() for match in SESSION.finditer(PAGES[page])), len(PAGES[page])]
    first, last = begins[int(number) : int(number) + 2] if number else (0, len(PAGES[page]))
    blocks = []
    for match in FENCED.finditer(PAGES[page]):
        name, _, value = (match["mark"] or "").partition(": ")
        line = PAGES[page].count("\n", 0, match.start("text"))
        if first <= match.start() < last or name == "file":
            blocks.append(Block(match["language"], {name: value}, line, match["text"]))
    return blocks


def is_launch(command: str) -> bool:
    return "rpcdataloader.launch" in command


def sessions_with(wanted: Callable[[Block], bool]) -> list[str]:
    return [
        name for name in SESSIONS if any(wanted(block) for block in blocks_of(name) if "not run" not in block.marks)
    ]


def test_every_block_is_of_a_kind_that_is_run_or_only_looked_at():
    for page in PAGES:
        assert PAGES[page].count("```") == 2 * len(blocks_of(page)), f"{page} has a fence that is not understood"
        for block in blocks_of(page):
            directive = block.language.startswith("{")
            assert directive or block.language in ("python", "console", "text"), f"{page}:{block.line}"
            assert not set(block.marks) - {"", "file", "output", "not run", "non-goals", "end"}, f"{page}:{block.line}"
            assert len(block.marks.get("not run", "a reason")) >= 8, f"{page}:{block.line} gives no reason"


# --- running them

# A script or a module that is run, with variables and arguments.
PYTHON = re.compile(r"(?P<env>(?:\w+=\S+ )*)\bpython (?P<words>(?:-m )?[\w.]+(?: [^\s>|]+)*)")


def as_pattern(expected: str) -> str:
    """A regular expression for expected output, in which ``...`` stands for anything."""
    return re.escape(expected).replace(re.escape("..."), ".*")


def quicker(source: str) -> str:
    """Where a page waits, for a slow disk or a training step, a fifth of that, unless it asks what is waited for."""
    sleeps = r"(?<=time\.sleep\()[\d.]+(?=\))"
    return source if "diagnosis" in source else re.sub(sleeps, lambda seconds: str(float(seconds[0]) / 5), source)


class Desk:
    """A folder, with an environment in which snippets run.

    Args:
        nodes: Addresses for the names of nodes in the pages.
    """

    def __init__(self, folder: Path, nodes: dict[str, str], zygote: Zygote) -> None:
        self.folder = folder
        self._nodes = nodes
        self._zygote = zygote
        self._changed_env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
        }

    def fill_in(self, text: str) -> str:
        """Put real addresses where the pages name nodes."""
        for name, address in self._nodes.items():
            text = text.replace(name, address)
        return text

    def save(self, block: Block) -> None:
        """Save a file of the page."""
        (self.folder / block.marks["file"]).write_text(quicker(block.text))

    def run(self, command: str) -> str:
        """Run a command of the shell, with its scripts and modules as forks; returns its standard output."""
        done = subprocess.run(
            ["bash", "-c", PYTHON.sub(self._run_fork, command)],
            cwd=self.folder,
            env={**os.environ, **self._changed_env},
            capture_output=True,
            text=True,
            timeout=60 * TIMEOUT_SCALE,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _run_fork(self, command: re.Match[str]) -> str:
        """Run what ``python`` is given; returns a command that prints and ends the same."""
        words = shlex.split(command["words"])
        source = f"\nimport sys; sys.argv = {words!r}\n"
        if words[0] == "-m":
            source += f"sys.argv = sys.argv[1:]; import runpy; runpy.run_module({words[1]!r}, run_name='__main__')"
        else:
            source += (self.folder / words[0]).read_text()
        env = dict(word.split("=", 1) for word in command["env"].split())
        ended = self.start_python(source, **env).wait(60 * TIMEOUT_SCALE)
        said = f"printf %s {shlex.quote(ended.output)}; printf %s {shlex.quote(ended.errors)} >&2"
        return f"{{ {said}; (exit {ended.status}); }}"

    def run_python(self, source: str, **env: str) -> str:
        """Run a script to its end; returns its standard output."""
        done = self.start_python(source, **env).wait(60 * TIMEOUT_SCALE)
        assert done.status == 0, f"{done.output}\n{done.errors}"
        return done.output

    def start_python(self, source: str, **env: str) -> Script:
        """Start a script whose first line is empty, so that the numbers of its lines stay what they are."""
        assert source.startswith("\n")
        change = f"os.chdir({str(self.folder)!r}); os.environ.update({ {**self._changed_env, **env}!r})"
        change += f"; sys.path.insert(0, {str(self.folder)!r})"
        # A pool of its own would import torch, and what the page needs.
        begin = "import os, sys"
        return self._zygote.start(f"{begin}; {change}{source}", ends_quickly=True)


@pytest.fixture
def desk(request, tmp_path) -> Iterator[Desk]:
    """For a session; one about a library that is not installed is skipped."""
    session = request.node.callspec.params["session"] if hasattr(request.node, "callspec") else ""
    module = module_for(session)
    if module is not None and importlib.util.find_spec(module) is None:  # importing it here would take seconds
        pytest.skip(f"{module} is not installed")
    zygote = request.getfixturevalue("library_zygote")
    options = ("--num-workers", "2", "--max-connections", "64")
    with quick_server(zygote, *options) as first, quick_server(zygote, *options) as second:
        yield Desk(tmp_path, {"node01:6543": first.address, "node02:6543": second.address}, zygote)


def module_for(session: str) -> str | None:
    """The module that a session needs."""
    page, _, number = session.partition(" ")
    return list(SESSION.finditer(PAGES[page]))[int(number) - 1]["module"] if int(number or 0) else None


@pytest.mark.parametrize(
    "session", sessions_with(lambda block: block.language == "python" and "file" not in block.marks)
)
def test_python_of_session_runs(session, desk):
    # As many lines as the page, so that a traceback names a line of it.
    script = [""] * PAGES[session.partition(" ")[0]].count("\n")
    expected = ""
    for block in blocks_of(session):
        if "file" in block.marks:
            desk.save(block)
            continue
        if "not run" in block.marks:
            continue
        if block.language == "python":
            lines = block.text.splitlines()
            script[block.line : block.line + len(lines)] = lines
        elif "output" in block.marks:
            vary = block.marks["output"] == "numbers vary"
            # So does the advice of a diagnosis, on a machine that does other things, too.
            text = re.sub(r"(without the loader\.) .*|\d+(?:[.,]\d+)*", r"\1...", block.text)
            expected += text if vary else block.text
    # Pages that leave it open where the workers are need no pool of their own, which would import torch.
    workers = {"RPCDATALOADER_WORKERS": desk.fill_in("node01:6543")}
    shown, printed = expected.strip(), desk.run_python(desk.fill_in(quicker("\n".join(script))), **workers).strip()
    assert re.fullmatch(as_pattern(shown), printed, re.DOTALL), f"{session} shows\n{shown}\nand prints\n{printed}"


@pytest.mark.parametrize("page", ["README.md", "first-training.md"])
def test_first_script_of_page_does_nothing_where_workers_run_it_to_begin(page, monkeypatch):
    """As processes of multiprocessing do that are not forked, its fork server among them from Python 3.14 on."""
    monkeypatch.setattr(rpcdataloader, "RPCDataset", lambda *_arguments, **_options: pytest.fail("a dataset is made"))
    blocks = [block for block in blocks_of(page) if block.language == "python" and "not run" not in block.marks]
    (script,) = [block.text for block in blocks if "RPCDataset(" in block.text]
    exec(compile(script, page, "exec"), {"__name__": "__mp_main__"})


def is_typed(block: Block) -> bool:
    return block.language == "console" and any(not is_launch(command) for command, _ in block.commands)


@pytest.mark.slow
@pytest.mark.instruments
@pytest.mark.parametrize("session", sessions_with(is_typed))
def test_commands_of_session_run(session, desk):
    for block in blocks_of(session):
        if "file" in block.marks:
            desk.save(block)
        if block.language != "console" or "not run" in block.marks:
            continue
        for command, expected in block.commands:
            if is_launch(command):
                continue
            output = desk.run(desk.fill_in(command))
            assert re.fullmatch(as_pattern(desk.fill_in(expected)), output), f"{command} prints\n{output}"


@pytest.mark.slow
@pytest.mark.instruments
@pytest.mark.timeout(300)
def test_first_training_goes_on_after_a_kill(desk):
    """What the first page types into two terminals."""
    (block,) = [block for block in blocks_of("first-training.md") if "file" in block.marks]
    desk.save(block)
    # The same batches, without waiting for them.
    script = (desk.folder / block.marks["file"]).read_text().replace("time.sleep(", "float(")
    workers = {"RPCDATALOADER_WORKERS": desk.fill_in("node01:6543")}

    def start(epochs: int) -> Script:
        return desk.start_python(f"\nimport sys; sys.argv = ['train.py', '{epochs}']\n{script}", **workers)

    training = start(100)
    wait_until(lambda: training.output.count("\n") >= 2, 60, "two epochs")
    training.kill()
    before = training.wait(30 * TIMEOUT_SCALE).output.splitlines()
    # The kill may have come between the checkpoint of an epoch and its line.
    epochs = len(before) + 2
    going_on, *after, _diagnosis = start(epochs).wait(60 * TIMEOUT_SCALE).output.splitlines()
    num_saved = int(going_on.removeprefix("going on in epoch ")) - 1
    assert len(before) <= num_saved < epochs
    whole = start(epochs).wait(60 * TIMEOUT_SCALE).output.splitlines()
    assert (before, after) == (whole[: len(before)], whole[num_saved:-1])


def test_commands_that_start_node_servers_are_understood():
    num_launched = 0
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "console" and "not run" not in block.marks:
                for command, expected in filter(lambda typed: is_launch(typed[0]), block.commands):
                    assert expected == "" or READY_LINE.fullmatch(expected), command
                    words = shlex.split(command)
                    launch.make_parser().parse_args(words[words.index("rpcdataloader.launch") + 1 :])
                    num_launched += 1
    assert num_launched > 5


# --- tables


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The table below a heading, without its first two lines."""
    section = re.search(rf"^#+ {re.escape(heading)}$(.*?)(^#+ |\Z)", PAGES[page], re.MULTILINE | re.DOTALL)
    assert section, f"{page} has no heading {heading}"
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_table_of_environment_variables_is_that_of_the_package():
    package = "".join(path.read_text() for path in (ROOT / "rpcdataloader").rglob("*.py"))
    used = set(re.findall(r"RPCDATALOADER_[A-Z_]+", package))
    used |= set(re.findall(r'"((?:SLURM|LOCAL|OMPI|XDG)_[A-Z_]+)"', package))
    used |= set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', package)) - {"HOME", "PYTHONPATH"}
    described = {name for row in rows_of("api.md", "Environment variables") for name in re.findall(r"`(\w+)`", row[0])}
    assert described == used


def test_keys_of_the_status_document_are_those_of_its_page():
    client = dataclasses.replace(CLIENT, loops=[LOOP], loops_seconds=2.5)
    answer = NodeAnswer("node01:6543", dataclasses.replace(NODE, clients=[client]), version="0.1.0")
    document = make_document(0.0, [answer], {"/pool/file": "a reason"}, {})
    (section,) = re.findall(r"^## JSON$(.*?)^## ", PAGES["status-reference.md"], re.MULTILINE | re.DOTALL)
    described = set(re.findall(r"`(\w+)`", section))
    found = set(keys_of(document))
    assert found - described == set()
    # In the tables: those that are gone, not values such as `idle`, nor members of a Diagnosis.
    rows = [row for row in rows_of("status-reference.md", "JSON") if len(row) in (2, 3)]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} - found == set()


def keys_of(tree):
    """The keys of a document at any depth, without those that a diagnosis chooses."""
    for key, value in tree.items():
        yield key
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict):
                yield from keys_of(part)


def test_table_of_message_types_is_that_of_the_package():
    rows = rows_of("protocol.md", "Types")
    assert {row[0]: int(row[1]) for row in rows} == {member.name: member.value for member in MessageType}


def test_table_of_arguments_has_all_of_them():
    described = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows_of("differences.md", "Arguments")))
    code = RPCDataloader.__init__.__code__
    assert sorted(described) == sorted(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def members_in_reference(name: str) -> set[str]:
    """The members of a class that the reference names."""
    found = re.search(rf"autoclass:: rpcdataloader\.{name}\n((?:   :.*\n)*)", PAGES["api.md"])
    assert found, f"the reference has no class {name}"
    return set(re.findall(r"\w+", found[1].replace(":members:", "")))


def test_reference_has_all_public_names():
    documented = re.findall(
        r"(?:class|function|module):: rpcdataloader\.([\w.]+)|`rpcdataloader\.(\w+)`", PAGES["api.md"]
    )
    public = {*rpcdataloader.__all__, *(f"pools.{name}" for name in pools.__all__), "errors"}
    public |= {f"integrations.{name}" for name, value in vars(integrations).items() if is_of(value, integrations)}
    assert {name for names in documented for name in names if name} == public
    assert ".. automodule:: rpcdataloader.errors\n   :members:" in PAGES["api.md"]


def is_of(value: object, module: ModuleType) -> bool:
    """Whether this is a public class or function of this module."""
    name = getattr(value, "__name__", "_")
    return getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")


def test_reference_has_all_public_members():
    for kind in (RPCDataset, RPCDataloader, ResumableDistributedSampler):
        own = [base for base in kind.__mro__ if base.__module__.startswith("rpcdataloader.")]
        members = {name for base in own for name in vars(base) if not name.startswith("_")}
        assert members_in_reference(kind.__name__) == members, kind


def test_reference_has_all_commands():
    shown = re.findall(r"^```\{command-help\} (\w+)$", PAGES["api.md"], re.MULTILINE)
    assert sorted(shown) == sorted(COMMANDS)


def anchors_of(text: str) -> set[str]:
    """What a link into a page can name: its headings, as GitHub and myst spell them, and targets like ``(name)=``."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", prose, re.MULTILINE))


def test_links_lead_somewhere():
    texts = {ROOT / page if page == "README.md" else ROOT / "docs" / page: text for page, text in PAGES.items()}
    texts[ROOT / "CONTRIBUTING.md"] = (ROOT / "CONTRIBUTING.md").read_text()
    for path, text in texts.items():
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", re.sub(r"`[^`\n]*`", "", text)):
            if "://" in target:
                continue
            found = (path.parent / target).resolve() if target else path
            assert found.exists(), f"{path.name} links to {target}"
            if anchor:
                assert anchor in anchors_of(texts[found]), f"{path.name} links to {target}#{anchor}"
