"""A run's training jobs as SageMaker tells of them: no laptop has to remember anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from sm_train.estimators.request.training import PLACE_TAG, REGIONS_TAG, RUN_TAG, STAGE_TAG
from sm_train.toolkit.aws.session import for_region, translate_aws_errors

ENDED = ("Completed", "Failed", "Stopped", "Deleting")
"""Statuses of jobs that cost nothing any more. One that is not known yet may cost something."""

FROM_STEP_TAG, CAUSE_TAG = "sm-train:from-step", "sm-train:cause"
"""A job's tags: the step of the checkpoint that it goes on from, and why it was started."""

CHAIN_TAG, STOPPED_TAG = "sm-train:chain", "sm-train:stopped-for"
"""A job's tags: whether the next stage follows by itself (on, off), and why it was stopped."""

_OURS = re.compile(r"--.+-\d{4,}$")


@dataclass(frozen=True)
class TrainingJob:
    """One job of a run. Times are aware; ``description`` is DescribeTrainingJob's answer."""

    name: str
    run: str
    stage: str
    status: str
    tags: Mapping[str, str]
    description: Mapping[str, Any]

    @property
    def live(self) -> bool:
        return self.status not in ENDED

    @property
    def attempt(self) -> int:
        """Counted from 1 within the stage."""
        return int(self.name.rpartition("-")[2])

    @property
    def secondary(self) -> str:
        """What it is doing within its status; SageMaker adds new ones now and then."""
        return str(self.description.get("SecondaryStatus", ""))

    @property
    def failure(self) -> str:
        """SageMaker's reason, in one line; empty where it gives none."""
        return " ".join(str(self.description.get("FailureReason", "")).split())

    @property
    def arn(self) -> str:
        return str(self.description["TrainingJobArn"])

    @property
    def region(self) -> str:
        return self.arn.split(":")[3]

    @property
    def regions(self) -> tuple[str, ...]:
        """Where the run may have jobs, its own region first."""
        return tuple(self.tags.get(REGIONS_TAG, self.region).split())

    @property
    def place(self) -> int:
        """Which of the run's places it is at (estimators.run_places)."""
        return int(self.tags.get(PLACE_TAG, 0))

    @property
    def created(self) -> datetime:
        created: datetime = self.description["CreationTime"]
        return created

    @property
    def started(self) -> datetime | None:
        """When billing began."""
        return self.description.get("TrainingStartTime")

    @property
    def ended(self) -> datetime | None:
        return self.description.get("TrainingEndTime")

    @property
    def waited_out(self) -> bool:
        """Whether it was given up because no machines came within cluster.max_pending.

        SageMaker's model names no status for that, so the wait itself counts.
        """
        longest = self.description.get("StoppingCondition", {}).get("MaxPendingTimeInSeconds")
        end = self.ended or self.description.get("LastModifiedTime")
        if self.live or longest is None or self.started is not None or end is None:
            return False
        return bool((end - self.created).total_seconds() >= longest)

    @property
    def chain(self) -> bool:
        """Whether the next stage follows by itself."""
        return self.tags.get(CHAIN_TAG) == "on"

    @property
    def spot(self) -> bool:
        return bool(self.description.get("EnableManagedSpotTraining"))

    @property
    def capacity(self) -> str:
        """How the billed seconds are priced.

        Spot's saving is in its billed seconds, 1 − BillableTimeInSeconds ÷ TrainingTimeInSeconds
        (SageMaker developer guide), so they cost what on-demand ones do; a plan is prepaid.
        """
        plan = self.description["ResourceConfig"].get("TrainingPlanArn")
        return "training-plan" if plan else "on-demand"

    @property
    def machines(self) -> tuple[str, int]:
        """Type and number of what is billed: of ordered preferences, what was selected."""
        resources = self.description["ResourceConfig"]
        if "SelectedInstanceType" in resources:
            return resources["SelectedInstanceType"], resources["SelectedInstanceCount"]
        if "InstanceType" in resources:
            return resources["InstanceType"], resources["InstanceCount"]
        [first, *_] = resources.get("InstanceGroups") or resources["InstancePreferences"]
        return first["InstanceType"], first.get("InstanceCount", resources.get("InstanceCount", 1))

    @property
    def hosts(self) -> list[str]:
        """What SageMaker calls its machines."""
        return [f"algo-{number}" for number in range(1, self.machines[1] + 1)]

    @property
    def checkpoints(self) -> str:
        """The S3 prefix of its stage's checkpoints."""
        return str(self.description["CheckpointConfig"]["S3Uri"])

    @property
    def bucket(self) -> str:
        return self.checkpoints.split("/")[2]

    def billable_seconds(self, now: datetime) -> float:
        """Billed so far; of a live job those since its start. Waiting is not billed."""
        seconds = self.description.get("BillableTimeInSeconds")
        if seconds is not None:
            return float(seconds)
        if self.started is None:
            return 0.0
        return max(0.0, ((self.ended or now) - self.started).total_seconds())

    def window(self, now: datetime) -> tuple[float, float]:
        """From when to when it was billed, Unix seconds; spot bills a part of what passed."""
        end = (self.ended or now).timestamp()
        if self.spot and self.started is not None:
            return self.started.timestamp(), end
        return end - self.billable_seconds(now), end


