"""Deciding what a run needs next: pure, so any history can be tested."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.toolkit.base.errors import ExitCode
from sm_train.toolkit.records.checkpoints import StoredCheckpoint
from sm_train.toolkit.records.live_state import Progress
from sm_train.toolkit.records.stage_state import StageState, stage_state
from sm_train.toolkit.records.training_job import TrainingJob
from sm_train.toolkit.runs.remediation import (
    Action,
    Cause,
    Finish,
    NoAction,
    Policy,
    StartJob,
    StopJob,
    attempts_without_progress,
    next_action,
)
from sm_train.toolkit.runs.run_state import overdue_phase

from tests.support.aws.described_jobs import described
from tests.support.run_documents import config
from tests.toolkit.runs.remediation_support import NOW, job

POLICY = Policy(max_attempts=3, backoff=timedelta(seconds=60))
CAPACITY_LOSS = Cause("capacity", "got no instances", retryable=True)
USER_CODE_FAILURE = Cause("program", "failed", retryable=False)


def transitions(phases: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return the transitions of a job that entered phases so many seconds ago."""
    return [{"Status": phase, "StartTime": NOW - timedelta(seconds=ago)} for phase, ago in phases]


def state(
    *jobs: TrainingJob, step: int | None = None, inactive: float = 5.0, name: str = "a"
) -> StageState:
    progress = Progress(step=step, steps_per_second=1.0, last_activity=NOW.timestamp() - inactive)
    return stage_state(
        name,
        1000,
        jobs,
        StoredCheckpoint(step, (), final=False),
        progress,
        now=NOW,
        stall_after=900,
    )


def decide(*stages: StageState, cause: Cause = CAPACITY_LOSS, **changes: Any) -> Action:
    policy = changes.pop("policy", POLICY)
    return next_action(
        stages, policy, lambda _: cause, spent_usd=changes.pop("spent", 0.0), now=NOW
    )


def test_delay_doubles_while_jobs_leave_no_checkpoint() -> None:
    failures = [job(number, "Failed", ended_ago=100) for number in (1, 2, 3)]
    assert isinstance(decide(state(failures[0])), StartJob)
    assert isinstance(decide(state(*failures[:2])), NoAction)
    waited = job(2, "Failed", ended_ago=130)
    assert isinstance(decide(state(failures[0], waited)), StartJob)


@given(st.integers(0, 100), st.integers(1, 3600), st.integers(1, 9), st.booleans())
def test_delay_grows_up_to_the_cap_and_never_beyond(
    fruitless: int, backoff: int, placements: int, relocates: bool
) -> None:
    policy = Policy(100, timedelta(seconds=backoff), placements)
    delays = [policy.delay(count, relocates=relocates) for count in range(fruitless + 1)]
    assert delays[0] == timedelta(seconds=backoff)
    assert delays == sorted(delays)
    assert max(delays) <= timedelta(hours=1)


def test_delay_is_capped_at_an_hour() -> None:
    """From the decision's point of view: after many failures the next job starts in an hour."""
    policy = Policy(max_attempts=100, backoff=timedelta(seconds=60))
    failures = [job(number, "Failed") for number in range(1, 20)]
    for ended_ago, expected in ((3599, NoAction), (3601, StartJob)):
        newest = job(20, "Failed", ended_ago=ended_ago)
        assert isinstance(decide(state(*failures, newest), policy=policy), expected)
    # 60 s double to 1920 s after the sixth job; the seventh would reach 3840 s.
    sixth, seventh = (policy.delay(count, relocates=False) for count in (6, 7))
    assert (sixth, seventh) == (timedelta(seconds=1920), timedelta(hours=1))


def test_finishes_after_max_attempts_without_progress() -> None:
    failures = [job(number, "Failed") for number in (1, 2, 3)]
    ended = decide(state(*failures))
    assert isinstance(ended, Finish)
    assert ended.exit_code == ExitCode.CAPACITY
    assert "recovery.max_attempts" in ended.message


