"""Tests of ``sm-train review``: local logs, and jobs on a simulated AWS."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import Aws, Cli
from tests.support.finished_jobs import (
    BEGIN,
    end_jobs,
    job_ended,
    log_event,
    put_log_events,
    submit_run,
    training_events,
)
from tests.support.job_log_lines import SimulatedJob, line
from tests.support.run_files import write_run


def save(folder: Path, job: SimulatedJob) -> Path:
    """Save a job's logs, one file per node."""
    folder.mkdir(parents=True)
    logs: dict[str, list[str]] = {f"algo-{node + 1}": [] for node in range(job.nodes)}
    for node, text in job.lines():
        name = node or f"algo-{json.loads(text[4:])['node'] + 1}"
        logs[name] += ["a line that is no event", text]
    for node, lines in logs.items():
        (folder / f"{node}.log").write_text("\n".join(lines) + "\n")
    return folder


def review(cli: Cli, *arguments: Any, **options: Any) -> dict[str, Any]:
    result = cli("review", *arguments, "--json", **options)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def aws_options(aws: Aws) -> dict[str, Any]:
    """Return options for commands that use the simulated AWS."""
    return {"network": "loopback", "env": aws.environment | {"AWS_REGION": "us-east-1"}}


def levels(job: dict[str, Any]) -> dict[str, str]:
    return {verdict["code"]: verdict["level"] for verdict in job["verdicts"]}


