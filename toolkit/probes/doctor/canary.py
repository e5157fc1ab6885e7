"""Runs a canary: trains, stops in the middle, resumes and ends, on SageMaker or on this machine.

The procedure is the same for both platforms; only how a job is started, stopped and read differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.probes.doctor.canary_run import Canary
from sm_train.toolkit.probes.short_jobs.short_job import poll
from sm_train.toolkit.records.checkpoints import StoredCheckpoint
from sm_train.toolkit.records.job_logs import Event


@dataclass(frozen=True)
class CanaryJob:
    """One job of a canary as the platform reports it. Times are Unix seconds; None is unknown.

    ``stored`` is the newest complete checkpoint below the stage's prefix, ``model_files`` the files
    of the job's model output.
    """

    name: str
    status: str
    reason: str
    live: bool
    events: tuple[Event, ...]
    stored: StoredCheckpoint
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    phases: tuple[tuple[str, float], ...] = ()
    """The platform's phases before training, with their seconds."""
    billable_seconds: float | None = None
    reported: Mapping[str, str] = field(default_factory=dict)
    """The times and statuses that the platform states, in its own words."""
    encryption: tuple[str | None, str | None] = (None, None)
    """Algorithm and KMS key of the newest complete checkpoint, as the storage reports them."""
    model_files: int | None = None
    model_archives: int | None = None
    """Compressed archives among the model's files."""


@dataclass(frozen=True)
class CanaryResult:
    """What was seen. ``before_stop`` is the first job when its first complete checkpoint was in
    storage, at the time ``stopped`` (Unix seconds); both are None if it ended before.
    """

    first: CanaryJob
    before_stop: CanaryJob | None = None
    stopped: float | None = None
    second: CanaryJob | None = None


class CanaryPlatform(Protocol):
    """Where a canary's jobs run."""

    def start(self, config: RunConfig) -> None:
        """Start the next job of the canary's only stage."""

    def read(self) -> CanaryJob:
        """Return the newest job as it is now."""

    def stop(self) -> None:
        """Stop the newest job: SIGTERM, and time to save a checkpoint."""

    def now(self) -> float:
        """Return the time by the platform's clock, in Unix seconds."""


def run_canary(
    platform: CanaryPlatform, canary: Canary, report: Callable[[str], None], poll_seconds: float
) -> CanaryResult:
    """Run the canary's two jobs and return what was seen. ``report`` prints progress.

    The second job starts only if the first one left a checkpoint. On Ctrl-C, and on an error, the
    live job is stopped.
    """
    try:
        platform.start(canary.config)
        job = _wait(platform, report, poll_seconds, lambda state: state.stored.step is not None)
        result = CanaryResult(job)
        if job.live:
            report(f"{job.name}: checkpoint {job.stored.step} is stored; stopping the job")
            result = replace(result, before_stop=job, stopped=platform.now())
            platform.stop()
            result = replace(result, first=_wait(platform, report, poll_seconds))
        step = result.first.stored.step
        if step is None:
            return result
        report(f"{result.first.name}: {result.first.status}; resuming from checkpoint {step}")
        platform.start(canary.resuming(step))
        return replace(result, second=_wait(platform, report, poll_seconds))
    except BaseException:
        platform.stop()
        raise


def _wait(
    platform: CanaryPlatform,
    report: Callable[[str], None],
    poll_seconds: float,
    until: Callable[[CanaryJob], bool] = lambda job: False,
) -> CanaryJob:
    """Poll until ``until`` is true of the job or it has ended; report each change."""
    return poll(
        platform.read,
        lambda job: not job.live or until(job),
        _describe,
        _describe,
        report,
        poll_seconds,
    )


def _describe(job: CanaryJob) -> str:
    steps = [event["step"] for event in job.events if event["kind"] == "step"]
    progress = f", step {steps[-1]}" if steps else ""
    return f"{job.name}: {job.status}{progress}"


def first_event(events: Sequence[Event], kind: str) -> Event | None:
    """Return the first event of a kind."""
    return next((event for event in events if event["kind"] == kind), None)
