"""Training jobs that have ended: their log events and their description."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm_train.entrypoints.job_interface.events import format_event

from tests.conftest import Aws, Cli
from tests.support.job_log_lines import event_values

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
BEGIN = round(time.time()) - 86400.0
"""Start of the jobs in Unix seconds: CloudWatch accepts no lines older than 14 days."""


def log_event(kind: str, offset: float, rank: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a CloudWatch log event, ``offset`` seconds after the job's start."""
    content = event_values(kind) | fields
    message = format_event(kind, content, time=BEGIN + offset, node=0, rank=rank)
    return {"timestamp": round((BEGIN + offset) * 1000), "message": message}


def training_events(steps_per_second: float = 1.0) -> list[dict[str, Any]]:
    """Return 400 s of start-up, 500 steps, and a checkpoint of 30 s."""
    start = {
        "resumed_from_step": None,
        "world_size": 32,
        "resolution": 256,
        "effective_batch_size": 512,
        "backend": "nccl",
        "stage": "256px",
    }
    events = [log_event("start", 400, **start), log_event("start", 401, rank=1, **start)]
    seconds = 400.0
    for step in range(100, 600, 100):
        seconds += 100 / steps_per_second
        fields = {"steps_per_second": steps_per_second, "data_wait_share": 0.02}
        events.append(log_event("step", seconds, step=step, **fields))
    end = seconds + 30
    return [*events, log_event("checkpoint", end, seconds=30.0, step=500), log_event("end", end)]


def submit_run(cli: Cli, aws: Aws, run: Path) -> str:
    """Submit the run file and return the job's name."""
    result = cli("submit", run, "--yes", "--json", network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    name: str = json.loads(result.stdout)["training_job_name"]
    return name


def put_log_events(
    aws: Aws, job: str, events: list[dict[str, Any]], stream: str = "algo-1-1"
) -> None:
    """Write the events to a log stream of the job."""
    logs = aws.client("logs")
    if not logs.describe_log_groups(logGroupNamePrefix=LOG_GROUP)["logGroups"]:
        logs.create_log_group(logGroupName=LOG_GROUP)
    logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=f"{job}/{stream}")
    logs.put_log_events(
        logGroupName=LOG_GROUP,
        logStreamName=f"{job}/{stream}",
        logEvents=sorted(events, key=lambda event: event["timestamp"]),
    )


def job_ended(
    seconds: float, status: str = "Completed"
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return an amendment of DescribeTrainingJob: the job was billed for ``seconds``."""

    def amend(response: dict[str, Any]) -> dict[str, Any]:
        return response | {
            "TrainingJobStatus": status,
            "TrainingStartTime": BEGIN,
            "TrainingEndTime": BEGIN + seconds,
            "BillableTimeInSeconds": seconds,
        }

    return amend


def end_jobs(aws: Aws, seconds: float, status: str = "Completed") -> None:
    """Amend every job as :func:`job_ended` does, in Search's results too."""
    amend = job_ended(seconds, status)

    def amend_results(response: dict[str, Any]) -> dict[str, Any]:
        jobs = [result["TrainingJob"] for result in response["Results"]]
        return {"Results": [{"TrainingJob": amend(job)} for job in jobs]}

    aws.response_filters |= {"DescribeTrainingJob": amend, "Search": amend_results}
