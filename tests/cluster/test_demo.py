"""The demonstration learns digits that a classifier of real digits recognizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import clean_environment
from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration


def test_demo_reaches_its_plan(tmp_path: Path) -> None:
    """The steps before the training, whose placeholders are errors of `check`."""
    result = subprocess.run(
        [sys.executable, "-c", "from sm_train.toolkit.demo.__main__ import plan; plan()"],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "packed 1,797 samples" in result.stdout
    assert "Plan for digits" in result.stdout


@pytest.mark.slow
def test_demo_samples_recognizable_digits(tmp_path: Path) -> None:
    """At least 70 % of 300 samples; chance is 10 %."""
    result = subprocess.run(
        [sys.executable, "-m", "sm_train.toolkit.demo"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=5 * DEADLINE,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "300 sampled digits" in result.stdout
    rows = re.findall(r"^step (\d+) +([\d.]+)% +([\d.]+)$", result.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [250, 500, 750, 1000]
    assert float(rows[-1][1]) >= 70, rows
    assert all(float(row[2]) > 0 for row in rows)
    with Image.open(tmp_path / "demo-out" / "demo.png") as picture:
        assert picture.width > 800
