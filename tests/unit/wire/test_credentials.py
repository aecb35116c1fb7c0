from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import (
    INSECURE_SECRET,
    Credentials,
    client_credentials,
    load_credentials,
    receive_credentials,
)

TOKEN = "a secret of 25 characters"
TCP, UNIX = Address("node01", 6543), Address(path="/run/socket")


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


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666])
def test_file_that_is_open_to_others_is_refused(mode, environ, default_file):
    write(default_file, mode=mode)
    with pytest.raises(AuthenticationError, match=rf"{default_file} is open .*mode {mode:04o}\): run chmod 600"):
        load_credentials(environ=environ)
    default_file.chmod(0o600)
    assert load_credentials(environ=environ).secret == TOKEN.encode()


def test_file_of_another_user_is_refused(monkeypatch, environ, default_file):
    write(default_file)
    if os.geteuid() == 0:
        os.chown(default_file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(AuthenticationError, match=r"belongs to user \d+, or set RPCDATALOADER_TOKEN_FILE to another"):
        load_credentials(environ=environ)


@pytest.mark.usefixtures("nothing_left")
def test_what_is_not_a_regular_file_is_refused_without_waiting(environ, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (tmp_path, pipe, Path("/dev/null")):
        environ["RPCDATALOADER_TOKEN_FILE"] = str(path)
        with pytest.raises(
            AuthenticationError, match=f"{path} is not a regular file, or set RPCDATALOADER_TOKEN_FILE to"
        ):
            load_credentials(environ=environ)


def test_named_file_that_is_missing_is_refused_and_not_created(environ, tmp_path):
    environ["RPCDATALOADER_TOKEN_FILE"] = str(path := tmp_path / "missing")
    with pytest.raises(AuthenticationError, match=f"{path} does not exist; create it with"):
        load_credentials(environ=environ)
    assert not path.exists()


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


# In a fresh interpreter, which has one thread and can be forked. The processes wait for the end of a pipe, so that they
# start at once.
RACE = """
import os
from rpcdataloader.wire.credentials import load_credentials

start, never_written = os.pipe()
for _ in range(64):
    if os.fork() == 0:
        os.close(never_written)
        os.read(start, 1)
        try:
            line = load_credentials().secret.decode()
        except BaseException as error:
            line = repr(error)
        os.write(1, line.encode() + b"\\n")
        os._exit(0)
os.close(never_written)
for _ in range(64):
    os.wait()
"""


@pytest.mark.parametrize("attempt", range(3))
def test_64_processes_racing_to_create_the_secret_get_the_same_one(attempt, environ, default_file):  # noqa: ARG001
    environ = {**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    raced = subprocess.run([sys.executable, "-c", RACE], check=True, stdout=subprocess.PIPE, text=True, env=environ)
    secret = default_file.read_text().strip()
    assert len(secret) == 43
    assert raced.stdout.splitlines() == [secret] * 64
    assert stat.S_IMODE(default_file.stat().st_mode) == 0o600
    assert list(default_file.parent.iterdir()) == [default_file]


def test_secret_is_in_no_text_that_describes_it():
    found = Credentials(TOKEN.encode(), "argument")
    for text in (repr(found), str(found), f"{found}", found.fingerprint, repr([found])):
        assert TOKEN not in text
    assert repr(found) == "Credentials(source='argument')"


# ---------------------------------------------------------------------------------------------------- insecure mode


@pytest.mark.parametrize("address", [TCP, UNIX])
@pytest.mark.parametrize("insecure", [False, True])
def test_client_goes_without_a_secret_only_where_it_was_told_to(address, insecure, environ, default_file):
    if insecure:
        environ["RPCDATALOADER_INSECURE"] = "1"
    found = client_credentials(address, environ)
    assert found.insecure == insecure
    assert (found.secret == INSECURE_SECRET) == insecure
    assert (found.source == "insecure") == insecure
    assert default_file.exists() == (not insecure)


@pytest.mark.parametrize("value", ["", "0", "yes", "tcp"])
def test_other_values_of_the_insecure_variable_are_refused(value, environ):
    environ["RPCDATALOADER_INSECURE"] = value
    with pytest.raises(ValueError, match=f"RPCDATALOADER_INSECURE is '{value}'; set it to 1, or unset it"):
        client_credentials(UNIX, environ)


def receive(data):
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, data)
        os.close(write_end)
        return receive_credentials(read_end), os.read(read_end, 100)
    finally:
        os.close(read_end)


def test_first_line_of_a_pipe_is_the_secret_and_the_rest_stays_there():
    found, rest = receive(f"{TOKEN}\nmore".encode())
    assert (found, rest) == (Credentials(TOKEN.encode(), "standard input"), b"more")
