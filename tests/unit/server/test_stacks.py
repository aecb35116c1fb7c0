"""The part of a worker's stacks that users see."""

from __future__ import annotations

import faulthandler
import threading

import pytest

from rpcdataloader.server.stacks import arrange


@pytest.mark.parametrize(
    "folder", ["project", "a b=c,d", "rpcdataloader", "séance 日本 \U0001f4be", "\udcff", "x" * 200]
)
def test_frames_are_told_apart_whatever_the_folder_of_the_package_is_called(tmp_path, folder):
    package = tmp_path / folder / "rpcdataloader"
    (package / "server").mkdir(parents=True)
    user, server, other = package.parent / "loader.py", package / "server/worker.py", package / "wire.py"
    user.write_text("def fetch(dump):\n    dump()")
    server.write_text("def serve(call, dump):\n    call(dump)")
    other.write_text("def receive(call, dump):\n    call(dump)")
    functions = {}
    for path in user, server, other:
        exec(compile(path.read_text(), str(path), "exec"), functions)

    def dump_of(call, *args):
        with open(tmp_path / "dump", "w+b") as file:
            call(*args, lambda: faulthandler.dump_traceback(file))
            file.seek(0)
            return file.read().decode("ascii")

    main = threading.get_ident()
    text = arrange(dump_of(functions["serve"], functions["fetch"]), main, str(package)).split("\n\n")[0]
    user, server, other = (str(path).replace("\udcff", r"\udcff") for path in (user, server, other))
    assert text.endswith(f'  File "{user}", line 2 in fetch\n  File "{server}", line 2 in serve')  # and nothing below
    assert f'"{other}"' in arrange(dump_of(functions["receive"], functions["fetch"]), main, str(package))
