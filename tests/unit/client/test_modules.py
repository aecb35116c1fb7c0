"""Which modules ``py_modules=`` and which variables ``env=`` mean, what is sent of them, and what is refused."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

import pytest

from rpcdataloader.client.modules import choose_modules, choose_variables


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of scripts, with a package, a module, and what a working folder has besides."""
    package = tmp_path / "shapes"
    for path, content in {
        "shapes/__init__.py": "import shapes.round",
        "shapes/round.py": "circle = 1",
        "shapes/data/names.txt": "circle\n",
        "shapes/__pycache__/round.cpython-311.pyc": "compiled",
        "shapes/old.pyc": "compiled",
        "shapes/.git/config": "hidden",
        "shapes/.#round.py": "lock of an editor",
        "squares.py": "side = 2",
        "parts/one.py": "",
        "three.txt": "",
        "two-words/__init__.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    (tmp_path / "names").symlink_to(package / "data")
    (package / "linked").symlink_to(tmp_path / "names")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shapes", "squares", "parts")]:
        del sys.modules[name]


def files(module):
    return {name: content.decode() for name, content in module.files.items()}


SHAPES = {
    "shapes/__init__.py": "import shapes.round",
    "shapes/data/names.txt": "circle\n",
    "shapes/linked/names.txt": "circle\n",
    "shapes/round.py": "circle = 1",
}


@pytest.mark.parametrize("given", ["shapes", "./shapes", "shapes/__init__.py", Path("shapes"), importlib.import_module])
def test_package_is_sent_with_its_data_and_without_what_is_compiled_or_hidden(folder, given):
    given = given("shapes") if callable(given) else given
    (module,) = choose_modules([given])
    assert (module.name, files(module)) == ("shapes", SHAPES)
    assert module == choose_modules([folder / "shapes"])[0]  # whatever it is called by


def test_two_of_a_name_are_refused(folder):
    (folder / "parts" / "squares.py").write_text("side = 3")
    with pytest.raises(ValueError, match="two modules of the name squares"):
        choose_modules(["squares", "parts/squares.py"])


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("shapes", TypeError, "py_modules must be a list of modules, names of modules, or paths, but is 'shapes'"),
        (os, TypeError, "functools.partial"),
        ([3], TypeError, "but one is 3"),
        (["nowhere"], ValueError, "there is no module 'nowhere' that could be imported here"),
        ([""], ValueError, "there is no module ''"),
        (["three.txt"], ValueError, "there is no module 'three.txt' that could be imported here: write './three.txt'"),
        (["./three.txt"], ValueError, "three is not a Python file, but"),
        (["shapes.round"], ValueError, "shapes.round is a part of shapes: name shapes, which is sent as a whole"),
        (["./nowhere"], ValueError, "there is no"),
        (["./parts"], ValueError, "parts/__init__.py: name modules, or folders of packages, one by one"),
        (["parts"], ValueError, "parts is a namespace package"),
        (["./two-words"], ValueError, "'two-words' is not a valid module name"),
        (["json"], ValueError, "json is a module of Python itself"),
        (["__main__"], ValueError, "leave __main__ out"),
        ([sys.modules["__main__"]], ValueError, "leave __main__ out"),
        (["torch"], ValueError, ".so, which is built for one kind of machine: install it on the nodes instead"),
    ],
)
def test_what_cannot_be_sent_is_refused(folder, given, error, text):  # noqa: ARG001
    with pytest.raises(error, match=re.escape(text)):
        choose_modules(given)


def test_package_that_is_too_large_is_refused_before_it_is_read(folder):
    with open(folder / "shapes" / "weights.bin", "wb") as file:
        file.truncate(300 << 30)
    with pytest.raises(
        ValueError, match=r"has 307200\.0 MiB, of which .*weights\.bin has 307200\.0, and the limit is 64"
    ):
        choose_modules(["shapes"])


# Variables


ENVIRON = {
    "HF_HOME": "/hf",
    "HF_TOKEN": "secret of theirs",
    "AWS_PROFILE": "me",
    "LD_PRELOAD": "/x.so",
    "CUDA_VISIBLE_DEVICES": "1",
    "SLURM_JOB_ID": "7",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu01",
    "RPCDATALOADER_TOKEN": "ours",
    "RPCDATALOADER_WORKERS": "node01:1",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (None, {}),
        ([], {}),
        (["AWS_PROFILE", "NOT_SET"], {"AWS_PROFILE": "me"}),
        (("HF_*",), {"HF_HOME": "/hf", "HF_TOKEN": "secret of theirs"}),
        (iter(["hf_*", "HF_HOM?", "A[VW]S_*"]), {"HF_HOME": "/hf", "AWS_PROFILE": "me"}),
        (["*"], {"HF_HOME": "/hf", "HF_TOKEN": "secret of theirs", "AWS_PROFILE": "me"}),
        (["R*", "LD_PRELOA[D]"], {}),
        ({"OMP_NUM_THREADS": "2", "A*": "no pattern"}, {"OMP_NUM_THREADS": "2", "A*": "no pattern"}),
        (["LD_PRELOAD", "SLURM_JOB_ID"], {"LD_PRELOAD": "/x.so", "SLURM_JOB_ID": "7"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_names_patterns_and_values(env, expected):
    assert choose_variables(env, ENVIRON) == expected


@pytest.mark.parametrize(
    ("env", "error", "text"),
    [
        ("HF_*", TypeError, "env must be a list of names and patterns, or a mapping"),
        (3, TypeError, "functools.partial"),
        (["RPCDATALOADER_TOKEN"], ValueError, "RPCDATALOADER_TOKEN is the secret, which is never sent"),
        ({"RPCDATALOADER_TOKEN": "x"}, ValueError, "RPCDATALOADER_TOKEN is the secret, which is never sent"),
        ({"A": 2}, ValueError, "the value of A must be a string, but is 2"),
        ({"A": "x\0"}, ValueError, "the value of A must be a string"),
        (["A=2"], ValueError, "'A=2' is not a valid name of an environment variable"),
        ([""], ValueError, "'' is not a valid name"),
        ([4], ValueError, "4 is not a valid name"),
    ],
)
def test_what_makes_no_sense_is_refused(env, error, text):
    with pytest.raises(error, match=re.escape(text)):
        choose_variables(env, ENVIRON)
