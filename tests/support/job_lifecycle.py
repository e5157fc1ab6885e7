"""Simulates the lifecycle of training jobs, which moto does not.

moto completes every job at once, accepts duplicate names and cannot stop jobs. The jobs here are
moto's own, used through its HTTP server; only their status is set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from moto.backends import get_backend
from sm_train.entrypoints.job_interface.checkpoint_layout import FORMAT_VERSION
from sm_train.entrypoints.job_interface.events import format_event

from tests.conftest import Aws
from tests.support.job_log_lines import event_values

LOG_GROUP = "/aws/sagemaker/TrainingJobs"


class FakeSageMaker:
    """The jobs on ``aws``: new jobs stay ``InProgress`` until their status is set."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        self.before_stop: Callable[[str], None] = lambda name: None
        """Called with a job's name when a request to stop it arrives."""
        aws.responses["CreateTrainingJob"] = self._reject_duplicate
        aws.response_filters["CreateTrainingJob"] = self._start
        aws.responses["StopTrainingJob"] = self._stop

    def _reject_duplicate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if body["TrainingJobName"] in self._jobs(body.get("_region", "us-east-1")):
            return 400, {"__type": "ResourceInUse", "message": "Training job names must be unique"}
        return None

    def _start(self, response: dict[str, Any]) -> dict[str, Any]:
        arn = response["TrainingJobArn"]
        name, region = arn.rsplit("/", 1)[1], arn.split(":")[3]
        self.set_status(name, "InProgress", "Training", region=region)
        return response

    def _jobs(self, region: str) -> dict[str, Any]:
        jobs: dict[str, Any] = get_backend("sagemaker")["345678901234"][region].training_jobs
        return jobs

    def _stop(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name, region = body["TrainingJobName"], body["_region"]
        self.before_stop(name)
        status = self._jobs(region)[name].training_job_status
        if status != "InProgress":
            message = f"The request was rejected because the training job is in status {status}."
            return 400, {"__type": "ValidationException", "message": message}
        self.set_status(name, "Stopping", "Stopping", region=region)
        return 200, {}

    def names(self, region: str = "us-east-1") -> list[str]:
        return list(self._jobs(region))

    def tags(self, name: str, region: str = "us-east-1") -> dict[str, str]:
        return {tag["Key"]: tag["Value"] for tag in self._jobs(region)[name].tags}

    def set_status(
        self,
        name: str,
        status: str,
        secondary: str = "",
        *,
        reason: str | None = None,
        seconds: float = 600.0,
        ended_ago: float = 0.0,
        region: str = "us-east-1",
    ) -> None:
        """Set the status of a job, billed for ``seconds`` until ``ended_ago`` seconds ago."""
        job = self._jobs(region)[name]
        end = datetime.now(UTC) - timedelta(seconds=ended_ago)
        job.training_job_status, job.secondary_status = status, secondary or status
        job.failure_reason = reason
        start = end - timedelta(seconds=seconds)
        job.training_start_time = start.isoformat()
        phases = [("Starting", start - timedelta(minutes=5)), ("Training", start)]
        if job.secondary_status != "Training":
            phases.append((job.secondary_status, end))
        job.secondary_status_transitions = [
            {"Status": phase, "StartTime": began.timestamp(), "StatusMessage": ""}
            for phase, began in phases
        ]
        job.training_end_time = None
        job.billable_time_in_seconds = None
        if status in ("Completed", "Failed", "Stopped"):
            job.training_end_time = end.isoformat()
            job.billable_time_in_seconds = int(seconds)

    def restart(self, name: str, phases: Mapping[str, float], *, region: str = "us-east-1") -> None:
        """Let SageMaker restart a job: ``phases`` are secondary statuses and how long ago each
        began, in seconds; the last one is the job's.
        """
        job = self._jobs(region)[name]
        job.secondary_status = list(phases)[-1]
        job.secondary_status_transitions += [
            {"Status": phase, "StartTime": time.time() - ago, "StatusMessage": ""}
            for phase, ago in phases.items()
        ]

    def log_event(
        self,
        job: str,
        kind: str,
        *,
        ago: float = 5.0,
        node: int = 0,
        region: str = "us-east-1",
        **fields: Any,
    ) -> None:
        """Log an event of a node's first rank, ``ago`` seconds ago."""
        logs = self._aws.client("logs", region)
        if not logs.describe_log_groups(logGroupNamePrefix=LOG_GROUP)["logGroups"]:
            logs.create_log_group(logGroupName=LOG_GROUP)
        stream = f"{job}/algo-{node + 1}-1"
        if not logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=stream)[
            "logStreams"
        ]:
            logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
        at = time.time() - ago
        message = format_event(kind, event_values(kind) | fields, time=at, node=node, rank=8 * node)
        logs.put_log_events(
            logGroupName=LOG_GROUP,
            logStreamName=stream,
            logEvents=[{"timestamp": int(at * 1000), "message": message}],
        )

    def checkpoint(
        self,
        stage: str,
        step: int,
        *,
        run: str = "demo",
        complete: bool = True,
        bucket: str = "ai-bucket",
        platform: str = "sagemaker",
    ) -> None:
        """Store a checkpoint as SageMaker uploads it: complete, or without one of its files."""
        store_checkpoint(
            self._aws, stage, step, run=run, complete=complete, bucket=bucket, platform=platform
        )


def store_checkpoint(
    aws: Aws,
    stage: str,
    step: int,
    *,
    run: str = "demo",
    complete: bool = True,
    bucket: str = "ai-bucket",
    platform: str | None = None,
) -> None:
    """Store a checkpoint in S3: complete, or without one of its files."""
    s3 = aws.client("s3")
    folder = f"{run}/checkpoints/{stage}/step-{step:08d}"
    files = [{"name": name, "bytes": 4, "blake3": "0"} for name in ("a.safetensors", "b.npz")]
    marker: dict[str, Any] = {"format": FORMAT_VERSION, "step": step, "world_size": 1}
    marker |= {"fingerprint": "0", "files": files, "platform": platform}
    s3.put_object(Bucket=bucket, Key=f"{folder}/a.safetensors", Body=b"1234")
    if complete:
        s3.put_object(Bucket=bucket, Key=f"{folder}/b.npz", Body=b"1234")
    s3.put_object(Bucket=bucket, Key=f"{folder}/complete.json", Body=json.dumps(marker).encode())
