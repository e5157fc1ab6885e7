"""Finds the run on SageMaker that a command names, with its jobs and its newest launch record."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.platforms import KubernetesSection, SlurmSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.session import open_session, resolve_region, session_in_region
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.job_streams import job_logs
from sm_train.toolkit.jobs.launch_record import DamagedRecordError, read_record
from sm_train.toolkit.jobs.log_streams import JobLogs
from sm_train.toolkit.jobs.run_job import RunJob
from sm_train.toolkit.jobs.training_job import (
    TrainingJob,
    describe_job,
    jobs_of_run,
    jobs_since,
)
from sm_train.toolkit.platforms.adapters import Adapter, NoRunError, adapters
from sm_train.toolkit.platforms.find_run import find_run, local_run_hint
from sm_train.toolkit.platforms.parse_target import run_target
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.platforms.sagemaker.sagemaker_run import SageMakerRun
from sm_train.toolkit.platforms.target import Kind, Target
from sm_train.toolkit.run_file import load
from sm_train.toolkit.settings import default_profile

if TYPE_CHECKING:
    import boto3


class _SageMaker(Adapter):
    """Finds runs by the tags of their jobs, in all regions that these name."""

    def find(self, target: Target, options: dict[str, Any]) -> PlacedRun | None:
        if target.kind is Kind.RUN_FOLDER:
            return None
        if target.kind is not Kind.RUN_FILE:
            run = _run_of_name(_open(None, options), target.text)
            return _as_given(run, options)
        config = load(target.path)
        if config.is_outside_of_aws:
            raise NoRunError(_elsewhere(target.text, None))
        run = run_of_config(_open(config.region, options), config)
        return _as_given(run, options)

    def logs_of_job(self, name: str, options: dict[str, Any]) -> JobLogs | None:
        session = _open(None, options)
        return None if describe_job(session, name) is None else job_logs(session, name)

    def jobs_since(self, since: datetime, options: dict[str, Any]) -> list[RunJob]:
        return [*jobs_since(_open(None, options), since)]


ADAPTER = _SageMaker()


def _as_given(run: SageMakerRun, options: dict[str, Any]) -> SageMakerRun:
    """Return the run with the options that find it without its file."""
    profile = options["profile"]
    region_option, profile_option = options_elsewhere(run.region, profile)
    given = f"{region_option}{profile_option}"
    return replace(run, profile=profile, given=given, given_profile=profile_option)


def options_elsewhere(region: str, profile: str | None) -> tuple[str, str]:
    """Return the options for region and profile that commands in another folder need, each after a
    blank; those that this machine's defaults make needless are empty.
    """
    region_option = profile_option = ""
    try:
        default = resolve_region(None, None, profile)
    except UserError:
        default = None
    if region != default:
        region_option = f" --region {region}"
    if profile is not None and profile != default_profile():
        profile_option = f" --profile {shlex.quote(profile)}"
    return region_option, profile_option


def _run_of_name(session: boto3.Session, target: str) -> SageMakerRun:
    """Return the run that a name of a run, a stage or a job stands for.

    It is found from any of its regions: the jobs' tags name its home region.

    Raises:
        NoRunError: there is no such run in the region, or it left no record.
        UserError: AWS returns an error.
    """
    name, _, rest = target.partition("--")
    jobs = jobs_of_run(session, name)
    named = [job for job in jobs if not rest or target == job.name or rest == job.stage]
    if not named:
        raise NoRunError(
            f"{target}: neither a run file here nor a run or job of sm-train in "
            f"{session.region_name}; `sm-train list` shows all runs"
        )
    home, bucket = _home(jobs)
    session = session_in_region(session, home)
    try:
        record = None if bucket is None else read_record(session, bucket, name, jobs[-1].name)
    except DamagedRecordError as error:
        raise NoRunError(str(error)) from None
    if bucket is None or record is None:
        raise NoRunError(f"{name}: {jobs[-1].name} left no record in S3; give the run file instead")
    return SageMakerRun(
        target=name,
        config=record.config,
        region=home,
        bucket=bucket,
        stage=named[-1].stage if rest else None,
        job=target if target == named[-1].name else None,
        session=session,
        record=record,
        found=tuple(jobs),
    )


def run_of_config(session: boto3.Session, config: RunConfig) -> SageMakerRun:
    """Return the run that a run file describes, with its jobs in the session's region.

    A damaged launch record counts as none, with a warning.

    Raises:
        UserError: AWS returns an error.
    """
    region = session.region_name
    bucket, record = staging_bucket(config, region), None
    jobs = jobs_of_run(session, config.name)
    if jobs:
        try:
            record = read_record(session, _home(jobs)[1] or bucket, config.name, jobs[-1].name)
        except DamagedRecordError as error:
            sys.stderr.write(f"warning: {error.problem}; the run file counts instead\n")
    return SageMakerRun(
        target=config.name,
        config=config,
        region=region,
        bucket=bucket,
        session=session,
        record=record,
        found=tuple(jobs),
    )


def _home(jobs: Sequence[TrainingJob]) -> tuple[str, str | None]:
    """Return the run's home region, and its bucket there, which holds the launch records."""
    home = jobs[-1].regions[0]
    return home, next((job.bucket for job in reversed(jobs) if job.region == home), None)


