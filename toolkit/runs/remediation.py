"""What to do about a run: wait, start a job again, stop one, or give up. Pure; it costs money.

SageMaker's RetryStrategy repeats a job after an InternalServerError only (API reference,
RetryStrategy). What it leaves, lost capacity, hardware, a stall, is started again here, with a
growing delay and so many times in a row without a newer checkpoint. The program's own errors never
are: they would happen again and burn the same dollars.

A run stays at the place where it is, from stage to stage, until machines cannot be had or are taken
away there: then the next of its fallbacks is tried, after the last one its own place again. It does
not go back by itself while a place works: each move copies a checkpoint.

Every decision is a function of what SageMaker and S3 say, so two watchers decide alike, and the
names of jobs (estimators.request.job_name) keep them from both acting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sm_train.toolkit.errors import ExitCode
from sm_train.toolkit.jobs.stage_state import StageState, current
from sm_train.toolkit.jobs.training_job import FROM_STEP_TAG, STOPPED_TAG, TrainingJob

_LONGEST_DELAY = timedelta(hours=1)

_OF_CAPACITY = ("capacity", "max-pending", "max-wait", "spot", "spot-interrupted")

STALL, BUDGET, USER = "stall", "budget", "user"
"""Why a job was stopped; a job's tag says it. A stop in the console has none and is a user's."""


@dataclass(frozen=True)
class Cause:
    """Why a job ended before its stage, and whether another one would do better."""

    code: str
    words: str
    retryable: bool

    @property
    def moves(self) -> bool:
        """Whether another place may have what this one has not."""
        return self.code in _OF_CAPACITY


@dataclass(frozen=True)
class Policy:
    """The run file's limits: jobs in a row without a newer checkpoint, the first delay, dollars.

    ``places`` counts the run's own and its fallbacks.
    """

    attempts: int
    delay: timedelta
    places: int = 1
    budget_usd: float | None = None
    budget_stops: bool = True


@dataclass(frozen=True)
class NoAction:
    """Nothing to do now."""

    words: str


@dataclass(frozen=True)
class StartJob:
    """Start the stage's next job."""

    stage: str
    attempt: int
    from_step: int
    cause: str
    words: str
    chain: bool
    place: int = 0


@dataclass(frozen=True)
class StopJob:
    """Let the live job checkpoint and end."""

    job: TrainingJob
    cause: str
    words: str


@dataclass(frozen=True)
class Finish:
    """Nothing more will happen by itself."""

    exit_code: ExitCode
    words: str


Action = NoAction | StartJob | StopJob | Finish


def next_action(
    stages: Sequence[StageState],
    policy: Policy,
    cause_of: Callable[[TrainingJob], Cause],
    *,
    spent_usd: float,
    now: datetime,
) -> Action:
    """What the run needs now. ``cause_of`` is asked of a job that ended badly; ``spent_usd`` is
    what is known to be.
    """
    stage = current(stages)
    if stage is None:
        return Finish(ExitCode.OK, "the run is done")
    job = stage.job
    over = policy.budget_stops and _over_budget(policy, spent_usd)
    if job is not None and job.live:
        return _live(stage, job, over)
    if over:
        words = f"{stage.name} is not done and budget.usd is spent; raise it to go on"
        return Finish(ExitCode.OVER_BUDGET, words)
    if job is None:
        return _next_stage(stages, stage, policy)
    cause = _cause(stage, job, cause_of)
    if not cause.retryable:
        code = ExitCode.OK if cause.code == USER else ExitCode.JOB_FAILED
        return Finish(code, f"{job.name}: {cause.words}")
    return _again(stage, job, cause, policy, now)


def _over_budget(policy: Policy, spent_usd: float) -> bool:
    return policy.budget_usd is not None and spent_usd >= policy.budget_usd


def _live(stage: StageState, job: TrainingJob, over: bool) -> Action:
    if stage.state == "stopping":
        return NoAction(f"{job.name} is stopping")
    if over:
        return StopJob(job, BUDGET, f"{job.name} has spent the budget: it checkpoints and ends")
    if stage.state == "stalled":
        return StopJob(job, STALL, f"{job.name} is silent since step {stage.step}: it is ended")
    return NoAction(f"{job.name} is {stage.state}")


def _next_stage(stages: Sequence[StageState], stage: StageState, policy: Policy) -> Action:
    before = [one.job for one in stages[: stages.index(stage)]]
    if not before or before[-1] is None or not before[-1].chain:
        return Finish(ExitCode.OK, f"paused before {stage.name}: nothing runs, nothing is billed")
    words = f"{stage.name} is next"
    place = before[-1].place % policy.places
    return StartJob(stage.name, 1, stage.resumes_from, "chain", words, chain=True, place=place)


def _cause(stage: StageState, job: TrainingJob, cause_of: Callable[[TrainingJob], Cause]) -> Cause:
    """By what is stated; ``cause_of`` reads logs, so it is asked last."""
    stopped_for = job.tags.get(STOPPED_TAG)
    if stopped_for == USER:
        return Cause(USER, "was stopped; `sm-train resume` goes on", retryable=False)
    if stopped_for == STALL:
        return Cause(STALL, "was ended after a stall", retryable=True)
    if job.waited_out:
        return Cause("max-pending", "found no machines within cluster.max_pending", retryable=True)
    if job.status == "Failed":
        return cause_of(job)
    if job.secondary == "MaxRuntimeExceeded":
        return Cause("max-runtime", "reached cluster.max_runtime", retryable=True)
    if job.secondary == "MaxWaitTimeExceeded":
        return Cause("max-wait", "found no spot capacity within cluster.max_wait", retryable=True)
    if job.secondary == "Interrupted":
        return Cause("spot", "lost its spot machines", retryable=True)
    if job.status == "Completed":
        words = f"ended at step {stage.resumes_from} of {stage.max_steps}"
        return Cause("ended-early", words, retryable=True)
    if stopped_for == BUDGET:
        return Cause(USER, "was stopped at the budget; raise it to go on", retryable=False)
    return Cause(USER, "was stopped; `sm-train resume` goes on", retryable=False)


def _again(
    stage: StageState, job: TrainingJob, cause: Cause, policy: Policy, now: datetime
) -> Action:
    fruitless = attempts_without_progress(stage)
    if fruitless >= policy.attempts:
        return Finish(
            ExitCode.CAPACITY if cause.moves else ExitCode.JOB_FAILED,
            f"{job.name}: {cause.words}; {fruitless} jobs in a row left no newer checkpoint "
            "(recovery.max_attempts); mend the cause, then `sm-train resume`",
        )
    # Each place is tried once before the delay grows.
    rounds = max(0, fruitless - 1) // (policy.places if cause.moves else 1)
    delay = min(policy.delay * 2**rounds, _LONGEST_DELAY)
    due = (job.ended or job.created) + delay
    if now < due:
        seconds = (due - now).total_seconds()
        return NoAction(f"{job.name} {cause.words}; the next job starts in {seconds:.0f} s")
    place = (job.place + cause.moves) % policy.places
    words = f"{job.name} {cause.words}" + ("; it moves" if place != job.place else "")
    return StartJob(
        stage.name, job.attempt + 1, stage.resumes_from, cause.code, words, job.chain, place
    )


def attempts_without_progress(stage: StageState) -> int:
    """Jobs in a row, up to the newest, that left no checkpoint newer than the one they began with.

    The tag says what a job began with; the first job of a stage has none and began with nothing.
    """
    count = 0
    for job in reversed(stage.jobs):
        if int(job.tags.get(FROM_STEP_TAG, 0)) < stage.resumes_from:
            break
        count += 1
    return count
