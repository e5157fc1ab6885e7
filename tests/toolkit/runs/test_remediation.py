"""What a run needs, decided from what AWS says alone: pure, so every history can be tried."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from sm_train.toolkit.errors import ExitCode
from sm_train.toolkit.jobs.checkpoints import StoredCheckpoint
from sm_train.toolkit.jobs.live_events import Progress
from sm_train.toolkit.jobs.stage_state import LOG_DELAY_SECONDS, StageState, stage_state
from sm_train.toolkit.jobs.training_job import TrainingJob
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

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
POLICY = Policy(attempts=3, delay=timedelta(seconds=60))
LOST = Cause("capacity", "found no machines", retryable=True)
OWN = Cause("program", "failed", retryable=False)


def job(
    attempt: int, status: str, *, ended_ago: float = 7200, secondary: str = "", **tags: str
) -> TrainingJob:
    description: dict[str, Any] = {
        "SecondaryStatus": secondary,
        "CreationTime": NOW - timedelta(days=1),
        "TrainingStartTime": NOW - timedelta(days=1),
        "TrainingEndTime": NOW - timedelta(seconds=ended_ago),
    }
    named = {f"sm-train:{key.replace('_', '-')}": value for key, value in tags.items()}
    return TrainingJob(f"demo--a-{attempt:04d}", "demo", "a", status, named, description)


def state(
    *jobs: TrainingJob, step: int | None = None, silent: float = 5.0, name: str = "a"
) -> StageState:
    words = Progress(step=step, steps_per_second=1.0, sign=NOW.timestamp() - silent)
    return stage_state(
        name, 1000, jobs, StoredCheckpoint(step, (), final=False), words, now=NOW, stall_after=900
    )


def asked(*stages: StageState, cause: Cause = LOST, **changes: Any) -> Action:
    policy = changes.pop("policy", POLICY)
    return next_action(
        stages, policy, lambda _: cause, spent_usd=changes.pop("spent", 0.0), now=NOW
    )


def test_the_delay_doubles_while_jobs_leave_no_checkpoint() -> None:
    failures = [job(number, "Failed", ended_ago=100) for number in (1, 2, 3)]
    assert isinstance(asked(state(failures[0])), StartJob)
    assert isinstance(asked(state(*failures[:2])), NoAction)
    waited = job(2, "Failed", ended_ago=130)
    assert isinstance(asked(state(failures[0], waited)), StartJob)


def test_so_many_in_a_row_and_a_person_is_needed() -> None:
    failures = [job(number, "Failed") for number in (1, 2, 3)]
    ended = asked(state(*failures))
    assert isinstance(ended, Finish)
    assert ended.exit_code == ExitCode.CAPACITY
    assert "recovery.max_attempts" in ended.words


def test_progress_forgets_failures() -> None:
    """Each of ten jobs left a newer checkpoint: the eleventh is as welcome as the second."""
    jobs = [job(number, "Failed", from_step=str(100 * (number - 1))) for number in range(1, 11)]
    action = asked(state(*jobs, step=1000 - 1))
    assert isinstance(action, StartJob)
    assert (action.attempt, action.from_step) == (11, 999)


def test_no_attempts_means_never_by_itself() -> None:
    action = asked(state(job(1, "Failed")), policy=Policy(0, timedelta(seconds=1)))
    assert isinstance(action, Finish)


def test_the_programs_own_error_and_a_users_stop_are_final() -> None:
    assert asked(state(job(1, "Failed")), cause=OWN) == Finish(
        ExitCode.JOB_FAILED, "demo--a-0001: failed"
    )
    for stopped in (job(1, "Stopped"), job(1, "Failed", stopped_for="user")):
        ended = asked(state(stopped))
        assert isinstance(ended, Finish)
        assert ended.exit_code == ExitCode.OK


def test_a_long_silence_is_a_stall_and_a_shorter_one_is_not() -> None:
    live = job(1, "InProgress")
    limit = 900 + LOG_DELAY_SECONDS
    assert isinstance(asked(state(live, step=5, silent=limit - 1)), NoAction)
    stop = asked(state(live, step=5, silent=limit + 1))
    assert isinstance(stop, StopJob)
    assert stop.cause == "stall"


def test_a_job_that_has_said_its_end_is_not_silent() -> None:
    words = Progress(step=1000, sign=NOW.timestamp() - 7200, ended="done")
    ending = stage_state(
        "a",
        1000,
        [job(1, "InProgress")],
        StoredCheckpoint(1000, (), final=True),
        words,
        now=NOW,
        stall_after=900,
    )
    assert ending.state == "training"


def test_a_budget_that_only_warns_stops_nothing() -> None:
    live = state(job(1, "InProgress"), step=5)
    soft = Policy(3, timedelta(seconds=60), budget_usd=100.0, budget_stops=False)
    hard = Policy(3, timedelta(seconds=60), budget_usd=100.0)
    assert isinstance(asked(live, policy=soft, spent=500.0), NoAction)
    assert isinstance(asked(live, policy=hard, spent=99.0), NoAction)
    assert isinstance(asked(live, policy=hard, spent=100.0), StopJob)


_fates = st.tuples(
    st.sampled_from(["Failed", "Stopped", "Completed"]),
    st.sampled_from(["", "MaxRuntimeExceeded", "Interrupted", "MaxWaitTimeExceeded"]),
    st.integers(0, 999),
    st.sampled_from([None, "user", "stall", "budget"]),
)


@given(
    st.lists(_fates, max_size=8),
    st.sampled_from(["InProgress", "Stopping", "Failed", "Stopped", "A status of the future"]),
    st.booleans(),
    st.floats(0, 200),
)
def test_whatever_happened_a_stage_with_a_live_job_gets_no_other(
    fates: list[tuple[str, str, int, str | None]], last: str, retryable: bool, spent: float
) -> None:
    jobs = [
        job(
            number,
            status,
            secondary=secondary,
            from_step=str(step),
            **({"stopped_for": reason} if reason else {}),
        )
        for number, (status, secondary, step, reason) in enumerate(fates, 1)
    ]
    jobs.append(job(len(jobs) + 1, last))
    policy = Policy(3, timedelta(seconds=60), budget_usd=100.0)
    cause = LOST if retryable else OWN
    action = asked(state(*jobs, step=500), policy=policy, spent=spent, cause=cause)
    if jobs[-1].live:
        assert not isinstance(action, StartJob)
    if isinstance(action, StartJob):
        assert action.attempt == len(jobs) + 1
        assert spent < 100.0
        assert attempts_without_progress(state(*jobs, step=500)) < policy.attempts


_ends = st.tuples(
    st.sampled_from(["capacity", "spot", "internal-error", "max-runtime"]), st.booleans()
)


@given(st.lists(_ends, max_size=20), st.integers(1, 4), st.integers(1, 6))
def test_a_run_moves_for_want_of_machines_alone_and_through_all_places_in_order(
    ends: list[tuple[str, bool]], places: int, attempts: int
) -> None:
    """A whole life, each job as the decision before it asked for."""
    policy = Policy(attempts, timedelta(seconds=1), places)
    jobs, step, place = [job(1, "Failed", from_step="0")], 0, 0
    for code, progress in ends:
        step += progress
        action = asked(
            state(*jobs, step=step), policy=policy, cause=Cause(code, "", retryable=True)
        )
        if not isinstance(action, StartJob):
            assert isinstance(action, Finish)
            assert attempts_without_progress(state(*jobs, step=step)) >= attempts
            return
        place = (place + (code in ("capacity", "spot"))) % places
        assert (action.place, action.attempt) == (place, len(jobs) + 1)
        jobs.append(job(action.attempt, "Failed", from_step=str(step), place=str(place)))
        live = job(action.attempt, "InProgress", place=str(place))
        assert not isinstance(asked(state(*jobs[:-1], live, step=step), policy=policy), StartJob)


def test_each_place_is_tried_once_before_the_delay_grows() -> None:
    failures = [job(number, "Failed", ended_ago=100, place=str(number - 1)) for number in (1, 2)]
    two = Policy(attempts=9, delay=timedelta(seconds=60), places=2)
    assert isinstance(asked(state(*failures), policy=two), StartJob)
    third = job(3, "Failed", ended_ago=100, place="0")
    assert isinstance(asked(state(*failures, third), policy=two), NoAction)
    internal = Cause("internal-error", "failed", retryable=True)
    assert isinstance(asked(state(*failures), policy=two, cause=internal), NoAction)


def test_the_next_stage_begins_where_the_last_one_ended() -> None:
    done = job(2, "Completed", place="1", chain="on")
    three = Policy(attempts=3, delay=timedelta(seconds=60), places=3)
    action = asked(state(done, step=1000), state(name="b"), policy=three)
    assert isinstance(action, StartJob)
    assert (action.stage, action.place) == ("b", 1)


def test_waiting_longer_than_allowed_is_no_stop_of_a_users() -> None:
    def ended(waited: float) -> Action:
        description = {
            "CreationTime": NOW - timedelta(seconds=waited),
            "LastModifiedTime": NOW,
            "StoppingCondition": {"MaxPendingTimeInSeconds": 1800},
        }
        one = TrainingJob("demo--a-0001", "demo", "a", "Stopped", {}, description)
        return asked(state(one), policy=Policy(3, timedelta(0), places=2))

    moved = ended(1801)
    assert isinstance(moved, StartJob)
    assert (moved.cause, moved.place) == ("max-pending", 1)
    assert isinstance(ended(1799), Finish)


def test_an_older_job_that_is_live_after_all_keeps_others_from_starting() -> None:
    """As where another region was slow to tell of it."""
    jobs = [job(1, "InProgress"), job(2, "Failed", place="1")]
    action = asked(state(*jobs, step=5), policy=Policy(3, timedelta(0), places=2))
    assert isinstance(action, NoAction)
    assert "demo--a-0001" in action.words
