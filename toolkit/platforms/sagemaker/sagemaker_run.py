"""A run on SageMaker, found with its jobs and its newest launch record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from sm_train.cost.assumptions import Observed
from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.entrypoints.storage.storage import Storage, open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.estimators.config.naming import checkpoint_uri
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.aws.cloudwatch_logs import newest_line, search
from sm_train.toolkit.aws.cloudwatch_metrics import INSTANCE_METRICS, Series, instance_metrics
from sm_train.toolkit.aws.session import session_in_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.planning.history import History, history_uri, write_history
from sm_train.toolkit.planning.measured_speeds import recorded_speeds
from sm_train.toolkit.planning.spent import usd_per_hour
from sm_train.toolkit.platforms.placed_run import (
    EventFollower,
    JobLogLine,
    LogOptions,
    PlacedRun,
)
from sm_train.toolkit.platforms.sagemaker.job_causes import failed_on_infrastructure
from sm_train.toolkit.platforms.sagemaker.log_tail import LogFollower, follow_log, streams_of
from sm_train.toolkit.records.checkpoints import StoredCheckpoint, latest_stored, output_keys
from sm_train.toolkit.records.job_logs import Event, JobLogs, job_events
from sm_train.toolkit.records.launch_record import LaunchRecord
from sm_train.toolkit.records.live_state import EVENT_PATTERN, LiveState, live_of, read_live
from sm_train.toolkit.records.run_job import Platform, RunJob
from sm_train.toolkit.records.stage_state import live_or_newest
from sm_train.toolkit.records.training_job import (
    AUTO_ADVANCE_TAG,
    SAGEMAKER,
    STOPPED_TAG,
    USER,
    TrainingJob,
    job_logs,
    jobs_of_run,
    refresh,
    server_time,
    stop_job,
    tag_job,
)

if TYPE_CHECKING:
    import boto3


import shlex
import sys
from typing import TYPE_CHECKING, Any

from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.platforms import KubernetesSection, SlurmSection
from sm_train.toolkit.aws.session import open_session, resolve_region
from sm_train.toolkit.base.settings import default_profile
from sm_train.toolkit.platforms.adapters import Adapter, NoRunError, adapters
from sm_train.toolkit.platforms.find_run import find_run, local_run_hint, run_target
from sm_train.toolkit.platforms.target import Kind, Target
from sm_train.toolkit.records.launch_record import DamagedRecordError, read_record
from sm_train.toolkit.records.training_job import describe_job, jobs_since
from sm_train.toolkit.run_file.run_file import load

if TYPE_CHECKING:
    import boto3


_REVIEWED_LINES = '?"SMT " ?"NCCL version" ?"NET/" ?"Using network"'
"""CloudWatch's filter for events and about 1 % of NCCL's lines."""

_HISTORY_SECONDS = 3600.0
"""How much of the log before its newest line a follower of events starts with."""


@dataclass(frozen=True, kw_only=True)
class SageMakerRun(PlacedRun):
    """A run on SageMaker; ``session`` is in its home region.

    ``region`` and ``bucket`` are its home; jobs may also be in other regions.
    """

    config: RunConfig
    session: boto3.Session
    bucket: str
    record: LaunchRecord | None = None
    """The newest launch record; None if nothing was submitted."""
    found: tuple[TrainingJob, ...] = ()
    """Its jobs when it was found."""
    profile: str | None = None
    """The profile of the session."""
    given_profile: str = ""
    """The part of ``given`` that names the profile."""

    watcher: ClassVar[str] = "sm_train.toolkit.platforms.sagemaker.sagemaker_watch"
    starts_jobs: ClassVar[bool] = True
    unwatched: ClassVar[tuple[str, ...]] = (
        "start another job after a failure",
        "start the next stage",
    )

    @property
    def is_only_place(self) -> bool:
        return self.job is not None

    @property
    def submitted_config(self) -> RunConfig:
        """The config that code is staged for, whatever the run file has become since."""
        return self.record.config if self.record is not None else self.config

    # ------------------------------------------------------------------ words

    @property
    def platform(self) -> Platform:
        return SAGEMAKER

    @property
    def place(self) -> str:
        return f"in {self.region}"

    @property
    def short_place(self) -> str:
        return self.region

    @property
    def origin(self) -> str:
        return f"settings as submitted with {self.found[-1].name}"

    @property
    def resume_command(self) -> str:
        """If a job on another platform wrote the newest checkpoint, the command starts no second
        one and says how the user confirms that the first has ended. Only the user knows that.
        """
        return f"sm-train{self.given} resume {self.name}"

    def diagnose_command(self, job: RunJob) -> str:
        elsewhere = f" --region {job.region}{self.given_profile}"
        option = self.given if job.region == self.region else elsewhere
        return f"sm-train{option} diagnose {job.name}"

    @property
    def no_jobs(self) -> str:
        return f"{self.name}: has no job in {self.region}; `sm-train submit` starts one"

    # ------------------------------------------------------------------ state

    def now(self) -> datetime:
        return server_time(self.session)

    def refreshed(self) -> Self:
        return replace(self, found=tuple(jobs_of_run(self.session, self.name)))

    def jobs(self, now: datetime | None = None) -> tuple[TrainingJob, ...]:
        del now
        return self.found

    def refreshed_job(self, job: RunJob) -> RunJob:
        return refresh(self.session, job)

    def live(self, job: RunJob) -> LiveState:
        return read_live(self.session, job)

    def storage(self, job: RunJob) -> Storage:
        return open_storage(job.checkpoint_uri, S3Access(self.profile, job.region))

    def stored(self, stage: StageSection, jobs: Sequence[RunJob]) -> StoredCheckpoint:
        uri = checkpoint_uri(self.config, stage, self.bucket)
        stored = latest_stored(self.session, uri, jobs)
        newest = live_or_newest(jobs)
        if self.config.entry is None or stored.final or newest is None:
            return stored
        is_completed = newest.status == "Completed"
        return replace(stored, output=is_completed and bool(output_keys(self.session, newest)))

    def recorded_speeds(self) -> Sequence[StageMeasurement]:
        return recorded_speeds(self.session, self.config, self.region)

    def store_history(self, seen: Observed, speeds: Sequence[Measurement]) -> str:
        uri = history_uri(self.config, self.region)
        write_history(self.session, uri, History(seen, tuple(speeds)))
        return uri

    # ------------------------------------------------------------------ logs

    def log_lines(self, job: RunJob, options: LogOptions) -> Iterator[JobLogLine]:
        if options.follow:
            entries = follow_log(
                self.session, job, options.since, options.on_error, node=options.node
            )
        else:
            streams = streams_of(job, options.node)
            entries = search(self.session, streams, region=job.region, since=options.since)
        return (JobLogLine(entry.time, entry.node, entry.message) for entry in entries)

    def job_logs(self, job: RunJob) -> JobLogs:
        return job_logs(session_in_region(self.session, job.region), job.name)

    def event_blocks(self, job: RunJob) -> Iterator[tuple[str | None, bytes]]:
        entries = search(self.session, streams_of(job), region=job.region, pattern=_REVIEWED_LINES)
        return ((entry.node, entry.message.encode("utf-8", "replace")) for entry in entries)

    def rank_0_events(self, job: RunJob) -> Iterator[Event]:
        return job_events(self.session, job.name, job.region)

    def follow_events(self, job: RunJob) -> EventFollower | None:
        """None before the job's first line."""
        newest = newest_line(self.session, job.name, region=job.region)
        if newest is None:
            return None
        return _EventFollower(
            LogFollower(self.session, job, newest - _HISTORY_SECONDS, pattern=EVENT_PATTERN)
        )

    def node_metrics(
        self,
        job: RunJob,
        nodes: Sequence[str],
        begin: float,
        end: float,
        now: float,
        names: Sequence[str] | None = None,
    ) -> dict[tuple[str, str], Series]:
        measure = partial(instance_metrics, self.session, job.name, nodes, begin, end)
        return measure(now=now, region=job.region, names=names or INSTANCE_METRICS)

    def failed_on_infrastructure(self, job: RunJob) -> bool:
        return failed_on_infrastructure(self.session, job)

    # ------------------------------------------------------------------ actions

    def request_stop(self) -> tuple[RunJob, str | None]:
        """Stop the run's live job.

        If no job is live, because the last one failed or a stage is done, the newest job is tagged,
        so that no watcher starts the next.
        """
        run = replace(self, stage=None, job=None)  # whichever of its jobs was named
        job: RunJob = run.newest_job()
        not_tagged = warning = None
        if not job.live:
            try:
                tag_job(self.session, job, STOPPED_TAG, USER)
                tag_job(self.session, job, AUTO_ADVANCE_TAG, "off")
            except UserError as error:
                not_tagged = error
            # A watcher may have started a job just before.
            job = run.refreshed().newest_job()
        # A job that is stopping already keeps its reason.
        if job.live and job.status != "Stopping":
            warning = stop_job(self.session, job, USER, usd_per_hour=usd_per_hour(job))
        elif not_tagged is not None:
            raise not_tagged
        return self.refreshed_job(job), warning

    def pause_after_stage(self) -> RunJob:
        job = replace(self, stage=None, job=None).newest_job()
        tag_job(self.session, job, AUTO_ADVANCE_TAG, "off")
        return job


class _EventFollower:
    """Folds the events of a follower's lines."""

    def __init__(self, lines: LogFollower) -> None:
        self._lines = lines

    @property
    def pause(self) -> float:
        return self._lines.pause

    @property
    def error(self) -> UserError | None:
        return self._lines.error

    def poll(self) -> LiveState:
        return live_of(self._lines.poll())


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
        run = run_of_config(_open(config.region, options), with_sharding(config))
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
