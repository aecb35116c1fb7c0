"""``py_modules=``: datasets and workers import the client's modules on nodes that do not see their folder."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from tests.conftest import close_client, wait_until
from tests.support.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")

DATA = """
import importlib.resources
from pathlib import Path

from torch.utils.data import Dataset

from shapes.version import VERSION

class Labels(Dataset):
    def __init__(self):
        self.labels = (Path(__file__).parent / "labels.txt").read_text().split()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        import shapes.late  # not before

        labels = importlib.resources.files("shapes").joinpath("labels.txt").read_text()
        return self.labels[index], labels, VERSION, shapes.late.__file__
"""


FILES = {"__init__.py": "", "data.py": DATA, "version.py": "VERSION = 1", "late.py": "", "labels.txt": "circle square"}


@pytest.fixture
def unseen(tmp_path, monkeypatch):
    """A package of the user, in a folder that sessions are not told of, as one that a node does not see."""
    (tmp_path / "scripts" / "shapes").mkdir(parents=True)
    for name, content in FILES.items():
        (tmp_path / "scripts" / "shapes" / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path / "scripts")
    module = importlib.import_module("shapes.data")
    sys.path.remove(str(tmp_path / "scripts"))
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "shapes"]:
        del sys.modules[name]


@pytest.fixture
def server(serve):
    return serve("--num-workers", "2")


def load(dataset, **options):
    return list(RPCDataloader(dataset, batch_size=None, collate_fn=tuple, **options))


def check(samples):
    assert [each[:3] for each in samples] == [("circle", "circle square", 1), ("square", "circle square", 1)]
    return Path(samples[0][3]).parents[1]


@pytest.mark.parametrize(("build", "kind"), [("node", "name"), ("node", "module"), ("worker", "path")])
def test_dataset_and_workers_import_the_package_with_its_data(server, unseen, tmp_path, build, kind):
    given = {"name": "shapes", "module": sys.modules["shapes"], "path": tmp_path / "scripts" / "shapes"}[kind]
    dataset = RPCDataset(server.address, unseen.Labels, build=build, py_modules=[given])
    folder = check(load(dataset))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert tmp_path not in folder.parents


def test_module_that_was_edited_since_its_import_is_that_of_the_script_with_its_data(server, unseen, tmp_path):
    rpc_async(server.address, os.getpid).wait()
    (tmp_path / "scripts" / "shapes" / "version.py").write_text("VERSION = 2")
    (tmp_path / "scripts" / "shapes" / "data.py").write_text(DATA.replace("shapes.late.__file__", "'edited'"))
    (tmp_path / "scripts").rename(tmp_path / "moved")
    dataset = RPCDataset(server.address, unseen.Labels, py_modules=[tmp_path / "moved" / "shapes"])
    assert tmp_path not in check(load(dataset)).parents


def test_folder_goes_with_the_session_however_that_ends_and_the_next_one_has_another(server, unseen):
    def kill_session():
        os.kill(rpc_async(server.address, os.getppid).wait(), signal.SIGKILL)

    folders = []
    for end in kill_session, close_client, server.stop:
        dataset = RPCDataset(server.address, unseen.Labels, py_modules=["shapes"])
        folders.append(check(load(dataset)))
        end()
        wait_until(lambda: not folders[-1].exists(), what="folder of a session that has ended")
        if end is kill_session:
            assert check(load(dataset)) != folders[0]
    assert len(set(folders)) == 3


def test_what_comes_after_a_dataset_was_built_is_refused(server, unseen, tmp_path):
    dataset = RPCDataset(server.address, unseen.Labels, py_modules=["shapes"])
    with pytest.raises(ValueError, match="py_modules is too late for an RPCDataset, which is built"):
        RPCDataloader(dataset, py_modules=["shapes"])
    (tmp_path / "scripts" / "shapes" / "labels.txt").write_text("circle oval")
    with pytest.raises(
        ValueError,
        match="py_modules: another dataset or loader of this process has sent another value, which differs in shapes,",
    ):
        RPCDataset(server.address, os._exit, 3, py_modules=["shapes"])


def test_what_is_too_late_is_an_error_of_those_that_give_it_alone(serve, unseen, tmp_path):
    """Not of later datasets without it, on sessions that have refused it or are new."""
    before = f"import sys; sys.path.append({str(tmp_path / 'scripts')!r})"
    both = [serve("--preload", "shapes", before=before) for _ in range(2)]
    (tmp_path / "other.py").touch()
    given = ["shapes", tmp_path / "other.py"]
    with pytest.raises(ImportError, match="shapes comes too late"):
        RPCDataset(",".join(server.address for server in both), unseen.Labels, py_modules=given)
    with pytest.raises(ImportError, match="shapes comes too late"):
        load(Numbers(3), workers=both[0].address, py_modules=given)
    for server in [*both, serve("--preload", "shapes", before=before)]:
        assert len(list(RPCDataloader(Numbers(3), workers=server.address))) == 3
        assert len(RPCDataset(server.address, Numbers, 3, py_modules=given[1:])) == 3


def test_full_disk_is_an_error_that_names_the_file(serve, unseen):
    full = "lambda path, mode: open('/dev/full', mode)"
    server = serve(before=f"from rpcdataloader.host import environment; environment.open = {full}")
    with pytest.raises(OSError, match=r"No space left on device: '.*/rpcdataloader-\w+/shapes/\w+.\w+'"):
        RPCDataset(server.address, unseen.Labels, py_modules=["shapes"])


def test_folder_in_which_another_user_could_replace_the_modules_is_not_used(serve, unseen, tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    folder.chmod(0o777)  # without the sticky bit of /tmp
    server = serve(before=f"import os, tempfile; tempfile.tempdir = {str(folder)!r}")
    with pytest.raises(PermissionError, match=rf"{folder} is writable by others than .*: set its TMPDIR"):
        RPCDataset(server.address, unseen.Labels, py_modules=["shapes"])
    assert list(folder.iterdir()) == []
