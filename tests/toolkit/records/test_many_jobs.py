"""Reading a run with many jobs takes few calls and never an outdated status."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sm_train.toolkit.records.training_job import jobs_of_run

from tests.conftest import Aws, Cli
from tests.support.moto_server import aws_session
from tests.toolkit.runs.run_lifecycle_support import Laptop

pytestmark = pytest.mark.integration

JOBS = 30


@pytest.fixture
def laptop(cli: Cli, aws: Aws, tmp_path: Path) -> Laptop:
    """A run of 30 jobs; the newest is live, the others have failed."""
    laptop = Laptop(cli, aws, tmp_path)
    sagemaker, s3 = aws.client("sagemaker"), aws.client("s3")
    [request] = aws.bodies("CreateTrainingJob")
    for number in range(2, JOBS + 1):
        sagemaker.create_training_job(**request | {"TrainingJobName": job(number)})
        laptop.sagemaker.set_status(job(number - 1), "Failed", ended_ago=3600 - number)
    record = f"ai-bucket/demo/jobs/{job(1)}.json"
    s3.copy_object(Bucket="ai-bucket", Key=f"demo/jobs/{job(JOBS)}.json", CopySource=record)
    aws.calls.clear()
    return laptop


def job(number: int) -> str:
    return f"demo--256px-{number:04d}"


def calls(aws: Aws) -> Counter[str]:
    sagemaker = ("ListTrainingJobs", "Search", "DescribeTrainingJob", "ListTags")
    return Counter(operation for operation, _ in aws.calls if operation in sagemaker)


def test_status_describes_only_the_newest_job_of_a_stage(laptop: Laptop) -> None:
    [stage] = laptop.json("status", "demo")["stages"]
    assert [job_view["name"] for job_view in stage["jobs"]] == [
        job(number + 1) for number in range(JOBS)
    ]
    assert [job_view["status"] for job_view in stage["jobs"]] == ["Failed"] * (JOBS - 1) + [
        "InProgress"
    ]
    # The second listing reads AWS's clock.
    expected = {"ListTrainingJobs": 2, "Search": 1, "DescribeTrainingJob": 1, "ListTags": 1}
    assert calls(laptop.aws) == expected


@pytest.mark.integration
def test_status_succeeds_while_every_other_call_is_throttled(laptop: Laptop) -> None:
    attempts: Counter[str] = Counter()

    def throttle_odd(operation: str) -> Any:
        def respond(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
            attempts[operation] += 1
            if attempts[operation] % 2:
                return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
            return None

        return respond

    for operation in ("ListTrainingJobs", "Search", "DescribeTrainingJob", "ListTags"):
        laptop.aws.responses[operation] = throttle_odd(operation)
    assert len(laptop.json("status", "demo")["stages"][0]["jobs"]) == JOBS
    assert sum(attempts.values()) == 10


def outdated(response: dict[str, Any]) -> dict[str, Any]:
    """Search's index as it was while every job was live."""
    for result in response["Results"]:
        result["TrainingJob"]["TrainingJobStatus"] = "InProgress"
    return response


def incomplete(response: dict[str, Any]) -> dict[str, Any]:
    kept = random.Random(0).sample(response["Results"], JOBS // 2)
    return response | {"Results": kept}


@pytest.mark.parametrize("search", [outdated, incomplete, "AccessDeniedException"])
def test_jobs_that_search_does_not_return_as_they_are_now_are_described(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, search: Any
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", laptop.aws.url)
    if isinstance(search, str):
        laptop.aws.error_codes["Search"] = search
    else:
        laptop.aws.response_filters["Search"] = search
    jobs = jobs_of_run(aws_session(), "demo")
    assert [job_view.name for job_view in jobs] == [job(number + 1) for number in range(JOBS)]
    assert {job_view.status for job_view in jobs[:-1]} == {"Failed"}
    assert all(job_view.ended for job_view in jobs[:-1])
