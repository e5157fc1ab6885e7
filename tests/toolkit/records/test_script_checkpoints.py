"""What the laptop sees of a run with its own script: checkpoints of any name, and its end."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sm_train.entrypoints.job_interface.checkpoint_layout import CheckpointFile, CheckpointMarker
from sm_train.toolkit.records.checkpoints import StoredCheckpoint, local_checkpoints
from sm_train.toolkit.records.live_state import Progress
from sm_train.toolkit.records.stage_state import stage_state

from tests.toolkit.runs.remediation_support import job


def save(folder: Path, name: str, step: int, *, size: int = 3, marked: bool = True) -> None:
    (folder / name / "part").mkdir(parents=True)
    (folder / name / "part" / "0.bin").write_bytes(b"abc"[:size])
    file = CheckpointFile("part/0.bin", 3, "")
    if marked:
        marker = CheckpointMarker(step, 1, "accelerate", (file,))
        (folder / name / "complete.json").write_text(marker.to_json())


def test_newest_complete_checkpoint_is_found_by_its_step(tmp_path: Path) -> None:
    save(tmp_path, "checkpoint-9", 9)
    save(tmp_path, "checkpoint-10", 10)
    save(tmp_path, "checkpoint-11", 11, size=2)
    save(tmp_path, "checkpoint-12", 12, marked=False)
    save(tmp_path, "runs/epoch_1", 700)
    stored = local_checkpoints(tmp_path)
    assert (stored.step, stored.name, stored.final) == (700, "runs/epoch_1", False)
    assert stored.skipped == (("checkpoint-11", "part/0.bin has the wrong size"),)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "model.txt").touch()
    assert local_checkpoints(tmp_path).final


def test_damaged_marker_is_skipped(tmp_path: Path) -> None:
    save(tmp_path, "checkpoint-1", 1)
    save(tmp_path, "checkpoint-2", 2)
    (tmp_path / "checkpoint-2" / "complete.json").write_text(json.dumps({"format": 99}))
    stored = local_checkpoints(tmp_path)
    assert (stored.step, stored.name) == (1, "checkpoint-1")


@pytest.mark.parametrize(
    ("stored", "ended", "own_script", "state"),
    [
        # The script's last checkpoint may be older than its end, or there is none.
        (StoredCheckpoint(500, (), final=True), None, True, "done"),
        (StoredCheckpoint(None, (), final=True), None, True, "done"),
        (StoredCheckpoint(500, (), final=False), "done", True, "done"),
        (StoredCheckpoint(1000, (), final=False), None, True, "done"),
        (StoredCheckpoint(None, (), final=False, output=True), None, True, "done"),
        # A job that got SIGTERM completes early, and leaves no final folder.
        (StoredCheckpoint(500, (), final=False), "sigterm", True, "stopped"),
        (StoredCheckpoint(500, (), final=False), None, True, "stopped"),
        (StoredCheckpoint(None, (), final=False), "done", True, "no-results"),
        (StoredCheckpoint(500, (), final=True), "done", False, "stopped"),
        (StoredCheckpoint(1000, (), final=False), None, False, "done"),
        (StoredCheckpoint(None, (), final=True), None, False, "done"),
        (StoredCheckpoint(None, (), final=False), "done", False, "no-results"),
        (
            StoredCheckpoint(None, (("step-00001000", "no marker"),), final=False),
            None,
            False,
            "no-results",
        ),
    ],
)
def test_completed_job_is_done_only_with_evidence(
    stored: StoredCheckpoint, ended: str | None, own_script: bool, state: str
) -> None:
    stage = stage_state(
        "256px",
        1000,
        [job(1, "Completed")],
        stored,
        Progress(ended=ended),
        now=datetime.now(UTC),
        stall_after=60,
        own_script=own_script,
    )
    assert stage.state == state
