from __future__ import annotations

import pytest

from tests.benchmark.table import format_number, format_ratio, format_spread, format_table


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (123456.7, "123,457")]
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert format_number(value) == text


def test_spread_is_shown_where_there_is_one():
    assert format_spread([3.0], 3.0) == "3.00"
    assert format_spread([3.0, 1.0, 20.0], 3.0) == "3.00 (1.00 to 20.0)"


def test_ratio_that_is_not_there_is_a_dash():
    assert (format_ratio(1.349), format_ratio(None)) == ("1.35", "-")


def test_labels_stand_left_and_numbers_right():
    assert format_table(["what", "n"], [["a", "1"], ["long one", "1,000"]], 1) == (
        "| what     |     n |\n| -------- | ----: |\n| a        |     1 |\n| long one | 1,000 |"
    )


def test_row_with_too_few_cells_is_refused():
    with pytest.raises(ValueError, match="a row of 1 cells under 2 titles"):
        format_table(["what", "n"], [["a"]], 1)
