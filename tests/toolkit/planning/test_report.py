"""``cost --report``: totals over the account's jobs by tag and month."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from moto.backends import get_backend

from tests.conftest import Aws, Cli
from tests.support.finished_jobs import submit_run
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.moto_server import ACCOUNT
from tests.support.run_files import one_line, write_run

HOURLY = 12.5
SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}


class Account:
    """Jobs of several months, teams and types, at one price of $12.50 an instance-hour."""

    def __init__(self, cli: Cli, aws: Aws, folder: Path) -> None:
        self.cli, self.aws, self.folder = cli, aws, folder
        aws.make_bucket("ai-bucket", **SHARDS)
        FakeSageMaker(aws)
        run = write_run(folder, tags={"team": "imaging"})
        submit_run(cli, aws, run)
        [self.request] = aws.bodies("CreateTrainingJob")
        self.jobs = get_backend("sagemaker")[ACCOUNT]["us-east-1"].training_jobs
        self.jobs.clear()
        aws.responses["ListTrainingJobs"] = self._list
        (folder / "own.csv").write_text(f"instance_type,usd_per_hour\nml.p4de.24xlarge,{HOURLY}\n")

    def _list(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """List two jobs a page, newest first; moto cannot compare its jobs' creation times."""
        after = body.get("CreationTimeAfter", 0.0)
        created = {
            name: datetime.fromisoformat(job.creation_time).timestamp()
            for name, job in self.jobs.items()
        }
        newest_first = sorted(created, key=lambda name: -created[name])
        names = [name for name in newest_first if created[name] >= after]
        first = int(body.get("NextToken", 0))
        page = [
            {
                "TrainingJobName": name,
                "TrainingJobArn": self.jobs[name].arn,
                "CreationTime": created[name],
                "TrainingJobStatus": self.jobs[name].training_job_status,
            }
            for name in names[first : first + 2]
        ]
        more = {"NextToken": str(first + 2)} if len(names) > first + 2 else {}
        return 200, {"TrainingJobSummaries": page, **more}

    def add(
        self,
        name: str,
        start: datetime,
        hours: float,
        *,
        team: str | None = "imaging",
        instances: int = 2,
        instance_type: str = "ml.p4de.24xlarge",
        status: str = "Completed",
    ) -> None:
        run = name.partition("--")[0]
        own = {"team": team, "sm-train:run": run}
        tags = [tag for tag in self.request["Tags"] if tag["Key"] not in own]
        tags += [{"Key": key, "Value": value} for key, value in own.items() if value is not None]
        resources = self.request["ResourceConfig"] | {
            "InstanceCount": instances,
            "InstanceType": instance_type,
        }
        self.aws.client("sagemaker").create_training_job(
            **self.request | {"TrainingJobName": name, "Tags": tags, "ResourceConfig": resources}
        )
        job = self.jobs[name]
        end = start + timedelta(hours=hours)
        job.training_job_status = job.secondary_status = status
        job.creation_time = job.training_start_time = start.isoformat()
        job.training_end_time = end.isoformat()
        job.billable_time_in_seconds = int(hours * 3600)

    def report(self, *options: str) -> Any:
        return self.cli(
            "cost",
            "--report",
            "--region",
            "us-east-1",
            "--prices",
            self.folder / "own.csv",
            *options,
            network="loopback",
            env=self.aws.environment,
        )


@pytest.fixture
def account(cli: Cli, aws: Aws, tmp_path: Path) -> Account:
    account = Account(cli, aws, tmp_path)
    account.add("a--256px-0001", datetime(2026, 8, 3, tzinfo=UTC), 10)
    account.add("a--256px-0002", datetime(2026, 9, 5, tzinfo=UTC), 4, status="Failed")
    account.add("b--256px-0001", datetime(2026, 9, 9, tzinfo=UTC), 8, team="video")
    # From noon on the 30th: 12 hours in September, 24 in October.
    account.add("b--512px-0001", datetime(2026, 9, 30, 12, tzinfo=UTC), 36, team="video")
    account.add("c--256px-0001", datetime(2026, 10, 2, tzinfo=UTC), 1, team=None)
    # A formula in a tag.
    account.add("d--256px-0001", datetime(2026, 10, 3, tzinfo=UTC), 2, team="=1+1")
    return account


