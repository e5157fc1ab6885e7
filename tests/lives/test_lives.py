"""Random lives of runs: at most one live job, a budget that holds, and no work that is lost."""

from __future__ import annotations

import pytest

from tests.lives import sagemaker


def test_some_lives_on_sagemaker_break_no_rule() -> None:
    ends = sagemaker.play(range(300))
    # Every way to end is reached; none hangs.
    assert {"OK", "OVER_BUDGET", "JOB_FAILED", "CAPACITY"} >= ends.keys()
    assert ends["OK"] > 50
    assert len(ends) >= 3


@pytest.mark.slow
def test_ten_thousand_lives_on_sagemaker_break_no_rule() -> None:
    sagemaker.play(range(300, 10_300))
