"""``sm-train review`` as a person and a script use it: logs here, and jobs on a server like AWS."""

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

from tests.conftest import Aws, Cli
from tests.support.finished_jobs import BEGIN, billed, event, life, say, submit
from tests.support.job_log_lines import Life, line
from tests.support.run_files import write_run


def save(folder: Path, life: Life) -> Path:
    """A job's logs, one for each machine."""
    folder.mkdir(parents=True)
    found: dict[str, list[str]] = {f"algo-{node + 1}": [] for node in range(life.nodes)}
    for node, text in life.lines():
        at = node or f"algo-{json.loads(text[4:])['node'] + 1}"
        found[at] += ["a line for people", text]
    for node, lines in found.items():
        (folder / f"{node}.log").write_text("\n".join(lines) + "\n")
    return folder


def review(cli: Cli, *arguments: Any, **options: Any) -> dict[str, Any]:
    result = cli("review", *arguments, "--json", **options)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def away(aws: Aws) -> dict[str, Any]:
    """A laptop's options for a run that is in the account."""
    return {"network": "loopback", "env": aws.environment | {"AWS_REGION": "us-east-1"}}


def levels(job: dict[str, Any]) -> dict[str, str]:
    return {one["code"]: one["level"] for one in job["verdicts"]}


def test_saved_logs_of_two_machines_are_one_job(cli: Cli, tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", Life(intervals=60, waits=lambda share: 0.3))
    [job] = review(cli, saved)["jobs"]
    assert job["name"] == str(saved)
    assert (job["run"], job["stage"], job["world_size"]) == ("demo", "256px", 16)
    assert job["steps_per_second"] == pytest.approx(1.8, rel=0.01)
    assert job["data_wait_share"] == pytest.approx(0.3)
    assert job["gpu_utilization"] == pytest.approx(0.98)
    assert job["verdicts"][0]["code"] in ("data", "time")
    assert levels(job)["data"] == "bad"
    assert job["billable_seconds"] is None  # a log knows no bill
    # 2 × ml.p4de.24xlarge for the log's hour
    assert job["billed_usd"] == pytest.approx(2 * 31.5641075 * 3605 / 3600)
    assert sum(job["seconds"].values()) == pytest.approx(job["passed_seconds"])
    speed = next(one for one in job["charts"] if one["code"] == "speed")
    assert len(speed["lines"][0]["values"]) == 60


def test_a_person_reads_the_worst_first_within_100_columns(cli: Cli, tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", Life(intervals=60, waits=lambda share: 0.3))
    result = cli("review", saved)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    signs = [text[0] for text in result.stdout.splitlines() if text[:1] in "✓!✗?" and text]
    assert signs == sorted(signs, key="✗!?✓".index)
    assert "Was data the limit?" in result.stdout
    assert "training.decode_workers" in result.stdout


def test_several_jobs_are_compared_and_make_rows_of_a_table(cli: Cli, tmp_path: Path) -> None:
    fast = save(tmp_path / "fast", Life(intervals=60))
    slow = save(tmp_path / "slow", Life(intervals=60, speed=lambda share: 0.9))
    result = cli("review", fast, slow, "--csv")
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["name"] for row in rows] == [str(fast), str(slow)]
    speeds = [float(row["steps_per_second"]) for row in rows]
    assert speeds == pytest.approx([1.8, 0.9], rel=0.01)
    assert {row["verdict_data"] for row in rows} == {"good"}
    assert rows[0]["estimate_usd"] == ""  # unknown is empty, never 0
    told = cli("review", fast, slow).stdout
    assert "images/s" in told.splitlines()[0]


def test_logs_here_are_held_against_a_run_files_estimate(cli: Cli, tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", Life(nodes=4, intervals=600))
    run = write_run(tmp_path)
    [job] = review(cli, saved, "--run", run)["jobs"]
    assert job["estimate_usd"] == pytest.approx(job["billed_usd"], rel=0.1)
    assert levels(job)["cost"] == "good"


def test_each_stage_of_a_local_run_is_reviewed(cli: Cli, tmp_path: Path) -> None:
    for stage in ("first", "second"):
        folder = tmp_path / "out" / stage
        folder.mkdir(parents=True)
        lines = Life(nodes=1, intervals=12, backend="gloo").lines()
        (folder / "events.log").write_text("\n".join(text for _, text in lines))
    jobs = review(cli, tmp_path / "out")["jobs"]
    assert [Path(job["name"]).name for job in jobs] == ["first", "second"]
    assert {job["backend"] for job in jobs} == {"gloo"}


def test_compressed_and_cut_logs_tell_what_they_hold(cli: Cli, tmp_path: Path) -> None:
    text = "\n".join(text for _, text in Life(intervals=60).lines()).encode()
    log = tmp_path / "algo-1.log.gz"
    log.write_bytes(gzip.compress(text)[:-2000])
    [job] = review(cli, log)["jobs"]
    assert 0 < job["last_step"] < 60 * 60 * 1.8
    assert levels(job)["end"] == "warning"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere/x.log"], "nowhere/x.log"),
        ([".", "--json", "--csv"], "--csv"),
        ([".", "--html", "no/such/folder.html"], "folder"),
    ],
)
def test_a_mistake_is_one_line(
    cli: Cli, tmp_path: Path, arguments: Sequence[str], words: str
) -> None:
    (tmp_path / "algo-1.log").write_text(line("error", 1, code="x", message="y") + "\n")
    result = cli("review", *arguments)
    assert result.returncode in (2, 4)
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