def sums(document: Any) -> dict[tuple[str, str | None], float]:
    return {(row["month"], row["group"]): row["cost_usd"] for row in document["rows"]}


@pytest.mark.slow
def test_totals_by_team_and_month(account: Account) -> None:
    result = account.report("--since", "2026-08-01", "--by", "tag:team", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    per_hour = 2 * HOURLY
    assert sums(document) == {
        ("2026-08", "imaging"): 10 * per_hour,
        ("2026-09", "video"): (8 + 12) * per_hour,
        ("2026-09", "imaging"): 4 * per_hour,
        ("2026-10", "video"): 24 * per_hour,
        ("2026-10", "=1+1"): 2 * per_hour,
        ("2026-10", None): 1 * per_hour,
    }
    total = document["total"]
    assert total["cost_usd"] == sum(sums(document).values())
    assert (total["jobs"], total["gpu_hours"]) == (6, 61 * 2 * 8)
    assert total["price_status"] == "verified"
    shown = account.report("--since", "2026-08-01", "--by", "tag:team").stdout.splitlines()
    assert shown[1].split()[:2] == ["total", "6"]
    assert any("(no tag)" in line for line in shown)


@pytest.mark.slow
def test_period_counts_only_what_was_billed_in_it(account: Account) -> None:
    document = json.loads(account.report("--since", "2026-10-01", "--by", "run", "--json").stdout)
    assert {group: usd for (_, group), usd in sums(document).items()} == {
        "b": 24 * 2 * HOURLY,
        "d": 2 * 2 * HOURLY,
        "c": 1 * 2 * HOURLY,
    }
    by_status = account.report("--since", "2026-09-01", "--by", "status", "--json")
    found = sums(json.loads(by_status.stdout))
    assert {group for month, group in found if month == "2026-09"} == {"Completed", "Failed"}


@pytest.mark.slow
def test_csv_is_quoted_against_formulas(account: Account) -> None:
    result = account.report("--since", "2026-10-01", "--by", "tag:team", "--csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["group"] for row in rows] == ["video", "'=1+1", "", ""]
    assert rows[-1]["month"] == "total"
    assert float(rows[-1]["cost_usd"]) == 27 * 2 * HOURLY


@pytest.mark.slow
def test_unknown_price_is_at_least_and_not_zero(account: Account) -> None:
    account.add(
        "e--256px-0001", datetime(2026, 10, 4, tzinfo=UTC), 3, instance_type="ml.new.48xlarge"
    )
    document = json.loads(account.report("--since", "2026-10-01", "--by", "run", "--json").stdout)
    assert sums(document)["2026-10", "e"] is None
    assert document["total"]["cost_usd"] is None
    assert document["total"]["cost_at_least_usd"] == 27 * 2 * HOURLY
    assert "≥ $675.00" in account.report("--since", "2026-10-01").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--report", "--by", "colour"), "--by: 'colour' must be tag:KEY or one of run, stage"),
        (("--report", "--since", "May"), "--since: 'May' must be a date such as"),
        (("--since", "2026-09-01"), "--since: requires --report"),
        (("run.yaml", "--report"), "--report: totals the jobs of all runs; remove RUN"),
        (("--report", "--explain"), "--report: cannot be combined with --explain"),
    ],
)
def test_wrong_options_are_one_line(
    cli: Cli, aws: Aws, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    write_run(tmp_path)
    result = cli("cost", *options, "--region", "us-east-1", network="loopback", env=aws.environment)
    assert result.returncode == 2
    assert message in one_line(result.stderr)
