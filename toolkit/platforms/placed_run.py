"""One protocol for a run on any platform: commands read, follow and stop a run by it alone.

A platform's adapter subclasses :class:`PlacedRun` in a folder of its own, and is found by the table
in ``adapters.py``.
"""

from __future__ import annotations

import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from sm_train.cost.assumptions import Observed
from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.entrypoints.storage.storage import Storage
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.records.checkpoints import StoredCheckpoint
from sm_train.toolkit.records.job_logs import (
    Event,
    JobLogs,
    cause_of,
    node_blocks,
    parse_events,
)
from sm_train.toolkit.records.live_state import LiveState
from sm_train.toolkit.records.run_job import Platform, RunJob
from sm_train.toolkit.records.stage_state import StageState

if TYPE_CHECKING:
    from sm_train.toolkit.aws.cloudwatch_metrics import Series


@dataclass(frozen=True)
class JobLogLine:
    """A line of a job's log: ``time`` in Unix seconds, ``node`` such as ``algo-1``.

    Both are None for a line of a local run that is not an event: its log is that of all nodes.
    """

    time: float | None
    node: str | None
    message: str


@dataclass(frozen=True)
class LogOptions:
    """Which lines of a log: since a Unix time, of one node, and those that are still to come.

    ``on_error`` is called with each failed poll of ``follow``.
    """

    since: float = 0.0
    node: int | None = None
    follow: bool = False
    on_error: Callable[[str], None] = lambda _: None


class EventFollower(Protocol):
    """Reads a live job's new events, again and again."""

    @property
    def pause(self) -> float:
        """Seconds until the next poll."""

    @property
    def error(self) -> UserError | None:
        """The error of the last poll; None if it succeeded."""

    def poll(self) -> LiveState:
        """Return the state of the events since the last poll.

        Raises:
            UserError: they cannot be read, and a later poll will not change that.
        """


