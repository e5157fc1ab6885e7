"""Lists runs by their jobs: those of an account, or those whose nodes stored records in a place."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.spent import spent_usd
from sm_train.toolkit.platforms.adapters import adapters
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.terminal.formatting import format_usd
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
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


def listed_jobs(places: Sequence[str], options: dict[str, Any], since: datetime) -> list[RunJob]:
    """Return the jobs since ``since``, oldest first: of the account, or of the runs in ``places``.

    Places are folders and buckets; ``options`` are the global ones.

    Raises:
        UserError: a place cannot be read, or is none.
    """
    if not places:
        return [job for adapter in adapters() for job in adapter.jobs_since(since, options)]
    for place in places:
        if not (place.startswith("s3://") or Path(place).is_dir()):
            raise UserError(f"{place}: no such folder; name a bucket as s3://BUCKET, or a folder")
    runs = [
        run for place in places for adapter in adapters() for run in adapter.runs_in(place, options)
    ]
    jobs = [job for run in runs for job in run.jobs() if job.created >= since]
    return sorted(jobs, key=lambda job: (job.created, job.name))


def list_runs(jobs: Sequence[RunJob], now: datetime) -> list[ListedRun]:
    """Return the runs of ``jobs`` (oldest first), newest job first.

    Number and dollars count these jobs only.
    """
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


def show_runs(runs: list[ListedRun], region: str | None, where: str, console: Console) -> None:
    """Print the runs as a table; ``region`` is that of all places, ``where`` names them."""
    if not runs:
        console.print(f"No run had a recent job in {where}.", markup=False, soft_wrap=True)
        return
    header = ("run", "stage", "status", "cluster", "jobs", "since", "spent")
    table = rich_table(header, right=("jobs", "spent"))
    for run in runs:
        table.add_row(
            run["run"],
            run["stage"],
            run["status"],
            f"{run['instances']} × {run['instance_type']}"
            + ("" if region in (None, run["region"]) else f" in {run['region']}"),
            str(run["jobs"]),
            run["created"][:16].replace("T", " "),
            format_usd(run["spent_usd"]),
        )
    console.print(table, markup=False)
