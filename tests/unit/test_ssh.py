from __future__ import annotations

import shlex
import subprocess

import pytest

from rpcdataloader.ssh import parse_hosts, remote_command, uses_own_secret


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
        (["--token-file", "t"], ["--host", "0.0.0.0", "--port", "0", "--token-file", "t"]),
        (["--insecure"], ["--host", "0.0.0.0", "--port", "0", "--insecure"]),
    ],
)
def test_server_listens_everywhere_with_our_secret_unless_options_say_otherwise(options, expected):
    words = shlex.split(remote_command("python", "/", options))
    assert words[words.index("rpcdataloader.launch") + 1 :] == ["--exit-with-stdin", *expected]
    assert uses_own_secret(options) == (expected.count("-") == 0)


@pytest.mark.parametrize("exists", [True, False])
def test_command_runs_in_the_same_folder_if_there_is_one_whatever_the_words_are(exists, tmp_path):
    folder, python = tmp_path / "it's a $folder; exit", tmp_path / "my python"
    if exists:
        folder.mkdir()
    python.write_text('#!/bin/sh\npwd\nprintf "<%s>" "$@"\n')
    python.chmod(0o700)
    command = remote_command(str(python), str(folder), ["--register", "a b'c$d"])
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    where, _, words = done.stdout.partition("\n")
    assert where == str(folder if exists else tmp_path)
    assert words.endswith("<--register><a b'c$d>")
    assert done.stderr == ""
