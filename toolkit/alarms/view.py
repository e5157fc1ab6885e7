"""A run's alarms for people, for scripts and for CloudFormation: the same set, three ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sm_train.cost.services import service_prices
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.alarms import (
    PUBLISHERS,
    Alarm,
    MonitoredJob,
    alarms,
    failure_rule,
    rule_name,
    template,
)
from sm_train.toolkit.alarms.alarms import Changes, Removed, rule_request
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.terminal.formatting import format_usd

_RESOURCES, _BYTES = 500, 51_200
"""Most of a template, and most that is taken without S3 (CloudFormation quotas, 2026-11)."""


@dataclass(frozen=True)
class Plan:
    """What is asked for: the alarms of ``jobs`` and the run's rule, which tell ``topic``."""

    config: RunConfig
    region: str
    jobs: tuple[MonitoredJob, ...]
    topic: str

    @property
    def alarms(self) -> list[Alarm]:
        return alarms(self.config, self.jobs, self.topic)

    @property
    def monthly_usd(self) -> float:
        """While they stand; the hours count. EventBridge takes nothing for AWS's own events."""
        return float(service_prices()["alarm_metric"].usd) * sum(one.metrics for one in self.alarms)

    def document(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "run": self.config.name,
            "region": self.region,
            "topic": self.topic,
            "jobs": [job.name for job in self.jobs],
            "cost_per_month_usd": round(self.monthly_usd, 2),
        }

    def requests(self) -> dict[str, Any]:
        """What would be sent, as boto3 takes it."""
        rule = failure_rule(self.config.name, self.region, self.topic)
        return self.document() | {
            "put_rule": rule_request(rule),
            "put_targets": {"Rule": rule["Name"], "Targets": rule["Targets"]},
            "put_metric_alarm": [alarm.request for alarm in self.alarms],
        }

    def question(self) -> str:
        count = len(self.alarms)
        what = f"{count} alarms and a rule" if count else "a rule"
        return f"Make {what} for {self.config.name}, {format_usd(self.monthly_usd)} a month?"


def changed(plan: Plan, changes: Changes) -> dict[str, Any]:
    """What was done, for scripts."""
    return plan.document() | {
        "rule": rule_name(plan.config.name),
        "alarms": list(changes.put),
        "removed": list(changes.removed),
    }


def changed_words(plan: Plan, changes: Changes) -> Iterator[str]:
    """What was done and what stays, for people."""
    run = plan.config.name
    yield f"{plan.topic} is told when a job of {run} fails or is cut short"
    for job in plan.jobs:
        own = [name.rpartition("/")[2] for name in changes.put if f"/{job.name}/" in name]
        yield f"{job.name}: {', '.join(own)}"
    yield from unwatched_words(plan.config, plan.jobs)
    if not plan.jobs:
        yield "no job is live; the one that submit, resume or watch starts gets its alarms then"
    if changes.removed:
        yield f"alarms of ended jobs that were removed: {len(changes.removed)}"
    yield (
        f"An ended job's alarms stay silent. They go when the next job starts or `watch` sees the "
        f"run done; to remove all: sm-train alarms {run} --remove"
    )


def unwatched_words(config: RunConfig, jobs: Sequence[MonitoredJob]) -> Iterator[str]:
    """What has no alarm, and why."""
    if config.entry is not None:
        yield (
            f"entry: {config.entry} is started in place of ours and says no heartbeats: "
            "no alarms on them"
        )
    for job in jobs:
        if job.machines is None:
            yield (
                f"{job.name}: SageMaker has not chosen its machines (cluster.alternatives): no "
                "alarms on GPUs and disks until the same command is given again"
            )


def removed_document(run: str, removed: Removed) -> dict[str, Any]:
    return {
        "run": run,
        "removed": list(removed.alarms),
        "rule": removed.rule,
        "topic": removed.topic,
    }


def removed_words(run: str, removed: Removed) -> Iterator[str]:
    names = [*removed.alarms, *filter(None, (removed.rule, removed.topic))]
    if not names:
        yield f"{run}: has no alarms"
    for name in names:
        yield f"removed {name}"


def cloudformation(
    config: RunConfig,
    region: str,
    jobs: Sequence[MonitoredJob],
    topic: str | None,
    email: str | None,
) -> dict[str, Any]:
    """The template.

    Raises:
        UserError: there are more machines than a template can hold alarms for.
    """
    document = template(config, region, jobs, topic, email)
    count = len(document["Resources"])
    if count > _RESOURCES:
        raise UserError(
            f"--cloudformation: {count} resources, and a template holds {_RESOURCES}; "
            f"`sm-train alarms {config.name}` without it makes any number",
            ExitCode.PREFLIGHT,
        )
    return document


def as_yaml(document: dict[str, Any]) -> str:
    """The template as text; CloudFormation refuses YAML's pointers to what was written before."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    text: str = yaml.dump(document, Dumper=Plain, sort_keys=False, width=100)
    return text


def deploy_words(
    config: RunConfig, text: str, jobs: Sequence[MonitoredJob], *, made: bool
) -> Iterator[str]:
    """What to do with the template, for people."""
    run = config.name
    for job in jobs:
        yield f"for {job.name}"
    if not jobs:
        yield "no job is live: the template holds the rule alone"
    yield from unwatched_words(config, jobs)
    bucket = " --s3-bucket BUCKET" if len(text.encode()) > _BYTES else ""
    yield f"aws cloudformation deploy --stack-name sm-train-{run} --template-file FILE{bucket}"
    yield (
        "A stack does not follow the run: print and deploy it anew, by the run's name, for another "
        f"job. What `sm-train alarms {run}` made has the same names: --remove it first"
    )
    if not made:
        yield f"The topic's policy must let {' and '.join(PUBLISHERS)} publish"
