"""``python -m rpcdataloader.check``: what it says of datasets that work, and of those that do not."""

from __future__ import annotations

import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable

import h5py
import pytest

from rpcdataloader.__main__ import main
from rpcdataloader.check import way

NUMBERS = itertools.count()

pytestmark = pytest.mark.usefixtures("clean_client")

HEAD = """
import os, threading
import h5py, numpy as np, torch
from torch.utils.data import Dataset

class Base(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.rand(3), index
"""

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path, monkeypatch, shared_server, capsys) -> Check:
    """Check what ``source`` defines by a name; gives the exit status and what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(way, "_MOST_BYTES", 4 << 20)  # half a second on each end

    def check(source, *options, name="Data", workers=shared_server.address):
        module = f"checked{next(NUMBERS)}"  # new, for the sake of ``sys.modules``
        (tmp_path / f"{module}.py").write_text(HEAD + textwrap.dedent(source))
        status = main(["check", f"{module}:{name}", "--workers", workers, *options])
        return status, capsys.readouterr().out

    return check


def line_of(output: str, name: str) -> str:
    """The lines of a finding, with those below them."""
    found = re.finditer(rf"^(ok|note|FAILED) +{name} .*\n(                  .*\n)*", output, re.MULTILINE)
    lines = "".join(match[0] for match in found)
    assert lines, output
    return lines


# --- datasets that work


def test_good_dataset(check):
    status, output = check("class Data(Base): pass", "--rate", "1e8")
    assert status == 0
    assert {line.split()[0] for line in output.splitlines()[:-1]} == {"ok"}
    names = [line.split()[1] for line in output.splitlines()[:-1]]
    steps = ["server", "room", "session", "module", "link"]  # see test_check_nodes.py
    assert names == [
        *steps,
        "builds",
        "builds",
        "samples",
        "batch",
        "repeats",
        "size",
        "speed",
        "most",
        "expect",
        "rate",
    ]
    assert ".Data of 20 samples on " in line_of(output, "builds")
    assert ".Data of 20 samples in this process, after" in line_of(output, "builds")
    assert "8 of them arrive" in line_of(output, "samples")
    assert "equal seeds give equal samples again in the same worker and in another worker\n" in line_of(
        output, "repeats"
    )
    assert re.search(r"8 of them make one of [\d,]+ bytes, in [\d.]+ ms\n", line_of(output, "batch"))
    milliseconds = float(re.search(r"(\S+) ms per sample", line_of(output, "speed"))[1])
    need = re.search(
        r"100,000,000 samples/s need workers: (\S+), network: more than \S+ Gbit/s", line_of(output, "rate")
    )
    assert int(need[1].replace(",", "")) == pytest.approx(1.2e5 * milliseconds, rel=0.1)
    assert output.splitlines()[-1].endswith(":Data works remotely")


def test_samples_with_cycles_are_compared(check):
    status, output = check("""
        class Data(Base):
            def __getitem__(self, index):
                nodes = {"index": index, "edges": []}
                nodes["edges"] += [{"of": nodes}, {"of": nodes}, {"of": nodes}]
                return nodes
    """)
    assert status == 0, output


# --- how it is built


def test_attribute_that_cannot_be_pickled_is_named_and_the_factory_works(check):
    source = """
        class Data(Base):
            def __init__(self):
                self.locks = {"a": threading.Lock()}
    """
    status, output = check(source)
    assert status == 0
    found = line_of(output, "samples").splitlines()[1]
    assert found.startswith("note    samples   not sent as an instance: ")
    assert "dataset.locks['a'] is a _thread.lock, which cannot be pickled" in found
    assert "RPCDataset(workers, MyDataset, *args)" in found
    assert line_of(output, "repeats").startswith("ok")


def test_open_file_leaves_building_to_workers(check, tmp_path):
    with h5py.File(tmp_path / "values.h5", "w") as file:
        file["values"] = list(range(20))
    source = """
        class Data(Base):
            def __init__(self):
                self.values = h5py.File("values.h5")["values"]
            def __getitem__(self, index):
                return self.values[index]
    """
    status, output = check(source)
    assert status == 0
    assert re.search(r"each worker builds its own: it holds \S+/values.h5 open", line_of(output, "inherits"))


def test_memory_map_leaves_building_to_the_node(check, tmp_path):
    (tmp_path / "values").write_bytes(bytes(20))
    source = """
        class Data(Base):
            def __init__(self):
                self.values = np.memmap("values")
            def __getitem__(self, index):
                return float(self.values[index])
    """
    status, output = check(source)
    assert status == 0
    assert "inherits" not in output


def test_dataset_that_only_nodes_can_build(check, serve):
    server = serve("--num-workers", "1", before="os.environ['IS_NODE'] = '1'")
    source = """
        class Data(Base):
            def __init__(self):
                os.environ["IS_NODE"]
    """
    status, output = check(source, workers=server.address)
    assert status == 0
    assert "not in this process: KeyError: 'IS_NODE'" in line_of(output, "builds")
    assert line_of(output, "repeats").startswith("ok")


def test_nodes_that_disagree(check, serve, shared_server):
    server = serve("--num-workers", "1", before="os.environ['NUMBER'] = '7'")
    source = """
        class Data(Base):
            def __len__(self):
                return int(os.environ.get("NUMBER", 20))
        class Hosts(Base):
            def __getitem__(self, index):
                return os.environ.get("NUMBER", "none")
    """
    workers = f"{shared_server.address},{server.address}"
    status, output = check(source, workers=workers)
    assert status == 1
    assert re.search(rf"checked\d+\.Data of 7 samples on {server.address}", output := line_of(output, "builds"))
    assert "FAILED  builds    it differs between nodes" in output
    status, output = check(source, name="Hosts", workers=workers)
    assert (status, "not the same in another worker:" in line_of(output, "repeats")) == (1, True)


# --- what is not the same


@pytest.mark.parametrize(
    ("body", "run", "path", "cause"),
    [
        (
            "def __getitem__(self, index): return {'image': np.random.default_rng().random(2), 'label': index}",
            "again in the same worker",
            "sample['image']: Mismatched elements: 2 / 2",
            "a generator of its own that is never seeded or made in the constructor",
        ),
        (
            "def __getitem__(self, index): return os.getpid(), index",
            "in another worker",
            "sample[0]: ",
            "the id of the process",
        ),
        (
            "def __init__(self): self.words = list(set(map(str, range(100))))\n"
            "    def __getitem__(self, index): return {'words': self.words}",
            "in another worker",
            "sample['words'][",
            "the id of the process, the order of a set",
        ),
    ],
)
def test_field_that_differs_is_named_with_the_usual_cause(check, body, run, path, cause):
    status, output = check(f"class Data(Base):\n    {body}\n")
    assert status == 1
    found = line_of(output, "repeats")
    assert f"not the same {run}:\n" in found
    assert f"    {path}" in found
    assert f"usually: {cause}" in found
    assert "'label'" not in found
    assert "sample[1]" not in found


# --- what does not work at all


@pytest.mark.parametrize(
    ("source", "name", "line"),
    [
        ("def make(): Base()", "make", "TypeError: {} gives NoneType, which has no __getitem__"),
        ("class Data(Base):\n    def __len__(self): return 0", "Data", "Data is empty: its length is 0"),
        ("def make(): open('/no/such/file')", "make", "FileNotFoundError: [Errno 2] No such file"),
        ("", "Data", "AttributeError: module '{module}' has no attribute 'Data'"),
        ("import no_such_module", "Data", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys; sys.exit()", "Data", "raised SystemExit"),
        ("def make(): os._exit(0)", "make", "closed the connection without an answer; if its session was killed"),
    ],
)
def test_what_builds_no_dataset(check, source, name, line):
    status, output = check(source, name=name)
    assert status == 1
    (target, end), found = output.splitlines()[-1].split(" ", 1), line_of(output, "builds")
    assert found.startswith("FAILED  builds    not on ")
    assert line.format(target, module=target.partition(":")[0]) in found
    # Which says nothing about a worker that is gone.
    assert ("FACTORY called with no arguments: def make(): return Data(root=...)" in found) != ("session" in found)
    assert end == "does not work as it is: builds"


def test_own_frames_are_shown_whatever_their_folder_is_called_and_no_others(tmp_path, monkeypatch, check):
    folder = tmp_path / "importlib" / "rpcdataloader" / "loader"
    folder.mkdir(parents=True)
    (folder / "dataset.py").write_text("def fail():\n    raise ValueError('broken')")
    monkeypatch.syspath_prepend(folder)
    source = """
        import dataset
        class Data(Base):
            def __init__(self):
                dataset.fail()
        class Samples(Base):
            def __getitem__(self, index):
                dataset.fail()
    """
    for name, finding in ("Data", "builds"), ("Samples", "samples"):
        status, output = check(source, name=name)
        files = re.findall(r"^ +(/.*), line \d+, in ", line_of(output, finding), re.MULTILINE)
        assert status == 1
        assert [os.path.dirname(file) for file in files] == [str(tmp_path), str(folder)]
    del sys.modules["dataset"]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            "raise ValueError(f'image {index} is broken')",
            r"sample 19: ValueError: image 19 is broken\n(.*\n)+ +raise ValueError\(",
        ),
        ("os._exit(3)", r"batch 7 \(indices 19\) has ended 3 workers in a row: .* exited with status 3"),
    ],
)
def test_sample_that_fails_is_named(check, failure, said):
    source = f"""
        class Data(Base):
            def __getitem__(self, index):
                if index == 19:
                    {failure}
                return index
    """
    status, output = check(source)
    assert status == 1
    assert re.search(said, line_of(output, "samples"))


# --- the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data:"], "expected MODULE:NAME, such as mydata:make_dataset, got 'data:'"),
        (["data:Data", "--rate", "fast"], "argument --rate: expected a number above 0, got fast"),
        (["data:Data", "--rate", "-1"], "argument --rate: expected a number above 0, got -1"),
        (["data:Data", "--workers", "inline"], "argument --workers: inline has no workers"),
        (["data:Data", "--workers", "node01"], "node01"),
        ([], "name a dataset, as MODULE:FACTORY, or node servers, by --workers"),
        (["--workers", "local:2"], "name a dataset, as MODULE:FACTORY, or node servers, by --workers"),
    ],
)
def test_wrong_command_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as exited:
        main(["check", *arguments])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
