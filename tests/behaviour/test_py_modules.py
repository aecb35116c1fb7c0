"""``py_modules=``: datasets and workers import the client's modules on nodes that do not see their folder."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.errors import SerializationError
from tests.conftest import close_client, wait_until
from tests.support.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")

DATA = """
import importlib.resources
import os
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
        return self.labels[index], labels, VERSION, shapes.late.__file__, os.getpid()
"""


def write_package(folder, version="1"):
    (folder / "shapes").mkdir(parents=True)
    for name, content in {
        "__init__.py": "",
        "data.py": DATA,
        "version.py": f"VERSION = {version!r}",
        "late.py": "",
        "labels.txt": "circle square",
    }.items():
        (folder / "shapes" / name).write_text(content)


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """A package of the user, in a folder that sessions are not told of, as one that a node does not see."""
    write_package(tmp_path / "scripts")
    monkeypatch.syspath_prepend(tmp_path / "scripts")
    yield importlib.import_module("shapes.data")
    for name in [name for name in sys.modules if name.partition(".")[0] == "shapes"]:
        del sys.modules[name]


@pytest.fixture
def unseen(shapes, tmp_path):
    sys.path.remove(str(tmp_path / "scripts"))
    return shapes


@pytest.fixture
def server(serve):
    return serve("--num-workers", "2")


def load(dataset, **options):
    return list(RPCDataloader(dataset, batch_size=None, collate_fn=tuple, **options))


def check(samples, version="1"):
    assert [(label, *rest) for label, *rest, _path, _pid in samples] == [
        ("circle", "circle square", version),
        ("square", "circle square", version),
    ]
    return Path(samples[0][3]).parents[1]


def test_without_it_the_node_says_what_is_missing(server, unseen):
    with pytest.raises(SerializationError, match=r"No module named 'shapes' on .*: send it with py_modules="):
        RPCDataset(server.address, unseen.Labels)


@pytest.mark.parametrize("build", ["node", "worker"])
@pytest.mark.parametrize("kind", ["name", "module", "path"])
def test_dataset_and_workers_import_the_package_with_its_data(server, unseen, tmp_path, build, kind):
    given = {"name": "shapes", "module": sys.modules["shapes"], "path": tmp_path / "scripts" / "shapes"}[kind]
    dataset = RPCDataset(server.address, unseen.Labels, build=build, py_modules=[given])
    folder = check(load(dataset))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert tmp_path not in folder.parents


def test_session_that_replaces_a_lost_one_has_them_and_the_folder_of_the_lost_one_goes(server, unseen):
    dataset = RPCDataset(server.address, unseen.Labels, py_modules=["shapes"])
    folder = check(load(dataset))
    session = rpc_async(server.address, os.getppid).wait()
    os.kill(session, signal.SIGKILL)
    wait_until(lambda: not folder.exists(), what="folder of a session that was killed")
    assert check(load(dataset)) != folder


def test_folder_goes_with_the_client_and_with_the_server(server, unseen):
    folders = []
    for end in close_client, server.stop:
        folders.append(check(load(RPCDataset(server.address, unseen.Labels, py_modules=["shapes"]))))
        end()
        wait_until(lambda: not folders[-1].exists(), what="folder of a session that has ended")
    assert folders[0] != folders[1]


def test_embedded_pool_has_them_too_and_leaves_nothing(unseen):
    folder = check(load(RPCDataset("local:2", unseen.Labels, py_modules=["shapes"])))
    close_client()
    assert not folder.exists()


CLIENT = """
import sys
sys.path.insert(0, sys.argv[1])
import shapes.data
sys.path.remove(sys.argv[1])
from rpcdataloader import RPCDataloader, RPCDataset
dataset = RPCDataset(sys.argv[2], shapes.data.Labels, py_modules=["shapes"])
for version, path in [sample[2:4] for sample in RPCDataloader(dataset, batch_size=None, collate_fn=tuple)]:
    print(version, path)
"""


def test_clients_with_different_versions_do_not_meet(server, unseen, zygote, tmp_path):
    dataset = RPCDataset(server.address, unseen.Labels, py_modules=["shapes"])
    folder = check(load(dataset))
    write_package(tmp_path / "others", version="2")
    ended = zygote.start(CLIENT, tmp_path / "others", server.address).wait(30)
    assert ended.status == 0, ended.errors
    other = {line.split()[0]: Path(line.split()[1]).parents[1] for line in ended.output.splitlines()}
    assert other.keys() == {"2"}
    assert check(load(dataset)) == folder != other["2"]


def test_files_that_have_changed_since_are_refused_before_anything_is_built(server, unseen, tmp_path):
    RPCDataset(server.address, unseen.Labels, py_modules=["shapes"])
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


def test_what_has_no_effect_or_cannot_be_sent_is_refused(server, shapes):
    with pytest.raises(ValueError, match="py_modules is too late for an RPCDataset, which is built"):
        RPCDataloader(RPCDataset(server.address, Numbers), py_modules=["shapes"])
    for make in (
        lambda: RPCDataset("nowhere:1", shapes.Labels, py_modules=["shapes.data"]),
        lambda: RPCDataloader(shapes.Labels(), workers="nowhere:1", py_modules=["shapes.data"]),
    ):
        with pytest.raises(ValueError, match=r"shapes\.data is a part of shapes"):
            make()