@pytest.fixture
def finished(cli: Cli, aws: Aws, tmp_path: Path) -> str:
    """A run's job that was billed 1,000 s on 4 × ml.p4de.24xlarge."""
    shards = {f"shards/{number}.tar": b"x" for number in range(8)}
    aws.make_bucket("my-bucket", **shards, **{"index.parquet": b"x"})
    job = submit(cli, aws, write_run(tmp_path))
    say(aws, job, life())
    aws.amendments["DescribeTrainingJob"] = billed(1000)
    return job


def measure(aws: Aws, job: str, host: str, name: str, values: dict[float, float]) -> None:
    aws.client("cloudwatch").put_metric_data(
        Namespace="/aws/sagemaker/TrainingJobs",
        MetricData=[
            {
                "MetricName": name,
                "Dimensions": [{"Name": "Host", "Value": f"{job}/{host}"}],
                "Timestamp": datetime.fromtimestamp(BEGIN + at, UTC),
                "Value": value,
                "Unit": "Percent",
            }
            for at, value in values.items()
        ],
    )


def test_a_job_is_read_from_cloudwatch(cli: Cli, aws: Aws, finished: str) -> None:
    for node in range(1, 5):
        busy = {60.0 * minute: 780.0 if minute > 7 else 0.0 for minute in range(16)}
        measure(aws, finished, f"algo-{node}", "GPUUtilization", busy)
    options = away(aws)
    [job] = review(cli, finished, **options)["jobs"]
    assert job["billable_seconds"] == 1000
    assert job["billed_usd"] == pytest.approx(1000 / 3600 * 4 * 31.5641075)
    assert job["gpu_utilization"] == pytest.approx(780 / 800)
    assert {name: seconds for name, seconds in job["seconds"].items() if seconds} == pytest.approx(
        {"start_up": 400, "checkpoints": 30, "data_wait": 10, "shut_down": 70, "useful": 490}
    )
    assert levels(job)["end"] == "good"
    assert job["estimate_usd"] is not None
    assert len(next(one for one in job["charts"] if one["code"] == "gpu")["lines"]) == 4


def test_a_run_means_all_of_its_jobs_and_what_one_lost_for_the_next(
    cli: Cli, aws: Aws, finished: str
) -> None:
    """The second attempt goes on from step 300 of the 500 that the first had reached."""
    aws.amendments["DescribeTrainingJob"] = billed(1000, "Stopped")
    result = cli("resume", "demo", "--yes", "--json", **away(aws))
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
    say(
        aws,
        second,
        [
            event("start", 100, **start),
            event("step", 200, step=400, steps_per_second=1.0, data_wait_share=0.0),
            event("step", 300, step=500, steps_per_second=1.0, data_wait_share=0.0),
            event("step", 400, step=600, steps_per_second=1.0, data_wait_share=0.0),
            event("end", 400),
        ],
    )
    options = away(aws)
    first, again = review(cli, "demo", **options)["jobs"]
    assert (first["name"], again["name"]) == (finished, second)
    assert first["seconds"]["lost_work"] == 0
    assert again["seconds"]["lost_work"] == pytest.approx(200)


def test_refused_metrics_leave_the_rest_of_a_review(cli: Cli, aws: Aws, finished: str) -> None:
    aws.answers["GetMetricData"] = lambda body: (403, {"__type": "AccessDenied", "message": "no"})
    document = review(cli, finished, **away(aws))
    assert "CloudWatch" in document["notes"][0]
    assert levels(document["jobs"][0])["gpu"] == "unknown"
    assert levels(document["jobs"][0])["speed"] == "unknown"  # five intervals are too few


def test_a_name_that_is_nothing_is_refused_in_one_line(cli: Cli, aws: Aws) -> None:
    result = cli("review", "no-such-run", **away(aws))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "no-such-run" in result.stderr
