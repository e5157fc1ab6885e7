"""Tests of ``sm-train diagnose``: local files and folders, and jobs on a simulated AWS."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Aws, Cli
from tests.support.log_lines import DONE, HEALTHY

REGION = {"AWS_DEFAULT_REGION": "us-east-1"}
GROUP = "/aws/sagemaker/TrainingJobs"
NOW = round(time.time())
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 is full"
REMOTE = (
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
)
KEYS = {
    "cause",
    "parent",
    "title",
    "confidence",
    "first_failure",
    "retryable",
    "action",
    "evidence",
    "details",
}


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in (*HEALTHY, *lines)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def diagnosed(cli: Cli, *arguments: object, **options: Any) -> dict[str, Any]:
    result = cli("diagnose", *arguments, "--json", **options)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    document: dict[str, Any] = json.loads(result.stdout)
    assert document.keys() == KEYS
    assert document["first_failure"].keys() == {"node", "rank", "time", "line"}
    return document


def test_json_for_plain_and_compressed_files(cli: Cli, tmp_path: Path) -> None:
    log = write(tmp_path / "algo-1.log", REMOTE)
    other = write(tmp_path / "algo-2.log.gz", f"2026-11-21T10:00:00.500Z [rank11]: {OOM}")
    document = diagnosed(cli, log, other)
    assert document["cause"] == "gpu-out-of-memory"
    assert document["confidence"] == "high"
    assert document["retryable"] is False
    assert document["first_failure"] == {
        "node": "algo-2",
        "rank": 11,
        "time": "2026-11-21T10:00:00.500+00:00",
        "line": OOM,
    }
    assert document["evidence"][0]["source"] == f"{other}:{len(HEALTHY) + 1}"
    assert document["evidence"][1]["line"] == REMOTE


def test_folder_reads_all_logs_and_a_local_run_its_latest_stage(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "logs" / "node-1.txt", REMOTE)
    write(tmp_path / "logs" / "deeper" / "node-2.txt", OOM)
    (tmp_path / "logs" / "model.pt").write_bytes(OOM.encode())
    (tmp_path / "logs" / "image").write_bytes(b"\x89PNG\0" + OOM.encode())
    document = diagnosed(cli, tmp_path / "logs")
    assert document["cause"] == "gpu-out-of-memory"
    assert document["first_failure"]["node"] == "node-2"
    assert len(document["evidence"]) == 2
    write(tmp_path / "run" / "256px" / "events.log", "Loss is nan, stopping training")
    write(tmp_path / "run" / "256px" / "checkpoints" / "other.txt", OOM)
    assert diagnosed(cli, tmp_path / "run")["cause"] == "diverged"


def test_file_name_provides_the_rank(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "rank-3.log", OOM)
    write(tmp_path / "rank-4.log", REMOTE)
    first = diagnosed(cli, tmp_path)["first_failure"]
    assert (first["node"], first["rank"]) == (None, 3)


def test_unknown_and_no_failure_have_null_fields(cli: Cli, tmp_path: Path) -> None:
    nothing = {"node": None, "rank": None, "time": None, "line": None}
    for name, line, cause in (("a", REMOTE, "unknown"), ("b", DONE, "no-failure")):
        document = diagnosed(cli, write(tmp_path / f"{name}.log", line))
        assert document["cause"] == cause
        assert document["first_failure"] == nothing
        assert document["confidence"] is document["retryable"] is document["action"] is None
        assert bool(document["evidence"]) == (cause == "unknown")


def test_terminal_output_shows_cause_first_failure_retry_and_fix(cli: Cli, tmp_path: Path) -> None:
    log = write(tmp_path / "algo-1.log", f"[rank3]: {OOM} [bold]not markup[/bold]")
    result = cli("diagnose", log)
    assert result.returncode == 0, result.stderr
    first, second, third, fourth, *_ = result.stdout.splitlines()
    assert first == "The GPU ran out of memory (gpu-out-of-memory, high confidence)"
    # The line has no time; that of the nearest line before it is used.
    assert second == "first failure: algo-1, rank 3, 2026-11-21T10:00:21.512+00:00"
    assert third == "retry: will not help on its own"
    assert fourth.startswith("fix: Lower per_device_batch_size")
    assert f"{log.name}:{len(HEALTHY) + 1}" in result.stdout.replace("\n", "")
    assert "[bold]not markup[/bold]" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["none.log"], "none.log: no such file or folder"),
        (["algo-1.log", "none"], "none: no such file or folder"),
        (["empty"], "empty: contains no log"),
    ],
)
def test_missing_files_are_one_line_and_exit_2(
    cli: Cli, tmp_path: Path, names: list[str], expected: str
) -> None:
    write(tmp_path / "algo-1.log")
    (tmp_path / "empty").mkdir()
    result = cli("diagnose", *names)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert expected in line


def test_run_file_among_logs_and_binary_file_are_refused(cli: Cli, tmp_path: Path) -> None:
    log = write(tmp_path / "algo-1.log", OOM)
    run_file = tmp_path / "run.yaml"
    text = "name: night\nmodel:\n  preset: sd2\ndata:\n  uri: s3://b/p\nstages: []\n"
    run_file.write_text(text)
    renamed = tmp_path / "run.txt"
    renamed.write_text(text)
    binary = tmp_path / "model.pt"
    binary.write_bytes(b"PK\x03\x04\0\0" + OOM.encode())
    for paths, expected in (
        ([log, run_file], f"{run_file}: names a run; name it alone, or log files"),
        ([renamed], f"{renamed}: is a run file, not a log"),
        ([binary], f"{binary}: is not a text file"),
    ):
        result = cli("diagnose", *paths)
        assert result.returncode == 2
        [line] = result.stderr.splitlines()
        assert expected in line


def test_truncated_compressed_log_is_read_to_its_end(cli: Cli, tmp_path: Path) -> None:
    log = write(tmp_path / "algo-1.log.gz", *(f"{REMOTE} {number}" for number in range(9000)))
    log.write_bytes(log.read_bytes()[:-20])
    assert diagnosed(cli, log)["cause"] == "unknown"


# ------------------------------------------------------------------ jobs


def make_job(aws: Aws, status: str, transitions: list[tuple[str, float]], reason: str = "") -> None:
    client = aws.client("sagemaker")
    client.create_training_job(
        TrainingJobName="night-1",
        AlgorithmSpecification={"TrainingInputMode": "File", "TrainingImage": "x"},
        RoleArn="arn:aws:iam::111122223333:role/Train",
        OutputDataConfig={"S3OutputPath": "s3://bucket/"},
        ResourceConfig={"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 1},
        StoppingCondition={"MaxRuntimeInSeconds": 3600},
    )

    def amend(answer: dict[str, Any]) -> dict[str, Any]:
        statuses = [{"Status": name, "StartTime": NOW + at} for name, at in transitions]
        return answer | {
            "TrainingJobStatus": status,
            "SecondaryStatusTransitions": statuses,
            "TrainingEndTime": NOW + 100,
            "FailureReason": reason,
        }

    aws.response_filters["DescribeTrainingJob"] = amend


def put_lines(aws: Aws, stream: str, *lines: str, at: float = 0) -> None:
    """Create a log stream with ``lines``."""
    logs = aws.client("logs")
    if not logs.describe_log_groups(logGroupNamePrefix=GROUP)["logGroups"]:
        logs.create_log_group(logGroupName=GROUP)
    logs.create_log_stream(logGroupName=GROUP, logStreamName=stream)
    events = [
        {"timestamp": round(1000 * (NOW - 3600 + at)) + number, "message": line}
        for number, line in enumerate(lines)
    ]
    logs.put_log_events(logGroupName=GROUP, logStreamName=stream, logEvents=events)


def diagnosed_job(cli: Cli, aws: Aws, *arguments: str) -> dict[str, Any]:
    return diagnosed(cli, "night-1", *arguments, network="loopback", env=aws.environment | REGION)


def test_job_streams_are_read_to_their_ends(cli: Cli, aws: Aws) -> None:
    reason = f'AlgorithmError: ExecuteUserScriptError:\nExitCode 1\nErrorMessage "{OOM}"'
    make_job(aws, "Failed", [("Starting", 0), ("Training", 1), ("Failed", 90)], reason)
    put_lines(aws, "night-1/algo-1-1700000000", *HEALTHY, REMOTE)
    # More events than fit in one page.
    put_lines(aws, "night-1/algo-2-1700000000", *map(str, range(9990)), at=-10)
    many = [*map(str, range(9000)), f"[rank9]: {OOM}"]
    aws.client("logs").put_log_events(
        logGroupName=GROUP,
        logStreamName="night-1/algo-2-1700000000",
        logEvents=[
            {"timestamp": 1000 * NOW + number, "message": line} for number, line in enumerate(many)
        ],
    )
    # Another job whose name starts with this one's.
    put_lines(aws, "night-10/algo-1-1700000000", "Loss is nan, stopping training")
    document = diagnosed_job(cli, aws)
    assert document["cause"] == "gpu-out-of-memory"
    assert (document["first_failure"]["node"], document["first_failure"]["rank"]) == ("algo-2", 9)
    assert document["first_failure"]["time"].startswith(
        time.strftime("%Y-%m-%dT%H:%M", time.gmtime(NOW + 9))
    )
    assert document["evidence"][0]["source"] == "night-1/algo-2-1700000000:18991"
    calls = [name for name, _ in aws.calls]
    assert calls.count("GetLogEvents") >= 5


@pytest.mark.parametrize(
    ("status", "transitions", "reason", "cause"),
    [
        (
            "Failed",
            [("Starting", 0)],
            "CapacityError: Unable to provision requested ML compute capacity. "
            "Please retry using a different ML instance type.",
            "capacity",
        ),
        (
            "Failed",
            [("Starting", 0)],
            "ClientError: Cannot pull algorithm container. "
            "Either the image does not exist or its permissions are incorrect.",
            "image-pull",
        ),
        (
            "Failed",
            [("Training", 0)],
            "InternalServerError: We encountered an internal error.  Please try again.",
            "internal-server-error",
        ),
        (
            "Stopped",
            [("Training", 0), ("Stopping", 5), ("MaxRuntimeExceeded", 9)],
            "",
            "max-runtime",
        ),
        ("Stopped", [("Training", 0), ("Stopping", 5), ("Stopped", 9)], "", "stopped"),
        (
            "Stopped",
            [("Training", 0), ("Interrupted", 5), ("MaxWaitTimeExceeded", 9)],
            "",
            "max-wait",
        ),
        ("Failed", [("Training", 0), ("Interrupted", 5)], "", "spot-interrupted"),
        (
            "Failed",
            [("Training", 0), ("Interrupted", 5), ("Restarting", 6), ("Training", 7)],
            "AlgorithmError: , exit code: 1",
            "unknown",
        ),
        (
            "Failed",
            [("Training", 0), ("A future status", 5)],
            "FutureError: something new",
            "unknown",
        ),
        ("Failed", [("Training", 0)], "ClientError: something new", "platform-rejected"),
        ("Completed", [("Training", 0), ("Interrupted", 5), ("Completed", 9)], "", "no-failure"),
    ],
    ids=lambda value: value if isinstance(value, str) and "-" in value and " " not in value else "",
)
def test_causes_from_the_job_description(
    cli: Cli, aws: Aws, status: str, transitions: list[tuple[str, float]], reason: str, cause: str
) -> None:
    make_job(aws, status, transitions, reason)
    assert diagnosed_job(cli, aws)["cause"] == cause


def test_last_attempt_of_a_retried_job_is_diagnosed(cli: Cli, aws: Aws) -> None:
    make_job(aws, "Failed", [("Training", 0)])
    for instance in (1, 2):
        put_lines(aws, f"night-1/algo-{instance}-1700000000", OOM)
        put_lines(
            aws, f"night-1/algo-{instance}-170000900{instance}", "Loss is nan, stopping training"
        )
    document = diagnosed_job(cli, aws)
    assert document["cause"] == "diverged"
    assert document["details"] == ["attempt 1: The GPU ran out of memory (gpu-out-of-memory)"]


def test_missing_job_is_one_line(cli: Cli, aws: Aws) -> None:
    result = cli("diagnose", "night-2", network="loopback", env=aws.environment | REGION)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert "night-2: neither a run file here nor a run or job" in line


def test_rejected_credentials_are_exit_4(cli: Cli, aws: Aws) -> None:
    aws.error_codes["DescribeTrainingJob"] = "ExpiredTokenException"
    result = cli("diagnose", "night-1", network="loopback", env=aws.environment | REGION)
    assert result.returncode == 4
