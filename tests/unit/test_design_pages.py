"""The files and actions that the design page and CONTRIBUTING.md name are those of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rpcdataloader.plan import actions

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text() for path in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("design*.md")]}
FOLDERS = {path.name for path in (ROOT / "rpcdataloader").iterdir() if (path / "__init__.py").exists()}


def missing_files(page: str) -> list[str]:
    """The files and folders of a page that do not exist; a bare name is in the folder of the path before it."""
    missing, folder = [], ROOT
    for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)*(?:\.py|/)|tests/[\w/]+)`", page):
        found = [place / name for place in (ROOT, ROOT / "rpcdataloader") if (place / name).exists()]
        if "/" in name and found:
            folder = found[0].parent
        elif not found and not (folder / name).exists():
            missing.append(name)
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_files_of_page_exist(page):
    assert missing_files(PAGES[page]) == []


def column_of(page: str, title: str) -> list[str]:
    """The names in the first column of the table under this title."""
    (table,) = re.findall(rf"^\| {title} \|.*\n\|[-| ]*\n((?:\|.*\n)+)", PAGES[page], re.MULTILINE)
    return [name for row in table.splitlines() for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]


def test_actions_of_page_are_those_of_the_engine():
    assert sorted(column_of("design.md", "action")) == sorted(kind.__name__ for kind in actions.Action.__args__)


def test_folders_of_the_layout_are_those_of_the_package():
    assert set(column_of("CONTRIBUTING.md", "folder")) == FOLDERS
