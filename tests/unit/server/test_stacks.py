"""The part of a worker's stacks that users see."""

from __future__ import annotations

import json

import pytest

from rpcdataloader.server import stacks


@pytest.mark.parametrize(
    "folder", ["project", "a b=c,d", "rpcdataloader", "séance 日本 \U0001f4be", "\udcff", "x" * 200]
)
def test_frames_are_told_apart_whatever_the_folder_of_the_package_is_called(tmp_path, folder, monkeypatch):
    package = tmp_path / folder / "rpcdataloader"
    user, server, other = package.parent / "loader.py", package / "server/worker.py", package / "wire.py"
    functions = {}
    for path, name in (user, "fetch"), (server, "serve"), (other, "receive"):
        exec(compile(f"def {name}(call, *args):\n    return call(*args)", str(path), "exec"), functions)
    monkeypatch.setattr(stacks, "_PACKAGE", str(package))
    serve, fetch, receive = functions["serve"], functions["fetch"], functions["receive"]
    text = serve(fetch, stacks.stacks).split("\n\n")[0]
    user, server, other = (str(path).replace("\udcff", r"\udcff") for path in (user, server, other))
    assert text.endswith(f'  File "{user}", line 2 in fetch\n  File "{server}", line 2 in serve')  # and nothing below
    assert f'"{other}"' in receive(fetch, stacks.stacks)


@pytest.mark.parametrize("letter", ["x", "日", "\U0001f4be"])
def test_long_stacks_are_cut_so_that_a_message_has_room_for_them(letter, monkeypatch):
    monkeypatch.setattr(stacks, "_PACKAGE", "/nowhere")

    def recurse(number):
        return stacks.stacks() if number == 0 else recurse(number - 1)

    recurse.__code__ = recurse.__code__.replace(co_filename=letter * 200)
    text = recurse(300)
    assert text.endswith("... (cut here)")
    assert len(json.dumps(text)) < stacks.MAX_MESSAGE
