"""A run on SageMaker, with its jobs and its newest launch record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from sm_train.cost.assumptions import Observed
from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.shared_work.storage import Storage, open_storage
from sm_train.estimators.config.naming import checkpoint_uri
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.aws.cloudwatch_logs import newest_line, search
from sm_train.toolkit.aws.cloudwatch_metrics import INSTANCE_METRICS, Series, instance_metrics
from sm_train.toolkit.aws.session import session_in_region
from sm_train.toolkit.costing.history import History, history_uri, write_history
from sm_train.toolkit.costing.measured_speeds import recorded_speeds
from sm_train.toolkit.costing.spent import usd_per_hour
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.checkpoints import StoredCheckpoint, latest_stored, output_keys
from sm_train.toolkit.jobs.event_lines import Event
from sm_train.toolkit.jobs.job_events import job_events
from sm_train.toolkit.jobs.job_streams import job_logs
from sm_train.toolkit.jobs.launch_record import LaunchRecord
from sm_train.toolkit.jobs.live_events import EVENT_PATTERN, live_of, read_live
from sm_train.toolkit.jobs.live_state import LiveState
from sm_train.toolkit.jobs.log_streams import JobLogs
from sm_train.toolkit.jobs.log_tail import LogFollower, follow_log, streams_of
from sm_train.toolkit.jobs.platform import Platform
from sm_train.toolkit.jobs.run_job import RunJob
from sm_train.toolkit.jobs.stage_state import live_or_newest
from sm_train.toolkit.jobs.training_job import (
    AUTO_ADVANCE_TAG,
    SAGEMAKER,
    STOPPED_TAG,
    USER,
    TrainingJob,
    jobs_of_run,
    refresh,
    server_time,
    stop_job,
    tag_job,
)
from sm_train.toolkit.platforms.placed_run import (
    EventFollower,
    JobLogLine,
    LogOptions,
    PlacedRun,
)
from sm_train.toolkit.platforms.sagemaker.job_causes import failed_on_infrastructure

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
