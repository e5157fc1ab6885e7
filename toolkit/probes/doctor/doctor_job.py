"""Runs the doctor alone as a short job on SageMaker, and returns its verdict."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.cost.assumptions import Assumptions
from sm_train.entrypoints.records.doctor_results import FOLDER
from sm_train.entrypoints.storage.store import store_of
from sm_train.estimators.config.fields import MAX_JOB_NAME
from sm_train.estimators.config.naming import checkpoint_uri, staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.doctor_request import (
    doctor_job_name,
    doctor_request,
    max_doctor_seconds,
)
from sm_train.estimators.request.request_patch import additions
from sm_train.estimators.request.training_request import TrainingRequest
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.checks.training_data import require_shards
from sm_train.toolkit.probes.short_jobs.short_job import ShortJobs
from sm_train.toolkit.probes.short_jobs.short_run import ShortRunPrice, short_run_price
from sm_train.toolkit.records.job_logs import Event
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.training_job import TrainingJob, describe_job
from sm_train.toolkit.submit.run_bundle import bundle_of
from sm_train.toolkit.submit.submission import Submission, prepare, validate
from sm_train.toolkit.submit.submit import session_for_jobs
from sm_train.toolkit.terminal.console import note

if TYPE_CHECKING:
    import boto3


@dataclass(frozen=True)
class DoctorJob:
    """A job that only runs the doctor, and writes its result below ``results_uri``."""

    submission: Submission
    request: TrainingRequest
    price: ShortRunPrice
    results_uri: str

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``--dry-run --json``."""
        return {
            "request": self.request,
            "billable_seconds": self.price.seconds,
            "cost_usd": self.price.usd,
            "max_cost_usd": self.price.max_usd,
            "results": self.results_uri,
        }


@dataclass(frozen=True)
class DoctorOutcome:
    """What an ended doctor job found: its event, and the result that it stored, if it did."""

    job: str
    event: Event
    result: dict[str, Any] | None


def prepare_job(
    config: RunConfig, stage: StageSection, base: Path, region: str, now: datetime
) -> DoctorJob:
    """Build the job that examines the cluster of ``stage``; uses no network.

    Raises:
        UserError: the job's name is too long, or AWS has no image for the region.
    """
    name = doctor_job_name(config, stage.name, now)
    excess = len(name) - MAX_JOB_NAME
    if excess > 0:
        raise UserError(
            f"name: the doctor's job name {name} has {len(name)} characters and SageMaker allows "
            f"{MAX_JOB_NAME}; shorten the run's or the stage's name by {excess}"
        )
    submission = prepare(config, stage.name, bundle_of(config, base), region, now)
    request = doctor_request(submission.requests[0], config, name)
    validate(request)
    return DoctorJob(
        submission=replace(submission, requests=(request,)),
        request=request,
        price=short_run_price(
            config.model_copy(update={"stages": [stage]}),
            region,
            seconds=Assumptions().start_up_seconds + config.doctor.timeout,
            max_seconds=max_doctor_seconds(config),
        ),
        results_uri=f"{checkpoint_uri(config, stage, staging_bucket(config, region))}/{FOLDER}/",
    )


def open_jobs(job: DoctorJob, base: Path, profile: str | None) -> ShortJobs:
    """Open a session and check that the job's shards are there.

    Raises:
        UserError: the role, credentials, a bucket or the shards are missing.
    """
    config, region = job.submission.config, job.submission.region
    jobs = ShortJobs.open(config, base, region, profile)
    instances = job.submission.stages[0].instances if config.train_sharded else 1
    require_shards(jobs.session, config.data.uri, instances)
    return jobs


def start(job: DoctorJob, jobs: ShortJobs) -> RunJob:
    """Start the job.

    Raises:
        UserError: AWS returns an error.
    """
    from sm_train.estimators.sdk.model_trainer import create_training_job

    # A session compares every request that it sends with the one of its first trainer.
    session, bucket = session_for_jobs(job.submission.config, jobs.profile, jobs.region)
    with translate_aws_errors("CreateTrainingJob"):
        create_training_job(
            job.request,
            job.submission.bundle,
            boto_session=session,
            bucket=bucket,
            added=additions(job.submission.config.cluster),
        )
    return _read(job, jobs)


def _read(job: DoctorJob, jobs: ShortJobs) -> RunJob:
    """Return the job as it is now. It has no stage's tag, so it counts as no job of the run."""
    name = job.request["TrainingJobName"]
    description = describe_job(jobs.session, name, jobs.region)
    assert description is not None  # SageMaker keeps jobs
    run, stage = job.submission.config.name, job.submission.stages[0].name
    return TrainingJob.of(name, run, stage, description["TrainingJobStatus"], {}, description)


def wait_for_verdict(job: DoctorJob, started: RunJob, jobs: ShortJobs) -> DoctorOutcome:
    """Wait for the job's end and read its verdict.

    Raises:
        UserError: it logged no verdict, with the cause.
    """
    stop = f"aws sagemaker stop-training-job --training-job-name {started.name}"
    ended = jobs.wait(
        started, f"`{stop} --region {jobs.region}` stops it", lambda: _read(job, jobs)
    )
    events = [event for event in jobs.events(ended, "doctor") if event["kind"] == "doctor"]
    if events:
        try:
            result = _stored_result(jobs.session, job, ended)
        except UserError as error:
            note(f"warning: the stored result cannot be read: {error}")
            result = None
        return DoctorOutcome(ended.name, events[-1], result)
    if ended.status == "Failed":
        raise UserError(jobs.failure(ended), ExitCode.JOB_FAILED)
    raise UserError(
        f"{ended.name}: {ended.status} without a verdict in its log; "
        f"`sm-train diagnose {ended.name}` shows why",
        ExitCode.JOB_FAILED,
    )


def _stored_result(session: boto3.Session, job: DoctorJob, ended: RunJob) -> dict[str, Any] | None:
    """Return the newest result that was stored since the job began; None if there is none."""
    bucket, prefix = split_uri(job.results_uri)
    with translate_aws_errors(job.results_uri):
        store = store_of(session, job.submission.region)
        stored = [
            found
            for found in store.objects(bucket, prefix)
            if found.key.endswith(".json") and found.modified >= ended.created
        ]
        if not stored:
            return None
        newest = max(stored, key=lambda found: found.modified)
        document: dict[str, Any] = json.loads(store.get(bucket, newest.key))
    return document
