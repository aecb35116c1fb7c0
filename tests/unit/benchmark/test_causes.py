"""The tables of ``docs/waiting-verdicts.md`` have the rows and columns that ``tests.benchmark.causes`` prints."""

from __future__ import annotations

import pytest

from tests.benchmark.causes import HEADER, HEADER_OF_POOLS
from tests.benchmark.pictures.results import read_table
from tests.integration.waits import CAUSES, POOLS


@pytest.mark.parametrize(
    ("table", "header", "names"),
    [("waiting-causes", HEADER, CAUSES), ("waiting-pools", HEADER_OF_POOLS, POOLS)],
    ids=["causes", "pools"],
)
def test_table_is_that_of_the_command(table, header, names):
    rows = read_table(table)
    assert [list(row) for row in rows] == [header] * len(names)
    assert [row[header[0]] for row in rows] == list(names)
