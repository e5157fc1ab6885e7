"""Lists an account's runs by the tags of their jobs."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, TypedDict

from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.costing.spent import spent_usd
from sm_train.toolkit.jobs.training_job import jobs_since
from sm_train.toolkit.terminal.formatting import format_usd
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
    import boto3
    from rich.console import Console


class ListedRun(TypedDict):
    """One run in ``list --json``; stage, status and cluster are those of its newest job."""

    run: str
    stage: str
    job: str
    status: str
    secondary_status: str
    jobs: int
    instance_type: str
    instances: int
    region: str
    created: str
    spent_usd: float | None


def list_runs(session: boto3.Session, since: datetime, now: datetime) -> list[ListedRun]:
    """Return the runs that had jobs since ``since``, newest job first.

    Number and dollars count the jobs created since then only.
    """
    jobs = jobs_since(session, since)
    newest, prices = {job.run: job for job in jobs}, price_table()
    runs: list[ListedRun] = []
    for run, job in sorted(newest.items(), key=lambda item: item[1].created, reverse=True):
        run_jobs = [job for job in jobs if job.run == run]
        instance_type, count = job.instances
        runs.append(
            {
                "run": run,
                "stage": job.stage,
                "job": job.name,
                "status": job.status,
                "secondary_status": job.secondary_status,
                "jobs": len(run_jobs),
                "instance_type": instance_type,
                "instances": count,
                "region": job.region,
                "created": job.created.isoformat(),
                "spent_usd": spent_usd(run_jobs, prices, now),
            }
        )
    return runs


def show_runs(runs: list[ListedRun], region: str, console: Console) -> None:
    """Print the runs as a table."""
    if not runs:
        console.print(f"No run had a recent job in {region}.")
        return
    header = ("run", "stage", "status", "cluster", "jobs", "since", "spent")
    table = rich_table(header, right=("jobs", "spent"))
    for run in runs:
        table.add_row(
            run["run"],
            run["stage"],
            run["status"],
            f"{run['instances']} × {run['instance_type']}"
            + ("" if run["region"] == region else f" in {run['region']}"),
            str(run["jobs"]),
            run["created"][:16].replace("T", " "),
            format_usd(run["spent_usd"]),
        )
    console.print(table, markup=False)
