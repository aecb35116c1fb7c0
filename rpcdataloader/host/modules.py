"""Modules of a training script as archives: the client packs them, and each session unpacks them in its own folder.

An archive is a zip file with one top-level module or package. Its files lie as they do beside the script, so a package
finds its data by the same relative paths. Equal files make equal archives.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import io
import os
import socket
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

# For all modules of a client: they travel to each session of each rank. Larger data belongs on a file system.
MAX_BYTES = 64 << 20

# This session's folder for modules, which its node server removes; and the digests of its modules, by name.
_folder = ""
_installed: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Module:
    """A module or package.

    Attributes:
        name: Top-level name, without a dot.
        digest: SHA-256 of the archive, in hexadecimal digits.
    """

    name: str
    digest: str
    size_bytes: int
    archive: bytes = field(repr=False, compare=False)


def pack(name: str, files: Mapping[str, bytes]) -> Module:
    """Make an archive.

    Args:
        files: Contents by path, which begins with ``name``, such as ``name/__init__.py``.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in sorted(files.items()):
            # A ZipInfo has a constant time instead of the file's.
            archive.writestr(zipfile.ZipInfo(path), content, zipfile.ZIP_DEFLATED, compresslevel=1)
    size_bytes = sum(map(len, files.values()))
    return Module(name, hashlib.sha256(buffer.getvalue()).hexdigest(), size_bytes, buffer.getvalue())


def unpack(module: Module, folder: str) -> None:
    """Write the files of a module into a folder, and nowhere else.

    Raises:
        ValueError: The archive does not match its digest, is too large, or has a path that leads out of the module.
        OSError: A file cannot be written.
    """
    if hashlib.sha256(module.archive).hexdigest() != module.digest:
        raise ValueError(f"the archive of module {module.name} does not match its digest")
    with zipfile.ZipFile(io.BytesIO(module.archive)) as archive:
        members = archive.infolist()
        # No member yields more than its file_size.
        if (size_bytes := sum(member.file_size for member in members)) > MAX_BYTES:
            raise ValueError(f"the archive of module {module.name} has {size_bytes} bytes, more than {MAX_BYTES}")
        for member in members:
            parts = PurePosixPath(member.filename).parts
            if ".." in parts or parts[:1] not in ((module.name,), (f"{module.name}.py",)):
                raise ValueError(f"the archive of module {module.name} has a file {member.filename!r}")
            path = os.path.join(folder, *parts)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(path, "xb") as file:
                file.write(archive.read(member))


def unpack_into(folder: str) -> None:
    """Choose the folder for the modules of this session; it is created on first use."""
    global _folder
    _folder = folder


def install_modules(modules: Iterable[Module]) -> None:
    """Let this process and its forks import modules of the client, before all others of the same name.

    Raises:
        ImportError: A module was imported from elsewhere before.
        ValueError: An archive is malformed.
        OSError: The files cannot be written.
    """
    new = [module for module in modules if _installed.get(module.name) != module.digest]
    for module in new:
        if module.name in sys.modules or module.name in _installed:
            where = getattr(sys.modules.get(module.name), "__file__", None) or "somewhere else"
            raise ImportError(
                f"py_modules: {module.name} comes too late on {socket.gethostname()}, which has imported it from "
                f"{where}: give py_modules to the first dataset or loader of the script that needs it, start the node "
                f"server without --preload {module.name}, or leave it out of py_modules",
                name=module.name,
            )
    if new and not _folder:
        raise FileNotFoundError(f"py_modules: {socket.gethostname()} has no folder for temporary files: set its TMPDIR")
    if new and _folder not in sys.path:
        os.mkdir(_folder, 0o700)
        # Held until the last fork has ended. Cleaners of temporary folders (systemd, tmpfiles.d) spare a locked one;
        # otherwise another user could create it anew, and Python would import modules from there.
        fcntl.flock(os.open(_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH)
        sys.path.insert(0, _folder)
    for module in new:
        unpack(module, _folder)
        _installed[module.name] = module.digest
    importlib.invalidate_caches()
