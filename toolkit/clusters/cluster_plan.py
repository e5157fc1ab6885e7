"""The plan that is shown before a job starts on Slurm or Kubernetes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Console
from sm_train.cost.estimate import Estimate
from sm_train.cost.json_document import as_document
from sm_train.entrypoints.clusters.node_record import HEARTBEAT_SECONDS
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.manifests.manifest import Manifest
from sm_train.toolkit.planning.scope import WATCHERS, Enforcer, enforcement_row, scope_rows
from sm_train.toolkit.planning.spent import Projection
from sm_train.toolkit.submit.plan_view import effective_rows, stage_table, starts_now, two_columns


@dataclass(frozen=True)
class ClusterPlan:
    """What is shown before a job starts on Slurm or Kubernetes; see :class:`RunPlan`."""

    config: RunConfig
    manifest: Manifest
    stage: StageSection
    from_step: int
    cost: Estimate
    whole: Estimate
    projection: Projection | None


def show_cluster_plan(plan: ClusterPlan, console: Console) -> None:
    """Print the plan of the whole run and what starts now on a cluster."""
    config, manifest = plan.config, plan.manifest
    console.print(f"\n[bold]Plan for {config.name}[/] on {manifest.title}\n")
    console.print(stage_table(config, plan, console.width))
    console.print()
    samples, _, budget = scope_rows(as_document(plan.whole), config)
    price = as_document(plan.whole)["stages"][0]
    rows = [
        *starts_now(plan),
        (
            "code",
            f"{manifest.code_uri}, or the shared folder"
            if manifest.has_partitions
            else manifest.code_uri,
        ),
        ("start", manifest.commands["start"]),
        ("resume", manifest.commands["resume"]),
        samples,
        budget,
        _enforcement(plan),
        *effective_rows(as_document(plan.whole), config),
        ("price", f"{price['price_source']}, {price['price_date'] or 'undated'}"),
    ]
    console.print(two_columns(rows))
    console.print()


def _enforcement(plan: ClusterPlan) -> tuple[str, str]:
    """Return label and text of what stops a run on a cluster at its budget."""
    config, manifest, document = plan.config, plan.manifest, as_document(plan.whole)
    schedule = manifest.watch_schedule
    if schedule is None:
        return enforcement_row(document, config, ())
    minutes = re.match(r"\*/(\d+) ", schedule)
    # A heartbeat carries the request to the nodes, which then save a checkpoint.
    seconds = 60.0 * (int(minutes[1]) if minutes else 60) + HEARTBEAT_SECONDS
    seconds += config.kubernetes.grace_period
    if manifest.has_partitions:
        crontab = Enforcer(f"Slurm's crontab ({schedule}) once `watch-on` has run", seconds)
        return enforcement_row(document, config, [WATCHERS[0], crontab])
    cron_job = Enforcer(f"the CronJob of the manifest ({schedule})", seconds)
    return enforcement_row(document, config, [cron_job])
