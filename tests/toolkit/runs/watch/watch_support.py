"""Helpers of the tests of watch, which other tests use as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Aws, Cli
from tests.toolkit.runs.run_lifecycle_support import FIRST, Laptop

STEP = {"steps_per_second": 1.8, "loss": 0.25, "data_wait_share": 0.02, "mfu": 0.41}


@pytest.fixture
def laptop(cli: Cli, aws: Aws, tmp_path: Path) -> Laptop:
    return Laptop(cli, aws, tmp_path, budget={"usd": 500})


def train(laptop: Laptop, *, steps: int = 30) -> None:
    """Log half an hour of a job on four nodes; the last is slow and its heartbeat is late."""
    log_event = laptop.sagemaker.log_event
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=1800)
    log_event(FIRST, "start", ago=1700)
    for number in range(steps):
        log_event(
            FIRST,
            "step",
            ago=1500 - 1500 / steps * number,
            step=10 + 20 * number,
            **STEP | {"loss": 1.0 / (1 + number)},
        )
    log_event(FIRST, "checkpoint", ago=400, step=400)
    for node in range(4):
        slow = [{"rank": 24, "node": 3, "busy_seconds": 0.7, "ratio": 1.4}]
        log_event(
            FIRST,
            "heartbeat",
            ago=20 if node < 3 else 700,
            node=node,
            step=590,
            seconds_since_step=2.0,
        )
        log_event(
            FIRST,
            "node",
            ago=30,
            node=node,
            ranks=[],
            stragglers=None if node else slow,
            data_wait_share_max=0.02,
            gpu_utilization_mean=98.0 - node,
            gpu_utilization_min=90.0,
            gpu_memory_used_max=61 * 2**30,
        )
    log_event(FIRST, "warning", ago=60, node=1, code="bad-sample", message="3 samples were skipped")