def jobs_of_run(session: Any, run: str) -> list[TrainingJob]:
    """Every job whose tag names ``run``, the oldest first, from whichever of its regions."""
    found = _everywhere(session, NameContains=f"{run}--")
    return [job for job in found if job.run == run]


def jobs_since(session: Any, moment: datetime) -> list[TrainingJob]:
    """The jobs of all runs of the session's region that were made since ``moment``, the oldest
    first; with those that they had in other regions.
    """
    found = _everywhere(session, CreationTimeAfter=moment)
    here = {job.run for job in found if session.region_name in job.regions}
    return [job for job in found if job.run in here]


def _everywhere(session: Any, **choice: Any) -> list[TrainingJob]:
    """Jobs of the session's region and of those that their tags name."""
    found = list(_tagged(session, **choice))
    seen = {session.region_name}
    while others := {region for job in found for region in job.regions} - seen:
        for region in sorted(others):
            found += _tagged(for_region(session, region), **choice)
        seen |= others
    return sorted(found, key=lambda job: (job.created, job.name))


def find_job(session: Any, name: str) -> TrainingJob | None:
    """The job called ``name``; None where there is none, or it is not of a run."""
    description = described(session, name)
    return None if description is None else _with_tags(session, description)


def may_be_job(name: str) -> bool:
    """Whether SageMaker would take ``name`` for a job's."""
    return len(name) <= 63 and name.replace("-", "").isalnum()


def again(session: Any, job: TrainingJob) -> TrainingJob:
    """The job as it is now."""
    return find_job(for_region(session, job.region), job.name) or job


def is_foreign(session: Any, name: str) -> bool:
    """Whether a job has that name that is not of a run."""
    description = described(session, name)
    return description is not None and _with_tags(session, description) is None


def _with_tags(session: Any, description: dict[str, Any]) -> TrainingJob | None:
    with translate_aws_errors("ListTags"):
        tags = _tags(session.client("sagemaker"), description["TrainingJobArn"])
    return _of(description, tags)


def described(session: Any, name: str) -> dict[str, Any] | None:
    """DescribeTrainingJob's answer; None where there is no such job."""
    from botocore.exceptions import ClientError

    with translate_aws_errors("DescribeTrainingJob"):
        try:
            answer: dict[str, Any] = session.client("sagemaker").describe_training_job(
                TrainingJobName=name
            )
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("ValidationException", "ResourceNotFound"):
                raise
            return None
    return answer


def server_time(session: Any) -> datetime:
    """Now by SageMaker's clock: this machine's may be wrong, and a silence would look too long."""
    with translate_aws_errors("ListTrainingJobs"):
        answer = session.client("sagemaker").list_training_jobs(MaxResults=1)
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])


def stop_job(session: Any, job: TrainingJob, reason: str) -> None:
    """Ask the job to checkpoint and end, and note ``reason`` so that every watcher knows it."""
    tag_job(session, job, STOPPED_TAG, reason)
    with translate_aws_errors("StopTrainingJob"):
        for_region(session, job.region).client("sagemaker").stop_training_job(
            TrainingJobName=job.name
        )


def tag_job(session: Any, job: TrainingJob, key: str, value: str) -> None:
    """Note something about the job where every laptop sees it."""
    with translate_aws_errors("AddTags"):
        for_region(session, job.region).client("sagemaker").add_tags(
            ResourceArn=job.arn, Tags=[{"Key": key, "Value": value}]
        )


def _tagged(session: Any, **choice: Any) -> Iterator[TrainingJob]:
    client = session.client("sagemaker")
    with translate_aws_errors("ListTrainingJobs"):
        pages = client.get_paginator("list_training_jobs").paginate(**choice)
        for page in pages:
            for summary in page["TrainingJobSummaries"]:
                # Tags take a call for each job: not for those that cannot be ours.
                if not _OURS.search(summary["TrainingJobName"]):
                    continue
                tags = _tags(client, summary["TrainingJobArn"])
                if RUN_TAG in tags:
                    name = summary["TrainingJobName"]
                    found = _of(client.describe_training_job(TrainingJobName=name), tags)
                    if found is not None:
                        yield found


def _of(description: dict[str, Any], tags: dict[str, str]) -> TrainingJob | None:
    if RUN_TAG not in tags or STAGE_TAG not in tags:
        return None
    return TrainingJob(
        name=description["TrainingJobName"],
        run=tags[RUN_TAG],
        stage=tags[STAGE_TAG],
        status=description["TrainingJobStatus"],
        tags=tags,
        description=description,
    )


def _tags(client: Any, arn: str) -> dict[str, str]:
    pages = client.get_paginator("list_tags").paginate(ResourceArn=arn)
    return {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}
