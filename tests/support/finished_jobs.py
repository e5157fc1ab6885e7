"""Jobs that have ended: what they said, and what SageMaker says of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.events import FIELDS, format_event

from tests.conftest import Aws, Cli

GROUP = "/aws/sagemaker/TrainingJobs"
BEGIN = round(time.time()) - 86400.0
"""CloudWatch takes no lines older than 14 days."""


def event(kind: str, at: float, rank: int = 0, **fields: Any) -> dict[str, Any]:
    content = dict.fromkeys(FIELDS[kind], 1) | fields
    message = format_event(kind, content, time=BEGIN + at, node=0, rank=rank)
    return {"timestamp": round((BEGIN + at) * 1000), "message": message}


def life(its: float = 1.0) -> list[dict[str, Any]]:
    """400 s of start-up, then 500 steps at ``its``, a checkpoint of 30 s, 70 s of shutting down."""
    start = {
        "resumed_from_step": None,
        "world_size": 32,
        "resolution": 256,
        "effective_batch_size": 512,
        "backend": "nccl",
        "stage": "256px",
    }
    found = [event("start", 400, **start), event("start", 401, rank=1, **start)]
    clock = 400.0
    for number in range(100, 600, 100):
        clock += 100 / its
        found.append(event("step", clock, step=number, steps_per_second=its, data_wait_share=0.02))
    found += [event("checkpoint", clock + 30, seconds=30.0, step=500), event("end", clock + 30)]
    return found


def submit(cli: Cli, aws: Aws, run: Path) -> str:
    result = cli("submit", run, "--yes", "--json", network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    name: str = json.loads(result.stdout)["training_job_name"]
    return name


def say(aws: Aws, job: str, events: list[dict[str, Any]], stream: str = "algo-1-1") -> None:
    logs = aws.client("logs")
    if not logs.describe_log_groups(logGroupNamePrefix=GROUP)["logGroups"]:
        logs.create_log_group(logGroupName=GROUP)
    logs.create_log_stream(logGroupName=GROUP, logStreamName=f"{job}/{stream}")
    logs.put_log_events(
        logGroupName=GROUP,
        logStreamName=f"{job}/{stream}",
        logEvents=sorted(events, key=lambda one: one["timestamp"]),
    )


def billed(seconds: float, status: str = "Completed") -> Any:
    def amend(answer: dict[str, Any]) -> dict[str, Any]:
        return answer | {
            "TrainingJobStatus": status,
            "TrainingStartTime": BEGIN,
            "TrainingEndTime": BEGIN + seconds,
            "BillableTimeInSeconds": seconds,
        }

    return amend