def test_progress_resets_the_failure_count() -> None:
    """Each of ten jobs left a newer checkpoint, so the eleventh may start."""
    jobs = [job(number, "Failed", from_step=str(100 * (number - 1))) for number in range(1, 11)]
    action = decide(state(*jobs, step=1000 - 1))
    assert isinstance(action, StartJob)
    assert (action.attempt, action.from_step) == (11, 999)


def test_zero_max_attempts_never_restarts() -> None:
    action = decide(state(job(1, "Failed")), policy=Policy(0, timedelta(seconds=1)))
    assert isinstance(action, Finish)


def test_user_code_failure_and_user_stop_are_final() -> None:
    assert decide(state(job(1, "Failed")), cause=USER_CODE_FAILURE) == Finish(
        ExitCode.JOB_FAILED, "demo--a-0001: failed"
    )
    for stopped in (job(1, "Stopped"), job(1, "Failed", stopped_for="user")):
        ended = decide(state(stopped))
        assert isinstance(ended, Finish)
        assert ended.exit_code == ExitCode.OK


def test_a_stop_without_its_checkpoint_is_a_failure() -> None:
    stopped = replace(
        state(job(1, "Stopped", stopped_for="user"), step=400),
        not_written="a checkpoint could not be written since that of step 400: No space left",
    )
    ended = decide(stopped)
    assert isinstance(ended, Finish)
    assert ended.exit_code == ExitCode.JOB_FAILED


def test_only_inactivity_beyond_the_timeout_is_a_stall() -> None:
    live = job(1, "InProgress")
    limit = 900 + 300.0
    assert isinstance(decide(state(live, step=5, inactive=limit - 1)), NoAction)
    stop = decide(state(live, step=5, inactive=limit + 1))
    assert isinstance(stop, StopJob)
    assert stop.cause == "stall"


