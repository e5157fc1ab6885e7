"""The runs of an account, from the tags of their jobs."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.costing.spent import spent_usd
from sm_train.toolkit.jobs.training_job import jobs_since
from sm_train.toolkit.terminal.formatting import format_usd

if TYPE_CHECKING:
    from rich.console import Console


def list_runs(session: Any, since: datetime, now: datetime) -> list[dict[str, Any]]:
    """One entry a run, that of the newest job first; dollars are of the jobs since ``since``."""
    jobs = jobs_since(session, since)
    newest, prices = {job.run: job for job in jobs}, price_table()
    runs = []
    for run, job in sorted(newest.items(), key=lambda item: item[1].created, reverse=True):
        own = [one for one in jobs if one.run == run]
        machine, count = job.machines
        runs.append(
            {
                "run": run,
                "stage": job.stage,
                "job": job.name,
                "status": job.status,
                "secondary_status": job.secondary,
                "jobs": len(own),
                "instance_type": machine,
                "instances": count,
                "region": job.region,
                "created": job.created.isoformat(),
                "spent_usd": spent_usd(own, prices, now),
            }
        )
    return runs


def show_runs(runs: list[dict[str, Any]], region: str, console: Console) -> None:
    """A table for people."""
    from rich.table import Table

    if not runs:
        console.print(f"No run had a job in {region} lately.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "stage", "status", "cluster", "jobs", "since", "spent"):
        table.add_column(name, justify="right" if name in ("jobs", "spent") else "left")
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
    console.print(table)
