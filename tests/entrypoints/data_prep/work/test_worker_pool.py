"""Worker processes: which GPUs they see, and that they run every task."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sm_train.entrypoints.data_prep.work.worker_pool import run_tasks

from tests.support.deadline import DEADLINE


def write_visible_gpus(path: Path, *_: object) -> None:
    """Write which GPUs this process sees, and wait until the other process has done so."""
    path.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    limit = time.monotonic() + DEADLINE
    while len(list(path.parent.iterdir())) < 2:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_each_process_gets_its_own_gpu(tmp_path: Path) -> None:
    list(run_tasks(write_visible_gpus, [tmp_path / "a", tmp_path / "b"], 2, 1, ["4", "7"]))
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["4", "7"]


def test_all_tasks_run_when_they_are_faster_than_the_reports(tmp_path: Path) -> None:
    """All tasks that were started end while the caller draws the progress."""
    paths = [tmp_path / str(number) for number in range(8)]
    for _ in run_tasks(touch, paths, 2, 1):
        time.sleep(0.5)
    assert sorted(tmp_path.iterdir()) == paths


def touch(path: Path, *_: object) -> None:
    path.touch()
