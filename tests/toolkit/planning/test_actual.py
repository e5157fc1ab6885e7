"""``cost --actual`` and the history it stores, on a server that emulates AWS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Aws, Cli
from tests.support.finished_jobs import (
    end_jobs,
    job_ended,
    put_log_events,
    submit_run,
    training_events,
)
from tests.support.job_lifecycle import store_checkpoint
from tests.support.run_documents import stage
from tests.support.run_files import write_run

pytestmark = pytest.mark.integration

HISTORY = "s3://ai-bucket/demo/cost/history.json"


@pytest.fixture
def finished(cli: Cli, aws: Aws, tmp_path: Path) -> Path:
    """A run with one job that was billed 1,000 s on 4 × ml.p4de.24xlarge."""
    shards = {f"shards/{number}.tar": b"x" for number in range(8)}
    aws.make_bucket("ai-bucket", **shards, **{"index.parquet": b"x"})
    run = write_run(tmp_path)
    put_log_events(aws, submit_run(cli, aws, run), training_events())
    aws.response_filters["DescribeTrainingJob"] = job_ended(1000)
    store_checkpoint(aws, "256px", 500)
    return run


def actual(cli: Cli, aws: Aws, run: Path) -> dict[str, Any]:
    result = cli("cost", run, "--actual", "--json", network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_billed_cost_and_its_breakdown(cli: Cli, aws: Aws, finished: Path) -> None:
    document = actual(cli, aws, finished)
    total = document["total"]
    assert total["billed_usd"] == pytest.approx(1000 / 3600 * 4 * 31.5641075)
    second = 4 * 31.5641075 / 3600
    seconds = {part: usd / second for part, usd in total["waterfall_usd"].items() if usd}
    assert seconds == pytest.approx(
        {"start_up": 400, "checkpoints": 30, "data_wait": 10, "shut_down": 70, "useful": 490}
    )
    assert sum(total["waterfall_usd"].values()) == pytest.approx(total["billed_usd"])
    assert total["goodput"] == pytest.approx(0.49)
    assert total["images"] == 500 * 512
    # 500 of 1,000 steps remain: another start-up, and 1 it/s as measured.
    assert total["remaining_usd"] == pytest.approx((600 + 500) * second, rel=0.01)
    assert total["projected_usd"] == pytest.approx(total["billed_usd"] + total["remaining_usd"])
    [first] = document["stages"]
    # The estimate covers the 500 steps that ran, at the stated speed; a checkpoint is overlapped.
    assert first["estimate_usd"] == pytest.approx((600 + 500 / 1.8) * second, rel=0.01)
    assert first["difference_usd"] == pytest.approx(first["billed_usd"] - first["estimate_usd"])


def test_actual_cost_is_printed_within_100_columns(cli: Cli, aws: Aws, finished: Path) -> None:
    result = cli("cost", finished, "--actual", network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    for expected in (
        "breakdown",
        "start up",
        "useful",
        "49.0%",
        "goodput",
        "spent $35.07, remaining $",
    ):
        assert expected in result.stdout


def test_next_estimate_uses_the_stored_history(
    cli: Cli, aws: Aws, finished: Path, tmp_path: Path
) -> None:
    assert actual(cli, aws, finished)["history"] == HISTORY
    before = json.loads(cli("cost", finished, "--json").stdout)
    options = {"network": "loopback", "env": aws.environment}
    after = json.loads(cli("cost", finished, "--learn", "--json", **options).stdout)
    assert before["stages"][0]["steps_per_second"] == 1.8
    assert after["stages"][0]["steps_per_second"] == 1.0
    assert after["stages"][0]["throughput_basis"] == "measured"
    start_up = 4 * 31.5641075 / 3600 * 400
    assert after["stages"][0]["breakdown_usd"]["start_up"] == pytest.approx(start_up)
    assert any("400 s billed per stage (measured over 1 job" in x for x in after["assumptions"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "failures"),
    [
        ("InternalServerError: We encountered an internal error. Please try again.", 1),
        ("AlgorithmError: ExecuteUserScriptError: ExitCode 1", 0),
        ("CapacityError: Unable to provision requested ML compute capacity", 0),
    ],
)
def test_only_infrastructure_failures_count_in_the_history(
    cli: Cli, aws: Aws, finished: Path, reason: str, failures: int
) -> None:
    aws.response_filters["DescribeTrainingJob"] = lambda answer: (
        job_ended(1000, "Failed")(answer) | {"FailureReason": reason}
    )
    document = actual(cli, aws, finished)
    assert [job["status"] for job in document["jobs"]] == ["Failed"]
    history = aws.client("s3").get_object(Bucket="ai-bucket", Key="demo/cost/history.json")
    assert json.loads(history["Body"].read())["observed"]["failures"] == failures


@pytest.mark.slow
def test_jobs_with_ambiguous_names_belong_to_the_run_that_tagged_them(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    shards = {f"shards/{number}.tar": b"x" for number in range(8)}
    aws.make_bucket("ai-bucket", **shards, **{"index.parquet": b"x"})
    run = write_run(tmp_path, stages=[stage("x-256px"), stage("256px")])
    submit_run(cli, aws, run)
    # demo, x-256px and demo-x, 256px: with one hyphen between them their jobs had one name.
    (tmp_path / "other").mkdir()
    other = write_run(tmp_path / "other", name="demo-x")
    submit_run(cli, aws, other)
    assert names(aws) == ["demo--x-256px-0001", "demo-x--256px-0001"]
    assert [job["stage"] for job in actual(cli, aws, run)["jobs"]] == ["x-256px"]
    assert [job["stage"] for job in actual(cli, aws, other)["jobs"]] == ["256px"]


def names(aws: Aws) -> list[str]:
    return [body["TrainingJobName"] for body in aws.bodies("CreateTrainingJob")]


def test_job_without_events_is_billed_with_unknown_breakdown(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    shards = {f"shards/{number}.tar": b"x" for number in range(8)}
    aws.make_bucket("ai-bucket", **shards, **{"index.parquet": b"x"})
    run = write_run(tmp_path)
    submit_run(cli, aws, run)
    aws.response_filters["DescribeTrainingJob"] = job_ended(3600, "A status of the future")
    document = actual(cli, aws, run)
    assert document["total"]["billed_usd"] == pytest.approx(4 * 31.5641075)
    assert document["total"]["goodput"] is None
    assert set(document["total"]["waterfall_usd"].values()) == {None}


def test_spot_saving_is_in_the_billed_seconds(cli: Cli, aws: Aws, finished: Path) -> None:
    aws.response_filters["DescribeTrainingJob"] = lambda answer: (
        job_ended(1000)(answer) | {"EnableManagedSpotTraining": True, "BillableTimeInSeconds": 300}
    )
    total = actual(cli, aws, finished)["total"]
    second = 4 * 31.5641075 / 3600
    assert total["billed_usd"] == pytest.approx(300 * second)
    assert total["waterfall_usd"]["start_up"] == pytest.approx(0.3 * 400 * second)
    assert total["goodput"] == pytest.approx(0.49)


@pytest.mark.slow
def test_selected_instance_preference_is_billed(cli: Cli, aws: Aws, finished: Path) -> None:
    resources = {
        "InstancePreferences": [
            {"InstanceType": "ml.p5.48xlarge"},
            {"InstanceType": "ml.p4d.24xlarge"},
        ],
        "SelectedInstanceType": "ml.p4d.24xlarge",
        "SelectedInstanceCount": 8,
    }
    aws.response_filters["DescribeTrainingJob"] = lambda answer: (
        job_ended(1000)(answer) | {"ResourceConfig": resources}
    )
    [job] = actual(cli, aws, finished)["jobs"]
    assert (job["instance_type"], job["instances"]) == ("ml.p4d.24xlarge", 8)
    assert job["billed_usd"] == pytest.approx(1000 / 3600 * 8 * 25.251286)


def test_measured_job_sets_the_speed_of_another_stage(
    cli: Cli, aws: Aws, finished: Path, tmp_path: Path
) -> None:
    job = actual(cli, aws, finished)["jobs"][0]["name"]
    (tmp_path / "next").mkdir()
    run = write_run(
        tmp_path / "next",
        stages=[stage("again", instances=8, per_device_batch_size=4, steps_per_second=None)],
    )
    result = cli(
        "cost",
        run,
        "--measured",
        job,
        "--region",
        "us-east-1",
        "--json",
        network="loopback",
        env=aws.environment,
    )
    assert result.returncode == 0, result.stderr
    [scaled] = json.loads(result.stdout)["stages"]
    # Twice the GPUs, each with half of the batch: the speed model's ratio of the two.
    assert scaled["throughput_basis"] == "scaled"
    assert "mean of 4 intervals): 1 it/s" in scaled["throughput_source"]
    assert 0.5 < scaled["steps_per_second"] < 2.0


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--actual"], 2, "demo: has no job in us-east-1; `sm-train submit` starts one"),
        (["--learn"], 2, f"--learn: {HISTORY} does not exist yet"),
        (
            ["--measured", "nojob"],
            2,
            "--measured: nojob: not a local file; as a training job: has no",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_missing_job_or_history_is_a_one_line_error(
    cli: Cli, aws: Aws, tmp_path: Path, arguments: list[str], code: int, expected: str
) -> None:
    aws.make_bucket("ai-bucket")
    run = write_run(tmp_path)
    result = cli("cost", run, *arguments, network="loopback", env=aws.environment)
    assert result.returncode == code
    [line] = result.stderr.splitlines()
    assert expected in line


def test_refused_credentials_exit_with_code_4(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.error_codes["ListTrainingJobs"] = "ExpiredTokenException"
    result = cli("cost", write_run(tmp_path), "--actual", network="loopback", env=aws.environment)
    assert result.returncode == 4
    [line] = result.stderr.splitlines()
    assert "ExpiredTokenException" in line


def test_damaged_history_is_named(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for content in (
        "",
        "[]",
        "{}",
        '{"version": 9}',
        '{"version": 1, "observed": {}, "measurements": 3}',
    ):
        aws.make_bucket("ai-bucket", **{"demo/cost/history.json": content.encode()})
        result = cli("cost", run, "--learn", network="loopback", env=aws.environment)
        assert result.returncode == 2
        [line] = result.stderr.splitlines()
        assert "history.json: damaged" in line


@pytest.mark.slow
def test_later_submission_is_estimated_with_the_history(cli: Cli, aws: Aws, finished: Path) -> None:
    end_jobs(aws, 1000, "Stopped")
    options = {"network": "loopback", "env": aws.environment}
    first = cli("submit", finished, "--yes", **options)
    assert "1.8" in first.stderr
    actual(cli, aws, finished)
    second = cli("submit", finished, "--yes", **options)
    assert second.returncode == 0, second.stderr
    [line] = [row for row in second.stderr.splitlines() if row.startswith("256px ")]
    assert " 1 " in line
    assert " 1.8 " not in line
