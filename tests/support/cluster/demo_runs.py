"""The demo's run on several nodes, for tests of clusters other than SageMaker's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sm_train.toolkit
import yaml
from sm_train.entrypoints.job_interface.checkpoint_layout import MARKER, step_folders


def demo_document(nodes: int, max_steps: int) -> dict[str, Any]:
    """Return the demo's run file with a checkpoint every 10 steps; its cluster has no GPUs."""
    preset = Path(sm_train.toolkit.__file__).parent / "presets" / "demo.yaml"
    document: dict[str, Any] = yaml.safe_load(preset.read_text())
    stage = document["stages"][0]
    stage |= {"max_steps": max_steps, "instances": nodes, "per_device_batch_size": 32 // nodes}
    stage["sharding"] = "none"
    del stage["effective_batch_size"]
    document["training"] |= {"log_every": 1, "warmup_steps": 2}
    document["checkpoint"]["every_steps"] = 10
    document["cluster"]["environment"] = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return document


def latest_step(checkpoints: Path) -> int:
    """Return the step of the latest complete checkpoint in a shared folder."""
    complete = [folder for folder in step_folders(checkpoints) if (folder / MARKER).exists()]
    return int(complete[0].name.removeprefix("step-"))
