from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import INSECURE_SECRET, Credentials, client_credentials, load_credentials

TOKEN = "a secret of 25 characters"


@pytest.fixture(autouse=True)
def no_secret_from_outside(monkeypatch):
    for name in ("TOKEN", "TOKEN_FILE", "INSECURE"):
        monkeypatch.delenv(f"RPCDATALOADER_{name}", raising=False)


@pytest.fixture
def environ(tmp_path):
    return {"HOME": str(tmp_path)}


@pytest.fixture
def default_file(tmp_path):
    return tmp_path / ".config" / "rpcdataloader" / "token"


def write(path, text=TOKEN, mode=0o600):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_sources_are_tried_in_the_documented_order(tmp_path, environ, default_file):
    argument_file = write(tmp_path / "argument", "from the argument file")
    variable_file = write(tmp_path / "variable", "from the variable file")
    write(default_file, "from the default file")
    environ["RPCDATALOADER_TOKEN_FILE"] = str(variable_file)
    environ["RPCDATALOADER_TOKEN"] = "from the environment"

    def load(*args, **kwargs):
        found = load_credentials(*args, environ=environ, **kwargs)
        assert not found.insecure
        return found.secret, found.source

    assert load(token_file=argument_file) == (b"from the argument file", f"file {argument_file}")
    assert load() == (b"from the variable file", f"file {variable_file}")
    del environ["RPCDATALOADER_TOKEN_FILE"]
    assert load() == (b"from the environment", "environment variable RPCDATALOADER_TOKEN")
    del environ["RPCDATALOADER_TOKEN"]
    assert load() == (b"from the default file", f"file {default_file}")


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ("", "is empty; create it with"),
        (" \n\t", "is empty; create it with"),
        ("fifteen letters", "is shorter than 16 characters; create it with"),
        ("x" * 4097, "is longer than 4096 characters; create it with"),
        (INSECURE_SECRET.decode(), "is the public one of --insecure; create it with"),
    ],
    ids=["empty", "blank", "short", "long", "insecure"],
)
def test_useless_secret_is_refused_wherever_it_comes_from(token, problem, environ, tmp_path):
    path = write(tmp_path / "token", token)
    with pytest.raises(AuthenticationError, match=rf"the secret \(file {path}\) {problem}"):
        load_credentials(token_file=path, environ=environ)
    environ["RPCDATALOADER_TOKEN"] = token
    for _ in range(2):  # once taken out of the environment, it is still wrong
        with pytest.raises(AuthenticationError, match=rf"variable RPCDATALOADER_TOKEN\) {problem}"):
            load_credentials(environ=environ)


def give_away(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


# Files of TLS and registers of node servers are read by the same function.
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        *((lambda path, mode=mode: path.chmod(mode), rf"is open .*mode {mode:04o}\): run chmod 600, or set .*_FILE to")
          for mode in (0o640, 0o604, 0o620, 0o602, 0o610, 0o601)),
        (give_away, "belongs to user 12345, or set RPCDATALOADER_TOKEN_FILE to another"),
        (make_pipe, "is not a regular file, or set RPCDATALOADER_TOKEN_FILE to"),
        (Path.unlink, "does not exist; create it with"),
    ],
)  # fmt: skip
def test_file_that_others_may_know_or_that_is_none_is_refused_with_what_to_do(spoil, problem, environ, tmp_path):
    path = write(tmp_path / "token")
    environ["RPCDATALOADER_TOKEN_FILE"] = str(path)
    assert load_credentials(environ=environ).secret == TOKEN.encode()
    spoil(path)
    with pytest.raises(AuthenticationError, match=f"the token file {path} {problem}"):
        load_credentials(environ=environ)


@pytest.mark.parametrize("home", ["/proc", "file", "missing"])
def test_home_that_takes_no_file_is_refused_with_what_to_do(home, environ, tmp_path):
    write(tmp_path / "file", "not a directory")
    environ["HOME"] = str(tmp_path / home)  # "/proc" is absolute and stays alone
    with pytest.raises(AuthenticationError, match=r"cannot be (read|created): .* set RPCDATALOADER_TOKEN_FILE to"):
        load_credentials(environ=environ)
    assert not (tmp_path / "missing").exists()


# ---------------------------------------------------------------------------------------------------- creation


def test_file_is_created_on_first_use_for_its_owner_alone(environ, default_file):
    old = os.umask(0)
    try:
        first = load_credentials(environ=environ)
    finally:
        os.umask(old)
    assert stat.S_IMODE(default_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(default_file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(default_file.parent.parent.stat().st_mode) == 0o700
    assert list(default_file.parent.iterdir()) == [default_file]
    assert len(first.secret) == 43
    assert first.source == f"file {default_file}"
    assert load_credentials(environ=environ) == first


def test_many_that_race_to_create_the_secret_get_the_same_one(environ, default_file):
    """As the processes of a job do, on several machines."""
    both = threading.Barrier(32)

    def load(_number):
        both.wait()
        return load_credentials(environ=environ).secret

    with ThreadPoolExecutor(32) as executor:
        found = set(executor.map(load, range(32)))
    assert found == {default_file.read_bytes().strip()}
    assert list(default_file.parent.iterdir()) == [default_file]


def test_secret_is_in_no_text_that_describes_it():
    found = Credentials(TOKEN.encode(), "argument")
    for text in (repr(found), str(found), f"{found}", found.fingerprint, repr([found])):
        assert TOKEN not in text
    assert repr(found) == "Credentials(source='argument')"


# ---------------------------------------------------------------------------------------------------- insecure mode


@pytest.mark.parametrize("value", [None, "1"])
def test_client_goes_without_a_secret_only_where_it_was_told_to(value, environ, default_file):
    if value is not None:
        environ["RPCDATALOADER_INSECURE"] = value
    found = client_credentials(Address("node01", 6543), environ)
    is_told = value is not None
    assert (found.insecure, found.source == "insecure", found.secret == INSECURE_SECRET) == (is_told,) * 3
    assert default_file.exists() is not is_told


@pytest.mark.parametrize("value", ["", "0"])
def test_other_values_of_the_insecure_variable_are_refused(value, environ):
    environ["RPCDATALOADER_INSECURE"] = value
    with pytest.raises(ValueError, match=f"RPCDATALOADER_INSECURE is '{value}'; set it to 1, or unset it"):
        client_credentials(Address("node01", 6543), environ)
