"""A folder that only the trainer's machine has is not used on a node, where another user may have made it."""

from __future__ import annotations

import os

import pytest

SCRIPT = """
import ctypes, subprocess, sys
from pathlib import Path
from rpcdataloader import RPCDataset

address, folder = sys.argv[1:]
# CLONE_NEWNS: from here on, this process has its own disks, as on another machine.
if ctypes.CDLL(None).unshare(0x20000):
    sys.exit(77)
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
Path(folder, "samples_of_mine.py").write_text("def samples():\\n    return ['mine']\\n")
sys.path.insert(0, folder)
import samples_of_mine

assert samples_of_mine.samples() == ["mine"]
print(RPCDataset([address], samples_of_mine.samples)[0])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of other users, and mount file systems")
def test_module_of_another_user_at_the_trainer_s_path_is_not_imported(zygote, shared_server, tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "samples_of_mine.py").write_text("def samples():\n    return ['of a stranger']\n")
    os.chown(folder, 65534, 65534)
    ended = zygote.start(SCRIPT, shared_server.address, folder, ends_quickly=True).wait(60)
    if ended.status == 77:
        pytest.skip("this system has no mount namespaces")
    assert "of a stranger" not in ended.output
    # A warning, and a note of the error.
    assert ended.errors.count(f"{folder} is not used, as it belongs to user ") == 2
    assert "No module named 'samples_of_mine'" in ended.errors
