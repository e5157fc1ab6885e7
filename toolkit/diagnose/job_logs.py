"""The logs of a SageMaker training job, and what only DescribeTrainingJob tells of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sm_train.toolkit.aws.cloudwatch_logs import read_stream, stream_names
from sm_train.toolkit.diagnose.diagnosis import Diagnosis, diagnose, succeeded
from sm_train.toolkit.diagnose.hits import LogStream
from sm_train.toolkit.diagnose.log_files import attempts
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.training_job import describe_job

_NODE = re.compile(r"algo-\d+")
_ENDS = frozenset(
    "Interrupted MaxRuntimeExceeded MaxWaitTimeExceeded MaxPendingTimeExceeded Stopping "
    "Stopped".split()
)
"""Secondary statuses that end a job for a reason of their own; others may be added any time."""
_GOES_ON = frozenset(
    "Starting Restarting Pending LaunchingMLInstances PreparingTrainingStack Downloading "
    "DownloadingTrainingImage Training".split()
)


def diagnose_job(session: Any, job: str) -> Diagnosis:
    """Why the job failed.

    Raises:
        UserError: there is no such job, it has said nothing yet, or AWS refuses.
    """
    streams, description = job_streams(session, job)
    if description["TrainingJobStatus"] == "Completed":
        return succeeded()
    if not streams:
        raise UserError(f"{job}: has said nothing yet ({description['TrainingJobStatus']})")
    *earlier, last = attempts(streams)
    return diagnose(last, earlier)


def job_streams(session: Any, job: str) -> tuple[list[LogStream], dict[str, Any]]:
    """A stream for each of the job's, one for what SageMaker says, and the job's description.

    Raises:
        UserError: there is no such job, or AWS refuses.
    """
    description = describe_job(session, job)
    if description is None:
        raise UserError(
            f"{job}: no file here and no training job of that name in {session.region_name}; see "
            "--region"
        )
    said = list(_sagemaker_lines(description))
    now = datetime.now(UTC).timestamp()
    streams = [_stream(session, name, now) for name in stream_names(session, job)]
    if said:
        content = "".join(f"{line}\n" for line in said).encode()
        streams.append(LogStream("DescribeTrainingJob", lambda: [content], None, now))
    return streams, description


def _stream(session: Any, name: str, now: float) -> LogStream:
    def blocks() -> Iterator[bytes]:
        for page in read_stream(session, name):
            yield "".join(
                f"{_iso(at)} {line}\n" for at, message in page for line in message.splitlines()
            ).encode()

    node = _NODE.search(name.rpartition("/")[2])
    return LogStream(name, blocks, node[0] if node else None, now)


def _sagemaker_lines(description: dict[str, Any]) -> Iterator[str]:
    """The reason of the failure and the statuses that tell of an end, as lines of a log."""
    ends: list[str] = []
    for one in description.get("SecondaryStatusTransitions", []):
        if one["Status"] in _ENDS:
            ends.append(f"{_iso(one['StartTime'].timestamp())} SecondaryStatus: {one['Status']}")
        elif one["Status"] in _GOES_ON:
            # What ended an earlier attempt did not end the job.
            ends.clear()
    yield from ends
    reason = description.get("FailureReason")
    if reason:
        ended = description.get("TrainingEndTime") or description["LastModifiedTime"]
        stamp = _iso(ended.timestamp())
        first, *others = reason.splitlines()
        yield f"{stamp} FailureReason: {first}"
        for line in others:
            # The container quotes the last lines of its program.
            yield f"{stamp} {line.removeprefix('ErrorMessage ').lstrip(chr(34))}"


def _iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
