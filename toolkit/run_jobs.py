"""The training jobs of a run, as SageMaker and their event lines tell of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from sm_train.cost.actual import Job
from sm_train.cost.estimate import Purchase, hourly_price
from sm_train.cost.prices import PriceTable
from sm_train.cost.timeline import Timeline, timeline
from sm_train.estimators.run_config import RunConfig
from sm_train.toolkit.aws import refusals_in_words
from sm_train.toolkit.cloudwatch_logs import search
from sm_train.toolkit.event_log import Event, parse_events

Description = dict[str, Any]


def describe_jobs(session: Any, config: RunConfig) -> list[Description]:
    """Every job of the run, the oldest first, as DescribeTrainingJob answers.

    A job belongs to the run whose name its ``sm-train:run`` tag carries; names alone could be
    another run's.
    """
    stages = "|".join(re.escape(stage.name) for stage in config.stages)
    ours = re.compile(rf"^{re.escape(config.name)}-(?:{stages})-\d{{14}}\b.*$")
    client = session.client("sagemaker")
    found = []
    with refusals_in_words("ListTrainingJobs"):
        pages = client.get_paginator("list_training_jobs").paginate(
            NameContains=config.name, SortBy="CreationTime", SortOrder="Ascending"
        )
        for page in pages:
            for summary in page["TrainingJobSummaries"]:
                if not ours.match(summary["TrainingJobName"]):
                    continue
                tags = _tags(client, summary["TrainingJobArn"])
                if tags.get("sm-train:run") == config.name:
                    description = client.describe_training_job(
                        TrainingJobName=summary["TrainingJobName"]
                    )
                    found.append(description | {"sm-train:stage": tags["sm-train:stage"]})
    return found


def _tags(client: Any, arn: str) -> dict[str, str]:
    pages = client.get_paginator("list_tags").paginate(ResourceArn=arn)
    return {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}


def read_jobs(
    session: Any,
    descriptions: list[Description],
    region: str,
    prices: PriceTable,
    now: datetime,
) -> list[Job]:
    """Each job with its billed seconds up to ``now``, its price and what its lines account for."""
    jobs: list[Job] = []
    reached: dict[str, int] = {}
    for one in descriptions:
        stage = one["sm-train:stage"]
        line = _timeline(session, one, reached.get(stage), now)
        if line is not None:
            reached[stage] = max(line.last_step, reached.get(stage, 0))
        resources = _resources(one)
        purchase = Purchase(region, _capacity(one))
        jobs.append(
            Job(
                name=one["TrainingJobName"],
                stage=stage,
                status=one["TrainingJobStatus"],
                instance_type=resources["InstanceType"],
                instances=resources["InstanceCount"],
                billable_seconds=_billable(one, now),
                price=hourly_price(resources["InstanceType"], purchase, prices),
                timeline=line,
            )
        )
    return jobs


def _resources(one: Description) -> dict[str, Any]:
    """What the job really ran on: of ordered preferences, the one that was selected is billed."""
    resources: dict[str, Any] = one["ResourceConfig"]
    if "SelectedInstanceType" in resources:
        return {
            "InstanceType": resources["SelectedInstanceType"],
            "InstanceCount": resources["SelectedInstanceCount"],
        }
    if "InstanceType" in resources:
        return resources
    [first, *_] = resources.get("InstanceGroups") or resources["InstancePreferences"]
    return {"InstanceCount": 1, **resources, **first}


def _capacity(one: Description) -> str:
    """How the billed seconds are priced.

    Spot's saving is in its billed seconds, 1 − BillableTimeInSeconds ÷ TrainingTimeInSeconds
    (SageMaker developer guide), so they cost what on-demand ones do.
    """
    return "training-plan" if one["ResourceConfig"].get("TrainingPlanArn") else "on-demand"


def _billable(one: Description, now: datetime) -> float:
    """Seconds billed; of a job that still runs, those since its start. Waiting is not billed."""
    seconds = one.get("BillableTimeInSeconds")
    if seconds is not None:
        return float(seconds)
    start: datetime | None = one.get("TrainingStartTime")
    if start is None:
        return 0.0
    end: datetime = one.get("TrainingEndTime") or now
    return max(0.0, (end - start).total_seconds())


def _timeline(
    session: Any, one: Description, previous_step: int | None, now: datetime
) -> Timeline | None:
    billable = _billable(one, now)
    if not billable:
        return None
    events = list(job_events(session, one["TrainingJobName"]))
    if not events:
        return None
    end = (one.get("TrainingEndTime") or now).timestamp()
    if not one.get("EnableManagedSpotTraining"):
        return timeline(events, end - billable, end, previous_step)
    return timeline(events, one["TrainingStartTime"].timestamp(), end, previous_step)


def job_events(session: Any, name: str) -> Iterator[Event]:
    """The event lines of a job's first rank, from all of its log streams."""
    for event in parse_events(search(session, name, '"SMT "')):
        if event["rank"] == 0:
            yield event
