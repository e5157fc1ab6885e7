"""Watches a run whose jobs its platform starts, and starts again: stops it at the budget."""

from __future__ import annotations

from sm_train.entrypoints.records.budget import is_spent
from sm_train.toolkit.base.errors import ExitCode
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.stage_state import StageState
from sm_train.toolkit.records.training_job import BUDGET
from sm_train.toolkit.runs.next_command import next_command
from sm_train.toolkit.runs.remediation import Action, Finish, NoAction, Policy, StopJob
from sm_train.toolkit.runs.run_state import RunState, read_state
from sm_train.toolkit.runs.watch.controller import WatchResult, watch_warning


def poll(run: PlacedRun, *, dry_run: bool) -> WatchResult:
    """Read the run, just found, and stop it if its budget is spent.

    Raises:
        UserError: the platform returns an error.
    """
    state = read_state(run)
    action, warning = platform_action(state), None
    if isinstance(action, StopJob) and not dry_run:
        _, warning = run.request_stop()
    done = "; ".join(filter(None, (action.message, warning)))
    return WatchResult(state, action, done, watch_warning(state))


def platform_action(state: RunState, silence: str | None = None) -> Action:
    """Return what the run needs now. Pure.

    ``silence`` says what is wrong with the nodes of the current stage if they send no heartbeats.
    """
    stage = state.current
    if stage is None:
        command = next_command(state.run, None)
        return Finish(ExitCode.OK, f"the run is done{f'; next: {command}' if command else ''}")
    job = stage.job
    others = (other for each in state.stages for other in each.jobs if other.live)
    if (job is None or not job.live) and (other := next(others, None)) is not None:
        return NoAction(f"{other.name} is {other.status}")
    if job is None:
        command = next_command(state.run, stage)
        return Finish(ExitCode.OK, f"no job of {stage.name} has started; next: {command}")
    policy = Policy.of(state.run.config, state.run.config)
    over_budget = is_spent(policy.budget_usd, state.projection.counted_usd)
    if job.live and stage.state != "stopping" and over_budget:
        message = f"{job.name} has spent the budget: it stops after a checkpoint"
        return StopJob(job, BUDGET, message)
    if job.live:
        return NoAction(f"{job.name} is {stage.state}{_since(stage, state)}")
    return _after_end(state, stage, silence, over_budget=over_budget)


_MOST_QUEUED_SECONDS = 86_400.0
"""How long an attempt that ended may wait in the platform's queue until `watch` ends."""


def _after_end(
    state: RunState, stage: StageState, silence: str | None, *, over_budget: bool
) -> Action:
    """Return what follows an attempt that has ended.

    `watch` stays while the platform may start it again, also over the budget: the next attempt has
    to be stopped, too.
    """
    job = stage.job
    assert job is not None
    reason = job.failure_reason or f"ended at step {stage.resumes_from:,} of {stage.max_steps:,}"
    if not job.may_start_again:  # its end is known: nobody waits for its nodes
        silence = None
    if silence is not None:
        reason = silence
    code = ExitCode.STALLED if silence is not None else ExitCode.OK
    code = ExitCode.OVER_BUDGET if over_budget else code
    age = (state.now - (job.ended or job.created)).total_seconds()
    if age <= _MOST_QUEUED_SECONDS and job.may_start_again:
        return NoAction(f"{job.name}: {reason}; the platform may start it again", code)
    if over_budget or silence is not None:
        return Finish(code, f"{job.name}: {reason}")
    if stage.state in ("failed", "no-results") or stage.not_written is not None:
        code = ExitCode.JOB_FAILED
    command = next_command(state.run, stage)
    return Finish(code, f"{job.name}: {reason}; next: {command}")


def _since(stage: StageState, state: RunState) -> str:
    if stage.state != "stalled" or stage.progress.last_activity is None:
        return ""
    minutes = (state.now.timestamp() - stage.progress.last_activity) / 60
    return f": no progress since step {stage.step:,}, for {minutes:.0f} minutes"
