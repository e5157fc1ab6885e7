"""Model presets."""

from __future__ import annotations

import pytest
from sm_train.entrypoints.job_interface.job_config import JobConfigError
from sm_train.entrypoints.models.components import read_preset


def test_unknown_preset_lists_known_ones() -> None:
    with pytest.raises(JobConfigError, match="digits, dit-xl, mmdit-20b"):
        read_preset("sd9")
