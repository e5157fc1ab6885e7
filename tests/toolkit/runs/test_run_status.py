"""The status of a run in a folder of this machine, as `status` and the Python API read it."""

from __future__ import annotations

from pathlib import Path

from sm_train.toolkit.platforms.find_run import find_run
from sm_train.toolkit.runs.run_status import read_status

from tests.lives.local import STAGE, Life


def test_a_local_run_costs_nothing_and_has_no_region(tmp_path: Path) -> None:
    life = Life(0, tmp_path / "demo")
    state = life.play()
    status = read_status(find_run(str(tmp_path / "demo"), {"region": None, "profile": None}))
    assert state in ("done", "training", "stalled", "stopped", "failed", "starting")
    assert (status.region, status.spent_usd) == (None, 0.0)
    assert [stage.name for stage in status.stages] == [STAGE]
    assert status.stages[0].checkpoint_step == life.stored
