"""A picture of the live page in a real browser, while two nodes prepare images and one worker has been killed.

The nodes are names of the loopback interface, in namespaces that end with the recording, which takes root and chromium.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader, RPCDataset
from tests.support.browser import open_tab

ROOT = Path(__file__).resolve().parents[3]
_NODES = ("node01", "node02")
_HISTORY_SECONDS = 60.0  # that the page has seen
_WIDTH = 1000


class Images(Dataset[torch.Tensor]):
    """Images that take their time, and no CPU."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.008 + 0.004 * torch.rand(()).item())
        return torch.zeros(3, 64, 64)


def record(path: Path) -> None:
    """Run it all in namespaces of its own, and write the picture.

    Raises:
        OSError: This user may not make namespaces.
    """
    if os.getuid() != 0:
        raise OSError("a picture of the page is made in namespaces: run it as root")
    namespaces = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    subprocess.run([*namespaces, sys.executable, "-m", __name__, str(path)], cwd=ROOT, check=True)


def _take(path: Path, folder: Path) -> None:
    for command in ["ip", "link", "set", "lo", "up"], ["hostname", "gpu01"]:
        subprocess.run(command, check=True)
    names = "".join(f"127.0.0.{10 + number} {name}\n" for number, name in enumerate(("gpu01", *_NODES)))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)
    os.environ.update({"HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})

    def start(module: str, *arguments: str) -> str:
        """Start a command; returns the line that it prints when it is ready."""
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, text=True)
        assert process.stdout is not None
        return process.stdout.readline()

    for name in _NODES:
        start("rpcdataloader.launch", "--host", name, "--num-workers", "8")
    addresses = [f"{name}:6543" for name in _NODES]
    served = start("rpcdataloader.status", *addresses, "--serve", "0").split()
    loader = RPCDataloader(RPCDataset(addresses, Images), batch_size=16, num_workers=16)
    with open_tab(folder / "profile") as tab:
        size = {"width": _WIDTH, "height": 1400, "deviceScaleFactor": 1, "mobile": False}
        tab.send("Emulation.setDeviceMetricsOverride", **size)
        tab.open(served[2])
        end, is_killed = time.monotonic() + _HISTORY_SECONDS, False
        for _batch in loader:
            time.sleep(0.006)  # the training step
            left = end - time.monotonic()
            if left < _HISTORY_SECONDS / 4 and not is_killed:
                tab.run("document.querySelector('.cell').focus()")
                os.kill(int(re.findall(r"\(pid (\d+)\)", tab.text("#detail"))[0]), signal.SIGKILL)
                is_killed = True
            if left < 0:
                bottom = tab.run("scrollY + document.querySelector('main').getBoundingClientRect().bottom")
                clip = {"x": 0, "y": 0, "width": _WIDTH, "height": bottom + 20, "scale": 1}
                taken = tab.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
                path.write_bytes(base64.b64decode(taken["data"]))
                break


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="rpcdl-page-") as name:
        _take(Path(sys.argv[1]), Path(name))
