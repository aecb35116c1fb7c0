"""Files of TLS: which are used, and what is said of those that cannot be."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.wire.tls import TlsFiles, name_files

NAMES = "cert", "key", "ca"


@pytest.fixture
def files(certificates, tmp_path):
    """Of our own, to damage."""
    for name in ("node.pem", "node.key", "ca.pem"):
        shutil.copy(certificates / name, tmp_path)
    return TlsFiles(*(str(tmp_path / name) for name in ("node.pem", "node.key", "ca.pem")))


def test_paths_are_absolute_and_know_the_home_folder(monkeypatch, tmp_path):
    """A session changes to the folder of its client."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/user")
    assert name_files(NAMES, ("node.pem", "~/node.key", "/ca.pem")) == TlsFiles(
        f"{tmp_path}/node.pem", "/home/user/node.key", "/ca.pem"
    )
    with pytest.raises(ValueError, match="cert and ca given without key"):
        name_files(NAMES, ("node.pem", "", "/ca.pem"))


def scribble(path):
    path.write_text("no certificate\n")


@pytest.mark.parametrize(
    ("harm", "name", "problem"),
    [
        (Path.unlink, "cert", "the TLS certificate {} and the key .* cannot be used: No such file or directory"),
        (Path.unlink, "key", "the TLS key {} cannot be used: No such file or directory"),
        (Path.unlink, "ca", "the TLS CA file {} cannot be used: No such file or directory"),
        (scribble, "cert", "the TLS certificate {} and the key .* cannot be used: "),
        (scribble, "key", "the TLS certificate .* and the key {} cannot be used: "),
        (scribble, "ca", "the TLS CA file {} cannot be used: "),
        (lambda path: path.chmod(0o644), "key", "the TLS key {} is open to other users .mode 0644."),
    ],
)
def test_file_that_cannot_be_used_is_named(files, harm, name, problem):
    path = getattr(files, name)
    harm(Path(path))
    with pytest.raises(AuthenticationError, match=problem.format(re.escape(path))):
        files.load("server")


def test_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(files, certificates):
    shutil.copy(certificates / "locked.key", files.key)
    with pytest.raises(AuthenticationError, match=r"the TLS key .*node.key is protected by a passphrase"):
        files.load("server")