def open_run(text: str, options: dict[str, Any], *, where_newest: bool = False) -> SageMakerRun:
    """Return the run that a user names, for a command that works on SageMaker only.

    With ``where_newest`` its newest job must be there, and not on a cluster.

    Raises:
        UserError: there is no such run, it is on another platform, or AWS returns an error.
    """
    target = run_target(text)
    _require_sagemaker(target, options)
    with local_run_hint(target):
        found = ADAPTER.find(target, options)
    if not isinstance(found, SageMakerRun):
        raise UserError(_elsewhere(text, None))
    sections = (found.config.kubernetes, found.config.slurm)
    if where_newest and sections != (KubernetesSection(), SlurmSection()):
        newest = find_run(text, options)
        if not isinstance(newest, SageMakerRun):
            raise UserError(
                f"{_elsewhere(text, newest)}; if its job has ended, --take-over resumes it here"
            )
    return found


def open_session_for(text: str, options: dict[str, Any]) -> tuple[boto3.Session, str]:
    """Open a session in the region of ``text``, if it is a run file, or of the options.

    Raises:
        UserError: it names a run on another platform, or there are no credentials.
    """
    target = run_target(text)
    if target.kind is Kind.RUN_FOLDER:
        _require_sagemaker(target, options)
    configured = None
    if target.kind is Kind.RUN_FILE:
        config = load(target.path)
        if config.is_outside_of_aws:
            _require_sagemaker(target, options)
        configured = config.region
    with local_run_hint(target):
        session = _open(configured, options)
    return session, session.region_name


def _require_sagemaker(target: Target, options: dict[str, Any]) -> None:
    """Refuse a run that another platform trains, or that SageMaker cannot have.

    Raises:
        UserError: it is one.
    """
    for adapter in adapters():
        if adapter is ADAPTER:
            continue
        run = adapter.find(target, options)
        if run is None:
            continue
        is_live = any(job.live for job in run.jobs())
        if target.kind is Kind.RUN_FOLDER or run.config.is_outside_of_aws or is_live:
            raise UserError(_elsewhere(target.text, run))
    if target.kind is Kind.RUN_FILE and load(target.path).is_outside_of_aws:
        raise UserError(_elsewhere(target.text, None))


def _elsewhere(text: str, run: PlacedRun | None) -> str:
    kind = "a run on Kubernetes or Slurm" if run is None else run.kind
    command = "sm-train manifest RUN --to KIND" if run is None else run.resume_command
    return f"{text}: is {kind}; this command works on SageMaker. To continue: {command}"


def _open(configured: str | None, options: dict[str, Any]) -> boto3.Session:
    region = resolve_region(options["region"], configured, options["profile"])
    sessions = options.get("sessions", {})
    if region not in sessions:
        sessions[region] = open_session(options["profile"], region)
    session: boto3.Session = sessions[region]
    return session