def test_saved_logs_of_two_nodes_are_one_job(cli: Cli, tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", SimulatedJob(intervals=60, data_wait=lambda share: 0.3))
    [job] = review(cli, saved)["jobs"]
    assert job["name"] == str(saved)
    assert (job["run"], job["stage"], job["world_size"]) == ("demo", "256px", 16)
    assert job["steps_per_second"] == pytest.approx(1.8, rel=0.01)
    assert job["data_wait_share"] == pytest.approx(0.3)
    assert job["gpu_utilization"] == pytest.approx(0.98)
    assert job["verdicts"][0]["code"] in ("data", "time")
    assert levels(job)["data"] == "bad"
    assert job["billable_seconds"] is None  # logs contain no bill
    # 2 × ml.p4de.24xlarge for the log's hour
    assert job["billed_usd"] == pytest.approx(2 * 31.5641075 * 3605 / 3600)
    assert sum(job["seconds"].values()) == pytest.approx(job["passed_seconds"])
    speed = next(chart for chart in job["charts"] if chart["code"] == "speed")
    assert len(speed["lines"][0]["values"]) == 60


def test_terminal_output_is_worst_first_within_100_columns(cli: Cli, tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", SimulatedJob(intervals=60, data_wait=lambda share: 0.3))
    result = cli("review", saved)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    symbols = [text[0] for text in result.stdout.splitlines() if text[:1] in "✓!✗?" and text]
    assert symbols == sorted(symbols, key="✗!?✓".index)
    assert "Was data loading the bottleneck?" in result.stdout
    assert "training.decode_workers" in result.stdout


def test_several_jobs_are_compared_and_written_as_csv_rows(cli: Cli, tmp_path: Path) -> None:
    fast = save(tmp_path / "fast", SimulatedJob(intervals=60))
    slow = save(tmp_path / "slow", SimulatedJob(intervals=60, speed=lambda share: 0.9))
    result = cli("review", fast, slow, "--csv")
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["name"] for row in rows] == [str(fast), str(slow)]
    speeds = [float(row["steps_per_second"]) for row in rows]
    assert speeds == pytest.approx([1.8, 0.9], rel=0.01)
    assert {row["verdict_data"] for row in rows} == {"good"}
    assert rows[0]["estimate_usd"] == ""  # unknown is empty, never 0
    output = cli("review", fast, slow).stdout
    assert "images/s" in output.splitlines()[0]


def test_local_logs_are_compared_with_a_run_files_estimate(cli: Cli, tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", SimulatedJob(nodes=4, intervals=600))
    run = write_run(tmp_path)
    [job] = review(cli, saved, "--run", run)["jobs"]
    assert job["estimate_usd"] == pytest.approx(job["billed_usd"], rel=0.1)
    assert levels(job)["cost"] == "good"


def test_each_stage_of_a_local_run_is_reviewed(cli: Cli, tmp_path: Path) -> None:
    for stage in ("first", "second"):
        folder = tmp_path / "out" / stage
        folder.mkdir(parents=True)
        lines = SimulatedJob(nodes=1, intervals=12, backend="gloo").lines()
        (folder / "events.log").write_text("\n".join(text for _, text in lines))
    jobs = review(cli, tmp_path / "out")["jobs"]
    assert [Path(job["name"]).name for job in jobs] == ["first", "second"]
    assert {job["backend"] for job in jobs} == {"gloo"}


@pytest.mark.integration
def test_failed_local_run_is_diagnosed_and_its_samples_are_shown(cli: Cli, tmp_path: Path) -> None:
    stage = tmp_path / "out" / "256px"
    samples = stage / "checkpoints" / "samples"
    samples.mkdir(parents=True)
    for step in range(100, 2100, 100):
        Image.new("RGB", (900, 300), (step % 256, 0, 0)).save(samples / f"step-{step:08}.png")
    (samples / "step-00002100.png").write_bytes(b"truncated")
    *lines, _ = SimulatedJob(nodes=1, intervals=30).lines()
    failure = (
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3"
    )
    (stage / "events.log").write_text("\n".join([*(text for _, text in lines), failure]))
    page = tmp_path / "review.html"
    result = cli("review", tmp_path / "out", "--html", page, "--json")
    assert result.returncode == 0, result.stderr
    [job] = json.loads(result.stdout)["jobs"]
    [end] = [verdict for verdict in job["verdicts"] if verdict["code"] == "end"]
    assert (end["level"], end["sentence"]) == ("bad", "it failed: The GPU ran out of memory")
    assert "rank 3" in end["evidence"][0]
    steps = [sample["step"] for sample in job["samples"]]
    assert (steps[0], len(steps)) == (100, 7)
    assert {sample["address"] for sample in job["samples"]} == {None}
    assert page.read_text().count('<img src="data:image/jpeg;base64,') == 7


def test_runs_differ_in_the_settings_of_their_start_events(cli: Cli, tmp_path: Path) -> None:
    saved = [save(tmp_path / str(nodes), SimulatedJob(nodes=nodes)) for nodes in (1, 2)]
    jobs = review(cli, *saved)["jobs"]
    assert [job["settings"]["world_size"] for job in jobs] == ["8", "16"]
    assert jobs[0]["progress"]["steps"][-1] == jobs[0]["last_step"]
    run = write_run(tmp_path)
    [job] = review(cli, saved[0], "--run", run)["jobs"]
    assert "data.uri" in job["settings"]


def test_truncated_compressed_logs_are_read_to_their_end(cli: Cli, tmp_path: Path) -> None:
    text = "\n".join(text for _, text in SimulatedJob(intervals=60).lines()).encode()
    log = tmp_path / "algo-1.log.gz"
    log.write_bytes(gzip.compress(text)[:-2000])
    [job] = review(cli, log)["jobs"]
    assert 0 < job["last_step"] < 60 * 60 * 1.8
    assert levels(job)["end"] == "warning"


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["nowhere/x.log"], "nowhere/x.log"),
        ([".", "--json", "--csv"], "--csv"),
        ([".", "--html", "no/such/folder.html"], "folder"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(
    cli: Cli, tmp_path: Path, arguments: Sequence[str], phrase: str
) -> None:
    (tmp_path / "algo-1.log").write_text(line("error", 1, code="x", message="y") + "\n")
    result = cli("review", *arguments)
    assert result.returncode in (2, 4)
    assert phrase in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


@pytest.fixture
def finished(cli: Cli, aws: Aws, tmp_path: Path) -> str:
    """Create a job of a run that was billed 1,000 s on 4 × ml.p4de.24xlarge; return its name."""
    shards = {f"shards/{number}.tar": b"x" for number in range(8)}
    aws.make_bucket("ai-bucket", **shards, **{"index.parquet": b"x"})
    job = submit_run(cli, aws, write_run(tmp_path))
    put_log_events(aws, job, training_events())
    aws.response_filters["DescribeTrainingJob"] = job_ended(1000)
    return job


def put_metric(aws: Aws, job: str, instance: str, name: str, values: dict[float, float]) -> None:
    aws.client("cloudwatch").put_metric_data(
        Namespace="/aws/sagemaker/TrainingJobs",
        MetricData=[
            {
                "MetricName": name,
                "Dimensions": [{"Name": "Host", "Value": f"{job}/{instance}"}],
                "Timestamp": datetime.fromtimestamp(BEGIN + at, UTC),
                "Value": value,
                "Unit": "Percent",
            }
            for at, value in values.items()
        ],
    )


def test_job_is_read_from_cloudwatch(cli: Cli, aws: Aws, finished: str) -> None:
    for node in range(1, 5):
        busy = {60.0 * minute: 780.0 if minute > 7 else 0.0 for minute in range(16)}
        put_metric(aws, finished, f"algo-{node}", "GPUUtilization", busy)
    options = aws_options(aws)
    [job] = review(cli, finished, **options)["jobs"]
    assert job["billable_seconds"] == 1000
    assert job["billed_usd"] == pytest.approx(1000 / 3600 * 4 * 31.5641075)
    assert job["gpu_utilization"] == pytest.approx(780 / 800)
    assert {name: seconds for name, seconds in job["seconds"].items() if seconds} == pytest.approx(
        {"start_up": 400, "checkpoints": 30, "data_wait": 10, "shut_down": 70, "useful": 490}
    )
    assert levels(job)["end"] == "good"
    assert job["estimate_usd"] is not None
    assert len(next(chart for chart in job["charts"] if chart["code"] == "gpu")["lines"]) == 4


@pytest.mark.slow
def test_run_reviews_all_its_jobs_with_repeated_work(cli: Cli, aws: Aws, finished: str) -> None:
    """The second attempt resumes from step 300 of the 500 that the first reached."""
    end_jobs(aws, 1000, "Stopped")
    result = cli("resume", "demo", "--yes", "--json", **aws_options(aws))
    assert result.returncode == 0, result.stderr
    second = json.loads(result.stdout)["training_job_name"]
    start = {
        "resumed_from_step": 300,
        "world_size": 32,
        "resolution": 256,
        "effective_batch_size": 512,
        "backend": "nccl",
        "stage": "256px",
    }
    put_log_events(
        aws,
        second,
        [
            log_event("start", 100, **start),
            log_event("step", 200, step=400, steps_per_second=1.0, data_wait_share=0.0),
            log_event("step", 300, step=500, steps_per_second=1.0, data_wait_share=0.0),
            log_event("step", 400, step=600, steps_per_second=1.0, data_wait_share=0.0),
            log_event("end", 400),
        ],
    )
    options = aws_options(aws)
    first_job, second_job = review(cli, "demo", **options)["jobs"]
    assert (first_job["name"], second_job["name"]) == (finished, second)
    assert first_job["seconds"]["lost_work"] == 0
    assert second_job["seconds"]["lost_work"] == pytest.approx(200)


@pytest.mark.integration
def test_rejected_metrics_leave_the_rest_of_the_review(cli: Cli, aws: Aws, finished: str) -> None:
    aws.responses["GetMetricData"] = lambda body: (403, {"__type": "AccessDenied", "message": "no"})
    document = review(cli, finished, **aws_options(aws))
    assert "CloudWatch" in document["warnings"][0]
    assert levels(document["jobs"][0])["gpu"] == "unknown"
    assert levels(document["jobs"][0])["speed"] == "unknown"  # five intervals are too few


def test_unknown_name_is_reported_in_one_line(cli: Cli, aws: Aws) -> None:
    result = cli("review", "no-such-run", **aws_options(aws))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "no-such-run" in result.stderr
