"""Archives of modules: equal for equal files, unpacked in their folder and nowhere else."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import sys
import zipfile

import numpy  # noqa: F401  # from elsewhere than a session has it from
import pytest

from rpcdataloader.host import environment
from rpcdataloader.host.environment import Additions, Module, pack, prepare_session, unpack, update

FILES = {
    "shapes/__init__.py": b"from shapes.round import circle\n",
    "shapes/round.py": b"circle = 'a circle'\n",
    "shapes/data/names.txt": b"circle\r\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a session that has no modules yet."""
    monkeypatch.setattr(environment, "_installed", {})
    monkeypatch.setattr(environment, "_folder", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "earlier"), *sys.path])
    prepare_session(str(tmp_path / "session"), lambda: None)
    yield tmp_path / "session"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shapes", "squares")]:
        del sys.modules[name]


def install_modules(modules):
    update(Additions.of({}, modules, forward_output=False), 0, 1)


def test_equal_files_make_equal_archives_whatever_their_order():
    module = pack("shapes", FILES)
    assert pack("shapes", dict(reversed(FILES.items()))) == module
    assert pack("shapes", dict(reversed(FILES.items()))).archive == module.archive
    assert module.digest == hashlib.sha256(module.archive).hexdigest()
    assert module.size_bytes == sum(map(len, FILES.values()))
    assert pack("shapes", {**FILES, "shapes/round.py": b"circle = 2"}) != module
    assert "shapes/round" not in repr(module)


def test_files_are_unpacked_as_they_were(tmp_path):
    unpack(pack("shapes", FILES), str(tmp_path))
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == FILES


def crafted(name, path, content=b"x", digest=None):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(path, content)
    return Module(name, digest or hashlib.sha256(buffer.getvalue()).hexdigest(), 1, buffer.getvalue())


@pytest.mark.parametrize(
    "path",
    ["shapes/../../escaped", "../escaped", "/escaped", "other/escaped", "shapes", ".", "..", "shapes.py/../../x"],
)
def test_path_that_leads_out_of_the_module_is_refused(tmp_path, path):
    (tmp_path / "session" / "shapes").mkdir(parents=True)
    with pytest.raises((ValueError, IsADirectoryError, FileExistsError)):
        unpack(crafted("shapes", path), str(tmp_path / "session"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_archive_that_was_altered_or_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="archive of module shapes does not match its digest"):
        unpack(crafted("shapes", "shapes.py", digest="0" * 64), str(tmp_path))
    monkeypatch.setattr(environment, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="has 1001 bytes, more than 1000"):
        unpack(crafted("shapes", "shapes.py", bytes(1001)), str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_modules_come_before_others_of_their_name_and_are_private(folder, tmp_path):
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "shapes.py").write_text("circle = 'another'")
    install_modules([pack("shapes", FILES)])
    shapes = importlib.import_module("shapes")
    assert shapes.circle == "a circle"
    assert shapes.__file__ == str(folder / "shapes" / "__init__.py")
    assert folder.stat().st_mode & 0o777 == 0o700
    install_modules([pack("shapes", FILES)])  # again: nothing to do
    install_modules([pack("squares", {"squares.py": b"side = 2"})])  # more of them, later
    assert importlib.import_module("squares").side == 2


def test_module_that_was_imported_from_elsewhere_is_too_late(folder):
    with pytest.raises(ImportError, match=r"comes too late on .* imported it from .*numpy/__init__\.py") as caught:
        install_modules([pack("squares", {"squares.py": b"side = 2"}), pack("numpy", {"numpy.py": b""})])
    assert "without --preload numpy" in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["squares.py"]


def test_folder_of_somebody_else_is_not_used(folder):
    folder.mkdir()
    with pytest.raises(FileExistsError):
        install_modules([pack("squares", {"squares.py": b"side = 2"})])
