"""A spreadsheet displays the cells of a CSV and executes none."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.toolkit.terminal.csv_text import format_csv


@pytest.mark.parametrize(
    "start", ["=", "+", "-", "@", "\t", "\r", " =", "\n=", "\u202e=", "\x1b[m@", "\x00+", "\uff1d"]
)
def test_a_formula_becomes_text(start: str) -> None:
    [row] = csv.DictReader(io.StringIO(format_csv(["name"], [{"name": f"{start}1+1"}])))
    assert row["name"].startswith("'")


def test_a_header_is_no_formula() -> None:
    assert format_csv(["=1+1", "b"], []) == "'=1+1,b\n"


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_cell_is_one_cell_whatever_the_separator(separator: str) -> None:
    text = format_csv(["name"], [{"name": f"a{separator}=1+1"}])
    rows = csv.reader(io.StringIO(text), delimiter=separator)
    assert [*rows] == [["name"], [f"a{separator}=1+1"]]


def test_numbers_and_missing_values_stay() -> None:
    text = format_csv(["a", "b", "c"], [{"a": -1.5, "b": None, "other": 1}, {"c": "x"}])
    assert text == "a,b,c\n-1.5,,\n,,x\n"


@given(st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), max_size=8), max_size=4))
def test_other_text_is_read_back(values: list[str]) -> None:
    text = format_csv(["name", "end"], [{"name": value, "end": 1} for value in values])
    cells = [row["name"] for row in csv.DictReader(io.StringIO(text))]
    assert [cell.removeprefix("'") for cell in cells] == [v.removeprefix("'") for v in values]
