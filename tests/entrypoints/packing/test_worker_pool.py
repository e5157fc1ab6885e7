"""Processes that pack: what each of them has of the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sm_train.entrypoints.packing.worker_pool import run_tasks


def note_gpu(path: Path, _: object) -> None:
    """Write down which GPUs this process sees, and wait until as many others have, too."""
    path.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    limit = time.monotonic() + 60
    while len(list(path.parent.iterdir())) < 2:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_each_process_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    list(run_tasks(note_gpu, [tmp_path / "a", tmp_path / "b"], 2, ["4", "7"]))
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["4", "7"]
