"""Decides what a run needs next: wait, start a job, stop one, or finish. Pure.

SageMaker's RetryStrategy repeats a job after an InternalServerError only (API reference,
RetryStrategy). After other transient failures (lost capacity, hardware, a stall) the next job is
started here, with a growing delay, until a limit of jobs in a row have left no newer checkpoint.
Failures of the run's own code are never retried: they would repeat and cost the same again.

A run stays at its placement, from stage to stage, until instances cannot be had there or are taken
away. Then the next of its fallbacks is tried, and after the last one the home placement again. It
does not return home while a fallback works: each relocation copies a checkpoint.

Every decision is a function of what SageMaker and S3 report, so two watchers decide alike; the
claim on the job's name (jobs.launch_record) keeps both from acting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sm_train.entrypoints.records.budget import enforced_usd, is_spent
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.base.errors import ExitCode
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.stage_state import StageState, current
from sm_train.toolkit.records.training_job import BUDGET, STALL, USER
from sm_train.toolkit.terminal.formatting import format_duration

MAX_BACKOFF = timedelta(hours=1)

_CAPACITY_CAUSES = (
    *("capacity", "max-pending", "max-wait", "plan-ended", "spot", "spot-interrupted"),
)


@dataclass(frozen=True)
class Cause:
    """Why a job ended before its stage was done, and whether another job may succeed."""

    code: str
    message: str
    retryable: bool

    @property
    def relocates(self) -> bool:
        """Whether another placement may have the capacity that this one lacks."""
        return self.code in _CAPACITY_CAUSES


@dataclass(frozen=True)
class Policy:
    """The run file's retry limits: jobs in a row without a newer checkpoint, first delay, and the
    dollars at which the run is stopped.

    ``placements`` counts the home placement and the fallbacks.
    """

    max_attempts: int
    backoff: timedelta
    placements: int = 1
    budget_usd: float | None = None

    @classmethod
    def of(cls, config: RunConfig, submitted: RunConfig) -> Policy:
        """Return the limits of ``config``, with the placements for which code was staged."""
        budget, recovery = config.budget, config.recovery
        return cls(
            max_attempts=recovery.max_attempts,
            backoff=timedelta(seconds=recovery.backoff),
            placements=1 + len(submitted.recovery.fallbacks),
            budget_usd=enforced_usd(budget.usd, budget.on_exceed) if budget else None,
        )

    def delay(self, fruitless: int, *, relocates: bool) -> timedelta:
        """Return the delay before the next job after ``fruitless`` jobs without a newer checkpoint.

        It doubles with each job, up to :data:`MAX_BACKOFF`. When relocating, each placement is
        tried once before it doubles.
        """
        doublings = max(0, fruitless - 1) // (self.placements if relocates else 1)
        # Twelve doublings of the shortest backoff, 1 s, exceed the cap; 40 overflow a timedelta.
        return min(self.backoff * float(2 ** min(doublings, 12)), MAX_BACKOFF)


@dataclass(frozen=True)
class NoAction:
    """Nothing to do now. ``exit_code`` is that of ``watch --once``, which needs not be OK."""

    message: str
    exit_code: ExitCode = ExitCode.OK


@dataclass(frozen=True)
class StartJob:
    """Start the stage's next job."""

    stage: str
    attempt: int
    from_step: int
    cause: str
    message: str
    auto_advance: bool
    placement: int = 0


@dataclass(frozen=True)
class StopJob:
    """Stop the live job after a checkpoint."""

    job: RunJob
    cause: str
    message: str


@dataclass(frozen=True)
class Finish:
    """Nothing more will happen without the user."""

    exit_code: ExitCode
    message: str


Action = NoAction | StartJob | StopJob | Finish


def next_action(
    stages: Sequence[StageState],
    policy: Policy,
    cause_of: Callable[[RunJob], Cause],
    *,
    spent_usd: float,
    now: datetime,
) -> Action:
    """Return what the run needs now.

    ``cause_of`` diagnoses a failed job; ``spent_usd`` is the most that the run can
    have cost so far.
    """
    stage = current(stages)
    if stage is None:
        return Finish(ExitCode.OK, "the run is done")
    job = stage.job
    over_budget = is_spent(policy.budget_usd, spent_usd)
    if job is not None and job.live:
        return _while_live(stage, job, over_budget, now)
    if stage.other_platform is not None:
        return Finish(ExitCode.USAGE, other_platform_message(stage))
    if over_budget:
        message = f"{stage.name} is not done and budget.usd is spent; raise it to continue"
        return Finish(ExitCode.OVER_BUDGET, message)
    if job is None:
        return _start_stage(stages, stage, policy)
    if stage.state == "no-results":
        return Finish(
            ExitCode.JOB_FAILED,
            f"{job.name}: ended without results: {job.checkpoint_uri} holds no complete checkpoint "
            f"and no final model; check s3:PutObject of the job's role there, then "
            f"`sm-train resume {job.run}`",
        )
    cause = _cause(stage, job, cause_of)
    if not cause.retryable:
        is_saved = cause.code == USER and stage.not_written is None
        code = ExitCode.OK if is_saved else ExitCode.JOB_FAILED
        return Finish(code, f"{job.name}: {cause.message}")
    return _retry(stage, job, cause, policy, now)


