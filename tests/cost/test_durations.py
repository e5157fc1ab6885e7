"""Durations of run files and options, in seconds."""

from __future__ import annotations

import pytest
from sm_train.cost.durations import duration_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1.5m", 90), ("2h", 7200), ("5 d", 432_000), ("1w", None), ("h", None)],
)
def test_units_are_those_of_a_clock(text: str, seconds: float | None) -> None:
    assert duration_seconds(text) == seconds