SECONDARY_STATUSES = (
    *("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "Downloading"),
    *("DownloadingTrainingImage", "Training", "Interrupted", "Restarting", "Uploading", "New"),
)


PREPARING = ("Downloading", "DownloadingTrainingImage")


@pytest.mark.parametrize("secondary", SECONDARY_STATUSES)
def test_what_silence_means_depends_on_the_phase(secondary: str) -> None:
    """SageMaker restarts spot jobs, and jobs of a training plan wait between reserved hours."""
    for hours, stalls in ((2, ("Training",)), (10, ("Training", *PREPARING))):
        since = {"SecondaryStatusTransitions": transitions([(secondary, hours * 3600)])}
        waits = job(1, "InProgress", secondary=secondary, more=since)
        silent = state(waits, step=5, inactive=12 * 3600)
        action = decide(silent)
        assert isinstance(action, StopJob) == (secondary in stalls)
        if secondary in ("Interrupted", "Restarting", "Pending"):
            assert silent.state == "restarting"
            assert isinstance(action, NoAction)
            assert action.message == f"SageMaker is restarting demo--a-0001 ({secondary})"


@pytest.mark.parametrize(
    ("secondary", "hours", "state_", "warns"),
    [
        ("Training", 0.4, "starting", False),
        ("Training", 1.5, "starting", True),
        ("Training", 2.2, "stalled", True),
        ("Downloading", 0.9, "starting", False),
        ("Downloading", 5.0, "starting", True),
        ("Downloading", 6.2, "stalled", True),
        ("Starting", 30.0, "starting", False),
        ("New", 30.0, "starting", False),
    ],
)
def test_a_job_without_an_event_is_not_starting_for_ever(
    secondary: str, hours: float, state_: str, warns: bool
) -> None:
    """Of an image whose entry hangs, or of data that do not arrive."""
    since = {"SecondaryStatusTransitions": transitions([(secondary, hours * 3600)])}
    live = job(1, "InProgress", secondary=secondary, more=since)
    at = stage_state(
        "a",
        1000,
        [live],
        StoredCheckpoint(None, (), final=False),
        Progress(),
        now=NOW,
        stall_after=900,
    )
    assert at.state == state_
    action = decide(at)
    assert isinstance(action, StopJob) == (state_ == "stalled")
    if isinstance(action, StopJob):
        phase, hour = f"is in phase {secondary} for", f"{hours:.1f} h"
        assert action.message == f"demo--a-0001 {phase} {hour} without an event: stopping it"
    warning = overdue_phase(live, None, NOW)
    assert (warning is not None) == warns
    if warning is not None:
        limit = {"Training": "2.0 h", "Downloading": "6.0 h"}[secondary]
        assert f"has been in phase {secondary} for" in warning
        assert re.search(r"which has cost \$[\d,.]+, without an event", warning)
        assert warning.endswith(f"; `watch` stops it after {limit}")


def test_a_job_whose_log_cannot_be_seen_trains_if_it_stores_checkpoints() -> None:
    """Of a role that may not write logs, or whose log group was deleted."""
    since = {"SecondaryStatusTransitions": transitions([("Training", 10 * 3600)])}
    for stored, resumed, expected in ((5000, 1000, "training"), (1000, 1000, "stalled")):
        live = job(2, "InProgress", more=since, from_step=str(resumed))
        at = stage_state(
            "a",
            9000,
            [live],
            StoredCheckpoint(stored, (), final=False),
            Progress(),
            now=NOW,
            stall_after=900,
        )
        assert at.state == expected


def test_a_program_that_hangs_after_its_end_is_stopped() -> None:
    since = {"SecondaryStatusTransitions": transitions([("Training", 20 * 3600)])}
    for hours, expected in ((1, "training"), (3, "stalled")):
        at = stage_state(
            "a",
            1000,
            [job(1, "InProgress", more=since)],
            StoredCheckpoint(1000, (), final=True),
            Progress(step=1000, last_activity=NOW.timestamp() - hours * 3600, ended="done"),
            now=NOW,
            stall_after=900,
        )
        assert at.state == expected


@pytest.mark.parametrize("spent", [0.0, 5000.0])
def test_a_job_that_stores_its_results_is_never_stopped(spent: float) -> None:
    """A stop would lose the model; a person decides when it takes too long."""
    policy = Policy(max_attempts=3, backoff=timedelta(seconds=60), budget_usd=1000.0)
    for hours, is_overdue in ((3, False), (7, True)):
        since = {"SecondaryStatusTransitions": transitions([("Uploading", hours * 3600)])}
        live = job(1, "InProgress", secondary="Uploading", more=since)
        action = decide(state(live, step=1000, inactive=hours * 3600), spent=spent, policy=policy)
        warning = overdue_phase(live, None, NOW)
        command = "aws sagemaker stop-training-job --training-job-name demo--a-0001"
        assert warning is not None
        assert f"`{command} --region us-east-1` does" in warning
        if is_overdue:
            assert isinstance(action, Finish)
            assert action.exit_code is ExitCode.STALLED
            assert command in action.message
        else:
            assert isinstance(action, NoAction)
            assert ("spent the budget" in action.message) == (spent > 1000)


@pytest.mark.parametrize("ago", [60, 900 + 300.0 + 60])
def test_restarted_job_gets_the_whole_timeout_again(ago: float) -> None:
    """Its newest event is older than the restart until it has restored its checkpoint."""
    lived = [("Training", 20 * 3600), ("Interrupted", 3 * 3600), ("Training", ago)]
    live = job(1, "InProgress", more={"SecondaryStatusTransitions": transitions(lived)})
    restarted = state(live, step=5, inactive=3 * 3600)
    assert restarted.state == ("training" if ago == 60 else "stalled")


def test_job_that_logged_its_end_is_not_stalled() -> None:
    progress = Progress(step=1000, last_activity=NOW.timestamp() - 7200, ended="done")
    ending = stage_state(
        "a",
        1000,
        [job(1, "InProgress")],
        StoredCheckpoint(1000, (), final=True),
        progress,
        now=NOW,
        stall_after=900,
    )
    assert ending.state == "training"


def test_budget_stops_a_job_only_with_on_exceed_stop() -> None:
    live = state(job(1, "InProgress"), step=5)
    warns = config(budget={"usd": 100, "on_exceed": "warn"})
    soft = Policy.of(warns, warns)
    hard = Policy(3, timedelta(seconds=60), budget_usd=100.0)
    assert isinstance(decide(live, policy=soft, spent=500.0), NoAction)
    assert isinstance(decide(live, policy=hard, spent=99.0), NoAction)
    assert isinstance(decide(live, policy=hard, spent=100.0), StopJob)


_histories = st.tuples(
    st.sampled_from(["Failed", "Stopped", "Completed"]),
    st.sampled_from(["", "MaxRuntimeExceeded", "Interrupted", "MaxWaitTimeExceeded"]),
    st.integers(0, 999),
    st.sampled_from([None, "user", "stall", "budget"]),
)


@given(
    st.lists(_histories, max_size=8),
    st.sampled_from(["InProgress", "Stopping", "Failed", "Stopped", "A status of the future"]),
    st.booleans(),
    st.floats(0, 200),
)
def test_never_starts_a_second_live_job_in_a_stage(
    history: list[tuple[str, str, int, str | None]], last: str, retryable: bool, spent: float
) -> None:
    jobs = [
        job(
            number,
            status,
            secondary=secondary,
            from_step=str(step),
            **({"stopped_for": reason} if reason else {}),
        )
        for number, (status, secondary, step, reason) in enumerate(history, 1)
    ]
    jobs.append(job(len(jobs) + 1, last))
    policy = Policy(3, timedelta(seconds=60), budget_usd=100.0)
    cause = CAPACITY_LOSS if retryable else USER_CODE_FAILURE
    action = decide(state(*jobs, step=500), policy=policy, spent=spent, cause=cause)
    if jobs[-1].live:
        assert not isinstance(action, StartJob)
    if isinstance(action, StartJob):
        assert action.attempt == len(jobs) + 1
        assert spent < 100.0
        assert attempts_without_progress(state(*jobs, step=500)) < policy.max_attempts


_ends = st.tuples(
    st.sampled_from(["capacity", "spot", "internal-error", "max-runtime"]), st.booleans()
)


@given(st.lists(_ends, max_size=20), st.integers(1, 4), st.integers(1, 6))
def test_relocates_only_on_capacity_loss_in_fallback_order(
    ends: list[tuple[str, bool]], placements: int, attempts: int
) -> None:
    """A whole run: each job starts as the previous decision says."""
    policy = Policy(attempts, timedelta(seconds=1), placements)
    jobs, step, placement = [job(1, "Failed", from_step="0")], 0, 0
    for code, progress in ends:
        step += progress
        action = decide(
            state(*jobs, step=step), policy=policy, cause=Cause(code, "", retryable=True)
        )
        if not isinstance(action, StartJob):
            assert isinstance(action, Finish)
            assert attempts_without_progress(state(*jobs, step=step)) >= attempts
            return
        placement = (placement + (code in ("capacity", "spot"))) % placements
        assert (action.placement, action.attempt) == (placement, len(jobs) + 1)
        jobs.append(job(action.attempt, "Failed", from_step=str(step), placement=str(placement)))
        live = job(action.attempt, "InProgress", placement=str(placement))
        assert not isinstance(decide(state(*jobs[:-1], live, step=step), policy=policy), StartJob)


def test_each_placement_is_tried_once_before_the_delay_doubles() -> None:
    failures = [
        job(number, "Failed", ended_ago=100, placement=str(number - 1)) for number in (1, 2)
    ]
    two = Policy(max_attempts=9, backoff=timedelta(seconds=60), placements=2)
    assert isinstance(decide(state(*failures), policy=two), StartJob)
    third = job(3, "Failed", ended_ago=100, placement="0")
    assert isinstance(decide(state(*failures, third), policy=two), NoAction)
    internal = Cause("internal-error", "failed", retryable=True)
    assert isinstance(decide(state(*failures), policy=two, cause=internal), NoAction)


def test_next_stage_starts_at_the_placement_of_the_previous_one() -> None:
    done = job(2, "Completed", placement="1", auto_advance="on")
    three = Policy(max_attempts=3, backoff=timedelta(seconds=60), placements=3)
    action = decide(state(done, step=1000), state(name="b"), policy=three)
    assert isinstance(action, StartJob)
    assert (action.stage, action.placement) == ("b", 1)


def test_pending_timeout_is_a_capacity_loss_not_a_user_stop() -> None:
    def after_waiting(seconds: float) -> Action:
        description = {
            "CreationTime": NOW - timedelta(seconds=seconds),
            "LastModifiedTime": NOW,
            "StoppingCondition": {"MaxPendingTimeInSeconds": 1800},
        }
        job = described("demo--a-0001", "Stopped", description)
        return decide(state(job), policy=Policy(3, timedelta(0), placements=2))

    restart = after_waiting(1801)
    assert isinstance(restart, StartJob)
    assert (restart.cause, restart.placement) == ("max-pending", 1)
    assert isinstance(after_waiting(1799), Finish)


@pytest.mark.parametrize("trains_again", [False, True])
def test_wait_that_is_lost_after_training_relocates(trains_again: bool) -> None:
    """A job of a training plan returns to Pending between reserved hours, and gets none again."""
    phases = {"Training": 9000, "Pending": 1801} | ({"Training ": 60} if trains_again else {})
    description = {
        "CreationTime": NOW - timedelta(seconds=10_000),
        "TrainingStartTime": NOW - timedelta(seconds=9000),
        "TrainingEndTime": NOW,
        "StoppingCondition": {"MaxPendingTimeInSeconds": 1800},
        "SecondaryStatusTransitions": transitions(
            [(phase.strip(), ago) for phase, ago in phases.items()]
        ),
    }
    job = described("demo--a-0001", "Stopped", description)
    action = decide(state(job), policy=Policy(3, timedelta(0), placements=2))
    if trains_again:
        assert isinstance(action, Finish)
    else:
        assert isinstance(action, StartJob)
        assert (action.cause, action.placement) == ("max-pending", 1)


def test_a_job_that_a_person_stopped_while_it_waited_is_not_started_again() -> None:
    """It waits three days for the start of its training plan; a stop has a phase of its own."""
    description = {
        "CreationTime": NOW - timedelta(days=2),
        "LastModifiedTime": NOW,
        "StoppingCondition": {"MaxPendingTimeInSeconds": 3600},
        "SecondaryStatusTransitions": transitions([("Pending", 170_000), ("Stopping", 60)]),
    }
    action = decide(state(described("demo--a-0001", "Stopped", description)))
    assert isinstance(action, Finish)
    assert action.exit_code is ExitCode.OK


@pytest.mark.parametrize(("ran", "placement"), [(3600, 1), (86_000, 0)])
def test_an_ended_plan_moves_on_and_a_spent_maximum_runtime_does_not(
    ran: float, placement: int
) -> None:
    plan = "arn:aws:sagemaker:us-east-1:111122223333:training-plan/p4de"
    description = {
        "SecondaryStatus": "MaxRuntimeExceeded",
        "CreationTime": NOW - timedelta(days=2),
        "TrainingStartTime": NOW - timedelta(seconds=ran),
        "TrainingEndTime": NOW,
        "StoppingCondition": {"MaxRuntimeInSeconds": 86_400},
        "ResourceConfig": {
            "InstanceType": "ml.p4de.24xlarge",
            "InstanceCount": 4,
            "TrainingPlanArn": plan,
        },
    }
    ended = described("demo--a-0001", "Stopped", description)
    action = decide(state(ended, step=5), policy=Policy(3, timedelta(0), placements=2))
    assert isinstance(action, StartJob)
    assert (action.cause, action.placement) == (
        ("plan-ended", 1) if placement else ("max-runtime", 0)
    )


def test_live_older_job_prevents_a_start() -> None:
    """As if another region had listed the job late."""
    jobs = [job(1, "InProgress"), job(2, "Failed", placement="1")]
    action = decide(state(*jobs, step=5), policy=Policy(3, timedelta(0), placements=2))
    assert isinstance(action, NoAction)
    assert "demo--a-0001" in action.message


def test_a_job_that_ended_before_its_last_step_continues() -> None:
    """SageMaker calls it completed: its program exited with 0."""
    action = decide(state(job(1, "Completed"), step=400))
    assert isinstance(action, StartJob)
    assert (action.cause, action.from_step, action.attempt) == ("ended-early", 400, 2)
