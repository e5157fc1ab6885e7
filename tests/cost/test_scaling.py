"""The quantiles that widen a prediction, against SciPy's."""

from __future__ import annotations

import pytest
from scipy import stats
from sm_train.cost import scaling


def test_quantiles_are_those_of_students_t_and_the_normal_distribution() -> None:
    for freedom, quantile in enumerate(scaling._T90, start=1):
        assert quantile == pytest.approx(stats.t.ppf(0.9, freedom), abs=5e-4), freedom
    assert pytest.approx(stats.norm.ppf(0.9), abs=5e-5) == scaling._NORMAL90
