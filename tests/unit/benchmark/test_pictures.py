"""The pictures of the documents and the numbers of the README: drawn from recorded data, the same each time."""

from __future__ import annotations

import json
import re

import pytest

from rpcdataloader.diagnosis.words import WORDS
from tests.benchmark.pictures import __main__ as pictures
from tests.benchmark.pictures import results, waiting
from tests.support.waits import CAUSES

DRAWN = pictures.draw()


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_file_is_what_its_data_say(path):
    assert path.read_text() == DRAWN[path], f"{path.name} differs from its data: run make figures"


def test_numbers_follow_the_recorded_data():
    lost = json.loads((pictures.FOLDER / "losses.json").read_text())
    lost["killed"]["lost"] = 7
    assert f"**7 of {lost['killed']['batches']:,}**" in results.make_numbers(lost)


def test_numbers_of_another_run_are_refused(monkeypatch):
    lost = json.loads((pictures.FOLDER / "losses.json").read_text())
    monkeypatch.setattr(results, "load", lambda: {"float32-tcp": 4.56, "busy": 1.0})
    with pytest.raises(ValueError, match=r"4\.56 in recorded\.json"):
        results.make_numbers(lost)


def test_quotes_are_of_one_real_pass_for_each_bound_in_the_words_of_today():
    waits = json.loads((pictures.FOLDER / "waiting.json").read_text())
    assert tuple(waits) == waiting.NAMES
    assert {one["bound"] for one in waits.values()} == {name.split()[0] for name in WORDS} - {"unclear"}
    for name, one in waits.items():
        assert f"{one['bound']} {one['part']}".strip() == CAUSES[name].bound
        words = WORDS.get(f"{one['bound']} {one['part']}") or WORDS[one["bound"]]
        sentence = ".*".join(map(re.escape, re.split(r"{.*?}", words)))
        assert re.fullmatch(f"step .* without the loader\\. {sentence}", one["text"])


def test_quote_is_put_below_the_heading_of_its_bound():
    found = {"a cause": {"bound": "workers", "text": "New words."}}
    page = "### `workers`\n\nMeaning\nof it.\n\n> Old\n> words.\n\n### `node`\n\n> Other words.\n"
    assert waiting.put_quotes(page, found) == page.replace("> Old\n> words.", "> New words.")
    with pytest.raises(ValueError, match="no section with a quote for the bound workers"):
        waiting.put_quotes("### `workers`\n\n### `node`\n\n> Other words.\n", found)
