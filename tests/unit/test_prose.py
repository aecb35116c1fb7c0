"""``make lint``: which words are hits, in which parts of a file, and what is counted."""

from __future__ import annotations

import pytest

from tests.prose.__main__ import INSTEAD, examine, find_files, report

MODULE = '''"""A module that nobody reads.

Attributes:
    whole: For messages.
"""

import nobody

text = f"waits for {whoever.name} for ever"  # so
# many
assert text is None


def load(path, limit):
    """Load it.

    Args:
        path: Of the file; kept
            in memory.
        limit (int): Bytes that may be read. ``somebody`` is code.
        *rest: In seconds.

    Returns:
        None: In no case.
    """
'''

PAGE = """# Somebody

A page for [readers](nobody.md), and `whoever` is code.

```python
nobody = "is code"
```
<!-- shall not be counted -->
Nobody
shall read it. Such a list is
none.
"""


def find(text: str, is_python: bool) -> list[tuple[int, str]]:
    return [(hit.line, hit.words) for hit in examine(text, is_python)[1]]


def test_comments_and_strings_of_a_module_are_read_and_its_code_is_not():
    words = [hit for hit in examine(MODULE, True)[1] if not hit.is_entry]
    assert [(hit.line, hit.words) for hit in words] == [(1, "nobody"), (9, "for ever"), (9, "so many")]


def test_entries_without_their_noun_are_found_on_their_lines():
    entries = [hit for hit in examine(MODULE, True)[1] if hit.is_entry]
    assert [(hit.line, hit.words) for hit in entries] == [
        (4, "whole: For messages."),
        (18, "path: Of the file; kept"),
        (21, "*rest: In seconds."),
    ]


def test_the_code_of_a_page_is_neither_searched_nor_counted():
    num_words, hits = examine(PAGE, False)
    assert [(hit.line, hit.words) for hit in hits] == [(1, "Somebody"), (9, "Nobody"), (10, "shall"), (10, "is none")]
    assert num_words == 17


@pytest.mark.parametrize("text", ["a value that is None", "any moreover", "the marshalled call", "is nonetheless"])
def test_words_within_words_are_no_hits(text):
    assert find(text, False) == []


def test_each_hit_names_its_remedy():
    for hit in examine(PAGE, False)[1]:
        assert hit.remedy in INSTEAD.values()


def test_the_report_fails_above_the_limit_and_for_each_entry(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("word " * 1999 + "nobody")
    assert report("documents", [page], most=5.0)
    page.write_text("word " * 1998 + "nobody whoever")
    assert not report("documents", [page], most=5.0)
    assert "page.md:1: 'whoever': name the actor" in capsys.readouterr().out
    module = tmp_path / "module.py"
    module.write_text(MODULE)
    assert not report("package", [module], most=10_000)
    assert "package: 3 entries begin without their noun" in capsys.readouterr().out


def test_the_pages_in_folders_are_among_the_documents():
    found = {path.name for path in find_files(["README.md", "docs/**/*.md", "rpcdataloader/**/*.py"])}
    assert {"README.md", "quickstart.md", "lightning.md", "engine.py"} <= found
