"""The command line that a host is given: what it runs there, and where."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from rpcdataloader import ssh
from rpcdataloader.host.trust import parts_of
from rpcdataloader.ssh import parse_hosts, remote_command, uses_own_secret
from tests.unit.host.test_trust import STRANGER, needs_root


def test_host_file_has_a_host_per_line_with_options_of_its_own():
    text = """
    # machines of the second floor
    node01
    me@node02   --num-workers 8 --register 'my pool'  # the small one

    """
    assert parse_hosts(text) == {"node01": [], "me@node02": ["--num-workers", "8", "--register", "my pool"]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no host"),
        ("# nobody\n\n", "names no host"),
        ("node01\n-oProxyCommand=evil", "line 2 must begin with a host, but begins with -oProxyCommand=evil"),
        ("node01 node02", "line 1 has 'node02' after the host: write one host per line"),
        ("node01\nnode02\nnode01 --port 1", "line 3 names node01 again"),
        ("node01 'x", "line 1 cannot be read: No closing quotation"),
    ],
)
def test_host_file_that_is_not_understood_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["--host", "0.0.0.0", "--port", "0", "--token-file", "-"]),
        (["--port", "6543"], ["--host", "0.0.0.0", "--token-file", "-", "--port", "6543"]),
        (["--host=10.0.0.1"], ["--port", "0", "--token-file", "-", "--host=10.0.0.1"]),
        (["--host", "unix:/x"], ["--token-file", "-", "--host", "unix:/x"]),
        (["--token-file", "t"], ["--host", "0.0.0.0", "--port", "0", "--token-file", "/t"]),
        (["--insecure"], ["--host", "0.0.0.0", "--port", "0", "--insecure"]),
    ],
)
def test_server_listens_everywhere_with_our_secret_unless_options_say_otherwise(options, expected):
    words = shlex.split(remote_command("python", "/", options))
    assert words[words.index("rpcdataloader.launch") + 1 :] == ["--exit-with-stdin", *expected]
    assert uses_own_secret(options) == ("-" not in expected)


def run(python, folder="/", options=(), **more):
    command = remote_command(str(python), str(folder), options)
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, **more)


@pytest.fixture
def python(tmp_path):
    """A stand-in for the interpreter of a host."""
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\npwd\nprintf "<%s>" "$@"\n')
    path.chmod(0o700)
    return path


def test_command_runs_in_no_folder_that_another_user_of_the_host_could_have_made(python, tmp_path):
    folder = tmp_path / "it's a $folder; exit"
    folder.mkdir()
    options = ["--register", "a b'c$d", "--tls-key=key", "--tls-ca", "~/ca", "--preload", "x"]
    done = run(python, folder, options, cwd=folder)
    where, _, words = done.stdout.partition("\n")
    assert where == "/"
    absolute = f"<--register><{folder}/a b'c$d><--tls-key={folder}/key><--tls-ca><~/ca><--preload><x>"
    assert words.endswith(f"<--token-file><->{absolute}")
    assert done.stderr == ""


def test_interpreter_is_found_where_the_command_runs_or_on_the_path(python):
    for name in "./bin/python", "python":
        path = f"{python.parent}:{os.environ['PATH']}"
        done = run(name, python.parent.parent, cwd="/", env={**os.environ, "PATH": path})
        assert done.stdout.startswith("/\n<-m><rpcdataloader.launch>"), done.stderr


def make_shared(folder):
    folder.chmod(0o1777)


def give_away(path):
    os.lchown(path, STRANGER, STRANGER)


def let_group_write(path):
    os.chown(path, 0, STRANGER)
    path.chmod(0o775)


# What another user of the host may have done, to the interpreter or above it; and what is said of it.
FOREIGN = {
    "belongs to user": [
        lambda python: give_away(python),
        lambda python: give_away(python.parent),
        lambda python: give_away(python.parents[1]),
    ],
    "is writable by other users": [
        lambda python: python.chmod(0o777),
        lambda python: python.parent.chmod(0o757),
        lambda python: make_shared(python.parent),
        lambda python: make_shared(python.parents[1]),  # for a pyvenv.cfg
        lambda python: python.parents[2].chmod(0o777),
        lambda python: let_group_write(python.parents[1]),
    ],
}
CHANGES = [(problem, change) for problem, changes in FOREIGN.items() for change in changes]


@pytest.fixture
def host(tmp_path):
    """A machine where an interpreter is, perhaps through links."""
    python = tmp_path / "scratch" / "me" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho runs\n")
    python.chmod(0o755)
    (tmp_path / "work").symlink_to("scratch/../scratch/me")
    (tmp_path / "link").symlink_to(tmp_path / "work" / "venv" / "bin" / "python")
    return tmp_path, python


@pytest.fixture
def elsewhere(monkeypatch):
    """On the machine of the command, nothing is at that path."""
    monkeypatch.setattr(ssh, "parts_of", lambda _path: [])


@needs_root
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("through", ["", "work/venv/bin/python", "link"])
@pytest.mark.parametrize(("problem", "change"), CHANGES)
def test_interpreter_that_another_user_of_the_host_could_have_put_there_is_not_started(host, through, problem, change):
    folder, python = host
    path = folder / through if through else python
    assert run(path).stdout == "runs\n"
    change(python)
    done = run(path)
    assert (done.stdout, done.returncode) == ("", 126)
    assert problem in done.stderr
    assert f"{path} is not started" in done.stderr


@needs_root
@pytest.mark.usefixtures("elsewhere")
def test_shared_folder_further_up_is_passed_unless_a_link_in_it_is_another_users(host):
    folder, _python = host
    path = folder / "work" / "venv" / "bin" / "python"
    make_shared(folder)
    make_shared(folder / "scratch")
    assert run(path).stdout == "runs\n"
    give_away(folder / "work")
    assert f"{folder}/work belongs to user" in run(path).stderr


@needs_root
def test_interpreter_of_colleagues_is_started_where_it_is_theirs_as_here(host, monkeypatch):
    _folder, python = host
    let_group_write(python.parents[1])
    give_away(python)
    assert run(python).stdout == "runs\n"
    here = list(parts_of(str(python)))
    os.chown(python, STRANGER - 1, STRANGER)
    monkeypatch.setattr(ssh, "parts_of", lambda _path: here)
    assert f"{python} belongs to user {STRANGER - 1}" in run(python).stderr


def test_folder_where_everyone_can_write_is_as_unsafe_here(host):
    _folder, python = host
    make_shared(python.parents[1])
    assert f"{python.parents[1]} is writable by other users" in run(python).stderr


def test_interpreter_that_is_missing_is_named(tmp_path):
    done = run(tmp_path / "python")
    assert (done.returncode, done.stderr) == (127, f"there is no {tmp_path}/python\n")
