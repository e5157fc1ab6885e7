"""Reads the logs of a job on SageMaker, and the facts that only SageMaker reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.aws.cloudwatch_logs import read_stream, stream_names
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.log_streams import JobLogs, LogStream, attempts
from sm_train.toolkit.jobs.training_job import describe_job

if TYPE_CHECKING:
    import boto3

_NODE = re.compile(r"algo-\d+")
_END_STATUSES = frozenset(
    "Interrupted MaxRuntimeExceeded MaxWaitTimeExceeded MaxPendingTimeExceeded Stopping "
    "Stopped".split()
)
"""Secondary statuses that explain why a job ended; AWS may add others at any time."""
_ACTIVE_STATUSES = frozenset(
    "Starting Restarting Pending LaunchingMLInstances PreparingTrainingStack Downloading "
    "DownloadingTrainingImage Training".split()
)


def job_logs(session: boto3.Session, job: str) -> JobLogs:
    """Return the logs of a job, one stream with SageMaker's own messages.

    Raises:
        UserError: the job does not exist, or AWS rejects a request.
    """
    description = describe_job(session, job)
    if description is None:
        raise UserError(
            f"{job}: no such file, and no such training job in {session.region_name}; check "
            "--region"
        )
    lines = list(_sagemaker_lines(description))
    now = datetime.now(UTC).timestamp()
    streams = [_stream(session, name, now) for name in stream_names(session, job)]
    if lines:
        content = "".join(f"{line}\n" for line in lines).encode()
        streams.append(LogStream("DescribeTrainingJob", lambda: [content], None, now))
    *earlier, last = attempts(streams)
    return JobLogs(job, description["TrainingJobStatus"], last, earlier)


def _stream(session: boto3.Session, name: str, now: float) -> LogStream:
    def blocks() -> Iterator[bytes]:
        for page in read_stream(session, name):
            yield "".join(
                f"{_iso(at)} {line}\n" for at, message in page for line in message.splitlines()
            ).encode()

    node = _NODE.search(name.rpartition("/")[2])
    return LogStream(name, blocks, node[0] if node else None, now)


def _sagemaker_lines(description: dict[str, Any]) -> Iterator[str]:
    """Yield the failure reason and the statuses that explain the job's end as log lines."""
    ends: list[str] = []
    for transition in description.get("SecondaryStatusTransitions", []):
        if transition["Status"] in _END_STATUSES:
            time = _iso(transition["StartTime"].timestamp())
            ends.append(f"{time} SecondaryStatus: {transition['Status']}")
        elif transition["Status"] in _ACTIVE_STATUSES:
            # The job was restarted: earlier statuses only ended a previous attempt.
            ends.clear()
    yield from ends
    reason = description.get("FailureReason")
    if reason:
        ended = description.get("TrainingEndTime") or description["LastModifiedTime"]
        stamp = _iso(ended.timestamp())
        first, *others = reason.splitlines()
        yield f"{stamp} FailureReason: {first}"
        for line in others:
            # The container quotes the program's last lines: `ErrorMessage "RuntimeError: …`
            yield f"{stamp} {line.removeprefix('ErrorMessage ').lstrip(chr(34))}"


def _iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
