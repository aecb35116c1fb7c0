"""Which paths of a trainer are safe on a node, and what is said of the others."""

from __future__ import annotations

import os

import pytest

from rpcdataloader.host import trust
from rpcdataloader.host.trust import find_flaw, identify

STRANGER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of other users")


@pytest.fixture
def make(tmp_path):
    """Make a folder below the test's own; gives its path."""

    def make(name, mode=0o755, uid=None):
        path = tmp_path / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        if uid is not None:
            os.chown(path, uid, uid)
        return str(path)

    return make


def test_folder_of_this_user_is_safe_also_below_a_sticky_one(make):
    make("shared", 0o1777)
    assert find_flaw(make("shared/project"), {}) is None


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_folder_that_others_can_write_to_is_not_safe(make, mode):
    assert find_flaw(make("project", mode), {}).startswith("it is writable by others than user ")


def test_folder_above_counts(make):
    above = make("open", 0o777)
    path = make("open/project")
    assert find_flaw(path, {}).startswith(f"{above} is writable by others")
    assert find_flaw(f"{path}/../project", {}).startswith(f"{above} is writable by others")


@needs_root
def test_owner_is_named(make):
    above = make("other", uid=STRANGER)
    assert f"{STRANGER}" in find_flaw(above, {})
    assert find_flaw(make("other/project"), {}).startswith(f"{above} belongs to user ")


@needs_root
def test_group_of_other_users_can_write(make):
    path = make("project", 0o775)
    assert find_flaw(path, {}) is None  # root's own group
    os.chown(path, 0, STRANGER)
    assert find_flaw(path, {}).startswith("it is writable by others")


@needs_root
def test_link_of_another_user_and_what_it_leads_through_count(make, tmp_path):
    shared, project, above = make("shared", 0o1777), make("project"), make("other", uid=STRANGER)
    os.symlink(project, f"{shared}/link")
    assert find_flaw(f"{shared}/link", {}) is None
    os.lchown(f"{shared}/link", STRANGER, STRANGER)
    assert find_flaw(f"{shared}/link", {}).startswith("it belongs to user ")
    (tmp_path / "other" / "back").symlink_to("../project")
    os.symlink(f"{above}/back", tmp_path / "around")
    assert find_flaw(str(tmp_path / "around"), {}).startswith(f"{above} belongs to user ")


def test_folder_of_the_trainer_itself_is_safe_whoever_can_write_to_it(make):
    make("open", 0o777)
    path = make("open/project", 0o777)
    assert find_flaw(path, identify([path, "/no/such/folder"])) is None


def test_another_folder_at_the_same_path_is_not_the_trainer_s(make, tmp_path):
    path = make("project", 0o777)
    trusted = identify([path])
    (tmp_path / "project").rename(tmp_path / "before")
    assert find_flaw(make("project", 0o777), trusted).startswith("it is writable by others")


def test_names_of_mounted_folders_may_hold_anything(make, monkeypatch):
    path = make("project")
    device = os.stat(path).st_dev
    mounts = [
        f"1 0 0:1 / /mnt/{name} rw - fuse.{name} source rw"
        for name in ("a\x0b - b", "a\x1cb", "a\u2028b", "é", "\udcff")
    ]
    mounts.append(f"9 0 {os.major(device)}:{os.minor(device)} / / rw,relatime - nfs4 files:/home rw")
    monkeypatch.setattr(trust, "read", lambda _path: "\n".join(mounts))
    assert identify([path])[path].startswith("nfs4 files:/home ")
