"""Present a run's alarms as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sm_train.cost.services import service_prices
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.alarm_requests import (
    Alarm,
    MonitoredJob,
    failure_rule,
    job_alarms,
    rule_name,
)
from sm_train.toolkit.runs.alarms.alarms import AlarmChanges, DeletedAlarms
from sm_train.toolkit.terminal.formatting import format_usd


@dataclass(frozen=True)
class AlarmPlan:
    """What `sm-train alarms` is about to create: the alarms of ``jobs`` and the run's rule."""

    config: RunConfig
    region: str
    jobs: tuple[MonitoredJob, ...]
    topic: str

    @cached_property
    def alarms(self) -> list[Alarm]:
        return job_alarms(self.config, self.jobs, self.topic)

    @property
    def monthly_usd(self) -> float:
        """Return the cost while the alarms exist, which AWS bills by the hour.

        EventBridge does not charge for events of AWS services.
        """
        price = float(service_prices()["alarm_metric"].usd)
        return price * sum(alarm.num_metrics for alarm in self.alarms)

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return {
            "run": self.config.name,
            "region": self.region,
            "topic": self.topic,
            "jobs": [job.name for job in self.jobs],
            "cost_per_month_usd": round(self.monthly_usd, 2),
        }

    def requests(self) -> dict[str, Any]:
        """Return the plan with the requests that would be sent, as boto3 takes them."""
        rule = failure_rule(self.config.name, self.region, self.topic)
        return self.document() | {
            "put_rule": rule.request,
            "put_targets": {"Rule": rule_name(self.config.name), "Targets": rule.targets},
            "put_metric_alarm": [alarm.request for alarm in self.alarms],
        }

    def question(self) -> str:
        count = len(self.alarms)
        what = f"{count} alarms and a rule" if count else "a rule"
        return f"Create {what} for {self.config.name}, {format_usd(self.monthly_usd)} a month?"


def changes_document(plan: AlarmPlan, changes: AlarmChanges) -> dict[str, Any]:
    """Return what was created and deleted as JSON."""
    return plan.document() | {
        "rule": rule_name(plan.config.name),
        "alarms": list(changes.put),
        "removed": list(changes.deleted),
    }


def changes_lines(plan: AlarmPlan, changes: AlarmChanges) -> Iterator[str]:
    """Yield what was created and deleted, and how to delete the rest."""
    run = plan.config.name
    yield f"{plan.topic} is notified when a job of {run} fails or is interrupted"
    for job in plan.jobs:
        kinds = [name.rpartition("/")[2] for name in changes.put if f"/{job.name}/" in name]
        yield f"{job.name}: {', '.join(kinds)}"
    yield from _missing_alarm_lines(plan.jobs)
    if not plan.jobs:
        yield "no job is live; submit, resume and watch create the alarms of the next job"
    if changes.deleted:
        yield f"deleted alarms of ended jobs: {len(changes.deleted)}"
    yield (
        "The alarms of an ended job do not fire. They are deleted when the next job starts or "
        f"`watch` sees that the run is complete; to delete all: sm-train alarms {run} --remove"
    )


def _missing_alarm_lines(jobs: Sequence[MonitoredJob]) -> Iterator[str]:
    """Yield which alarms are missing and why."""
    for job in jobs:
        if job.instances is None:
            yield (
                f"{job.name}: SageMaker has not chosen its instances yet (cluster.alternatives): "
                "no GPU and disk alarms until this command runs again"
            )


def deleted_document(run: str, deleted: DeletedAlarms) -> dict[str, Any]:
    """Return what was deleted as JSON."""
    return {
        "run": run,
        "removed": list(deleted.alarms),
        "rule": deleted.rule,
        "topic": deleted.topic,
    }


def deleted_lines(run: str, deleted: DeletedAlarms) -> Iterator[str]:
    names = [*deleted.alarms, *filter(None, (deleted.rule, deleted.topic))]
    if not names:
        yield f"{run}: has no alarms"
    for name in names:
        yield f"deleted {name}"