class _Configured(ABC):
    """What has the settings of a run; reading them may fail."""

    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class PlacedRun(_Configured):
    """A run on a platform, as it was when it was found. A subclass has its ``config``.

    ``target`` is how the user named it, which commands repeat. ``region`` is that of its prices,
    empty for a machine that has none. ``bucket`` holds its code and checkpoints, None if that is
    unknown. ``stage`` and ``job`` are set if the user named one.

    All methods raise :class:`UserError` if what the platform knows cannot be read.
    """

    target: str
    region: str
    bucket: str | None = None
    stage: str | None = None
    job: str | None = None
    given: str = ""
    """The global options that commands about it need in another folder, after a blank."""

    watcher: ClassVar[str] = "sm_train.toolkit.runs.watch.platform_watch"
    """The module whose ``poll`` does what the run needs."""
    longest_pause: ClassVar[float] = float("inf")
    """Longest interval between polls of `watch`, in seconds."""
    starts_jobs: ClassVar[bool] = False
    """Whether sm-train starts its jobs, so that `watch` restarts them and starts stages."""
    has_log_per_node: ClassVar[bool] = True
    """Whether each of its nodes has a log of its own."""
    unwatched: ClassVar[tuple[str, ...]] = ()
    """What nothing does without a watch, besides a stop at the budget."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def is_only_place(self) -> bool:
        """Whether no other platform can have jobs of the run that the user named."""
        return False

    # ------------------------------------------------------------------ words

    @property
    @abstractmethod
    def platform(self) -> Platform:
        """The platform of its newest job."""

    @property
    def kind(self) -> str:
        """What it is, in messages."""
        return f"a run on {self.platform.title}"

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it is, such as ``in us-east-1``."""

    @property
    def short_place(self) -> str:
        return self.platform.title

    @property
    def origin(self) -> str:
        """Where its settings come from, in messages."""
        return f"settings of {self.kind}"

    @property
    @abstractmethod
    def resume_command(self) -> str:
        """The command that continues it."""

    @property
    def sample_target(self) -> str:
        """What `sample` takes for its newest model."""
        return self.target

    def start_command(self, stage: str) -> str:
        """Return the command that starts the first job of a stage; not all need its name."""
        del stage
        return self.resume_command

    def diagnose_command(self, job: RunJob) -> str:
        """Return the command that diagnoses one of its jobs."""
        del job
        return self.command("diagnose")

    def command(self, name: str) -> str:
        """Return the command ``name`` about the run."""
        return f"sm-train{self.given} {name} {shlex.quote(self.target)}"

    # ------------------------------------------------------------------ state

    def now(self) -> datetime:
        """Return the time by the platform's clock."""
        return datetime.fromtimestamp(time.time(), UTC)

    @abstractmethod
    def refreshed(self) -> Self:
        """Return the run as it is now."""

    def with_config(self, config: RunConfig) -> Self:
        """Return the run with other settings, such as a run file that has changed since."""
        changed: dict[str, Any] = {"config": config}
        return replace(self, **changed)

    @abstractmethod
    def jobs(self, now: datetime | None = None) -> Sequence[RunJob]:
        """Return its jobs, of all stages, oldest first, as they are ``now``."""

    def named_jobs(self) -> list[RunJob]:
        """Return the jobs that the user named, oldest first.

        Raises:
            UserError: there is none.
        """
        found = [
            job
            for job in self.jobs()
            if self.stage in (None, job.stage) and self.job in (None, job.name)
        ]
        if not found:
            raise UserError(self.no_jobs)
        return found

    def newest_job(self) -> RunJob:
        """Return the job that the user named, else the newest.

        Raises:
            UserError: there is none.
        """
        return self.named_jobs()[-1]

    def refreshed_job(self, job: RunJob) -> RunJob:
        """Return a job as it is now."""
        jobs = self.refreshed().jobs()
        return next((each for each in reversed(jobs) if each.name == job.name), job)

    @property
    def no_jobs(self) -> str:
        """Why it has no job yet, and how to start one."""
        return f"{self.target}: has no job yet; to start one: {self.resume_command}"

    def latest_start(self) -> float | None:
        """Return when its newest job was started, in Unix seconds; None without any."""
        jobs = self.jobs()
        return jobs[-1].created.timestamp() if jobs else None

    @abstractmethod
    def live(self, job: RunJob) -> LiveState:
        """Return the state of a job's newest events."""

    @abstractmethod
    def storage(self, job: RunJob) -> Storage:
        """Return the checkpoint folder of a job's stage."""

    @abstractmethod
    def stored(self, stage: StageSection, jobs: Sequence[RunJob]) -> StoredCheckpoint:
        """Return the newest complete checkpoint that the jobs of a stage stored."""

    def recorded_speeds(self) -> Sequence[StageMeasurement]:
        """Return the speeds that `sm-train measure` recorded for it."""
        return ()

    def store_history(self, seen: Observed, speeds: Sequence[Measurement]) -> str | None:
        """Store what its jobs have shown for later estimates; return where, None if nowhere."""
        del seen, speeds
        return None

    def notices(self, stages: Sequence[StageState], now: datetime) -> Sequence[str]:
        """Return what else endangers it, one line each."""
        del stages, now
        return ()

    # ------------------------------------------------------------------ logs

    @abstractmethod
    def log_lines(self, job: RunJob, options: LogOptions) -> Iterator[JobLogLine]:
        """Yield the lines of a job, of several nodes in order of time."""

    @abstractmethod
    def job_logs(self, job: RunJob) -> JobLogs:
        """Return the logs of a job, with those of earlier attempts that may explain its end."""

    def event_blocks(self, job: RunJob) -> Iterator[tuple[str | None, bytes]]:
        """Yield (the node's name, whole lines) of a job's log, at least all events and NCCL's."""
        yield from node_blocks(self.job_logs(job).last)

    def rank_0_events(self, job: RunJob) -> Iterator[Event]:
        """Yield the events of a job's rank 0."""
        for _, block in self.event_blocks(job):
            events = parse_events(block.decode("utf-8", "replace").splitlines())
            yield from (event for event in events if event["rank"] == 0)

    def follow_events(self, job: RunJob) -> EventFollower | None:
        """Return what reads a job's new events between polls; None if polls alone read them."""
        del job
        return None

    def node_metrics(
        self,
        job: RunJob,
        nodes: Sequence[str],
        begin: float,
        end: float,
        now: float,
        names: Sequence[str] | None = None,
    ) -> Mapping[tuple[str, str], Series]:
        """Return what the platform measured on nodes: (node, metric) → values. Unix seconds."""
        del job, nodes, begin, end, now, names
        return {}

    def failed_on_infrastructure(self, job: RunJob) -> bool:
        """Return whether another job may succeed without a change of a failed one."""
        cause = cause_of(self.job_logs(job))
        return cause is not None and bool(cause.retryable)

    # ------------------------------------------------------------------ actions

    @abstractmethod
    def request_stop(self) -> tuple[RunJob, str | None]:
        """Stop the run after a checkpoint: no other job of it starts until it is resumed.

        Returns:
            The job that stops, or the newest one that has ended; and what could not be recorded, or
            has to be done besides.
        """

    def pause_after_stage(self) -> RunJob:
        """Let no stage follow the current one; return the current job.

        Raises:
            UserError: its stages do not follow each other automatically.
        """
        raise self.not_available("after-stage")

    def leave_queue(self) -> str:
        """Take the run out of its platform's queue, now; return the command that did it.

        Raises:
            UserError: its jobs wait in no queue that a program of this machine knows.
        """
        raise UserError(
            f"--cancel: applies to jobs on Kubernetes and Slurm; {self.target} is {self.kind}"
        )

    def not_available(self, option: str) -> UserError:
        """Return the error of an option that only jobs on SageMaker have."""
        return UserError(f"--{option}: applies to jobs on SageMaker; {self.target} is {self.kind}")