def other_platform_message(stage: StageState) -> str:
    """Return why no job of the stage may continue from its newest checkpoint, and the remedies."""
    return (
        f"{stage.name}: a job on {stage.other_platform} wrote its newest checkpoint, of step "
        f"{stage.resumes_from:,}, and may still run; two jobs would write to the same checkpoints: "
        "if it has ended, add --take-over to `sm-train resume`, else give the run another name"
    )


def _while_live(stage: StageState, job: RunJob, over_budget: bool, now: datetime) -> Action:
    if stage.state == "stopping":
        return NoAction(f"{job.name} is stopping")
    if job.phase.silence == "stores":
        return _while_storing(job, over_budget, now)
    if over_budget:
        message = f"{job.name} has spent the budget: stopping it after a checkpoint"
        return StopJob(job, BUDGET, message)
    if stage.state == "stalled":
        message = f"{job.name} has made no progress since step {stage.step}: stopping it"
        if stage.progress.last_activity is None or job.phase.silence == "prepares":
            waited = format_duration(job.seconds_in_phase(now))
            message = f"{job.name} is in phase {job.phase.name} for {waited} without an event"
            message += ": stopping it"
        return StopJob(job, STALL, message)
    if stage.state == "restarting":
        return NoAction(f"{job.platform.title} is restarting {job.name} ({job.secondary_status})")
    return NoAction(f"{job.name} is {stage.state}")


def _while_storing(job: RunJob, over_budget: bool, now: datetime) -> Action:
    """Leave a job alone that stores what it made: a stop would lose it."""
    limit, seconds = job.phase.limit, job.seconds_in_phase(now)
    if limit is not None and seconds > limit.total_seconds():
        return Finish(
            ExitCode.STALLED,
            f"{job.name} has been storing its results for {format_duration(seconds)}, and is "
            f"billed: `{job.stop_command}` stops it, and may lose them",
        )
    budget = " and has spent the budget" if over_budget else ""
    return NoAction(f"{job.name} stores its results{budget}; it ends when they are stored")


def _start_stage(stages: Sequence[StageState], stage: StageState, policy: Policy) -> Action:
    """Start the first job of ``stage`` at the placement of the previous stage's job."""
    previous = [earlier.job for earlier in stages[: stages.index(stage)]]
    if not previous or previous[-1] is None or not previous[-1].auto_advance:
        return Finish(ExitCode.OK, f"paused before {stage.name}: nothing runs, nothing is billed")
    return StartJob(
        stage.name,
        1,
        stage.resumes_from,
        "auto-advance",
        f"{stage.name} is next",
        auto_advance=True,
        placement=previous[-1].placement % policy.placements,
    )


def _cause(stage: StageState, job: RunJob, cause_of: Callable[[RunJob], Cause]) -> Cause:
    """Return why the job ended; ``cause_of`` reads logs, so it comes after tags and statuses."""
    stopped_for = job.stopped_for
    if stopped_for == USER:
        return Cause(USER, "was stopped; `sm-train resume` continues it", retryable=False)
    if stopped_for == STALL:
        return Cause(STALL, "was stopped after a stall", retryable=True)
    if job.got_no_instances:
        return Cause("max-pending", "got no instances within cluster.max_pending", retryable=True)
    if job.status == "Failed":
        return cause_of(job)
    if job.secondary_status == "MaxRuntimeExceeded" and job.ended_with_its_plan:
        return Cause("plan-ended", "was stopped: its training plan has ended", retryable=True)
    if job.secondary_status == "MaxRuntimeExceeded":
        return Cause("max-runtime", "reached cluster.max_runtime", retryable=True)
    if job.secondary_status == "MaxWaitTimeExceeded":
        return Cause("max-wait", "got no spot capacity within cluster.max_wait", retryable=True)
    if job.secondary_status == "Interrupted":
        return Cause("spot", "lost its spot instances", retryable=True)
    if job.status == "Completed":
        message = f"ended at step {stage.resumes_from} of {stage.max_steps}"
        return Cause("ended-early", message, retryable=True)
    if stopped_for == BUDGET:
        return Cause(USER, "was stopped at the budget; raise it to continue", retryable=False)
    return Cause(USER, "was stopped; `sm-train resume` continues it", retryable=False)


def _retry(stage: StageState, job: RunJob, cause: Cause, policy: Policy, now: datetime) -> Action:
    fruitless = attempts_without_progress(stage)
    if fruitless >= policy.max_attempts:
        return Finish(
            ExitCode.CAPACITY if cause.relocates else ExitCode.JOB_FAILED,
            f"{job.name}: {cause.message}; {fruitless} jobs in a row left no newer checkpoint "
            "(recovery.max_attempts); fix the cause, then `sm-train resume`",
        )
    due = (job.ended or job.created) + policy.delay(fruitless, relocates=cause.relocates)
    if now < due:
        seconds = (due - now).total_seconds()
        return NoAction(f"{job.name} {cause.message}; the next job starts in {seconds:.0f} s")
    placement = (job.placement + cause.relocates) % policy.placements
    message = f"{job.name} {cause.message}"
    if placement != job.placement:
        message += "; relocating"
    return StartJob(
        stage.name,
        job.attempt + 1,
        stage.resumes_from,
        cause.code,
        message,
        job.auto_advance,
        placement,
    )


def attempts_without_progress(stage: StageState) -> int:
    """Count the newest jobs in a row that left no checkpoint newer than the one they resumed from.

    A tag holds the step a job resumed from; the first job of a stage has none and began at 0.
    """
    count = 0
    for job in reversed(stage.jobs):
        if (job.from_step or 0) < stage.resumes_from:
            break
        count += 1
    return count
