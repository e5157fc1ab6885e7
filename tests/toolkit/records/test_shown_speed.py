"""The speed of a stage's jobs that projects the remaining cost."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from sm_train.toolkit.planning.spent import project
from sm_train.toolkit.records.checkpoints import StoredCheckpoint
from sm_train.toolkit.records.live_state import (
    LiveState,
    Progress,
    fold_events,
    progress_of,
    shown_speed,
)
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.stage_state import stage_state
from sm_train.toolkit.runs.watch.screen import _remaining

from tests.support.aws.described_jobs import CREATED, described
from tests.support.run_documents import config, stage

NOW = CREATED + timedelta(hours=2)
JOBS = [
    described(f"demo--256px-{number:04d}", status, {"TrainingStartTime": CREATED})
    for number, status in ((1, "Failed"), (2, "Failed"), (3, "InProgress"))
]


def live(seconds: float, speed: float = 2.0, **fields: Any) -> LiveState:
    """Return a job whose newest step has sums over so many seconds, without the first interval."""
    sums = {"timed_steps": seconds * speed, "timed_seconds": seconds, "waited_seconds": 0.0}
    event = {
        "kind": "step",
        "step": 500,
        "time": NOW.timestamp(),
        "loss": 0.1,
        "steps_per_second": 0.07 if seconds == 0 else speed,
        "data_wait_share": 0.0,
        **sums,
    }
    return fold_events([("algo-1", event | fields)])


def test_the_newest_speed_that_was_measured_counts() -> None:
    """A job that has just started has none, and its first interval compiles."""
    states = {JOBS[0].name: live(600, 1.5), JOBS[1].name: live(600, 2.5)}

    def read(job: RunJob) -> LiveState:
        return states.get(job.name, LiveState())

    for newest, name, speed in (
        (live(600, 3.0), JOBS[2].name, 3.0),
        (live(0), JOBS[1].name, 2.5),
        (LiveState(), JOBS[1].name, 2.5),
    ):
        shown = shown_speed(JOBS, progress_of(newest), read)
        assert shown is not None
        assert (shown.job.name, shown.steps_per_second) == (name, speed)
    states[JOBS[1].name] = live(0)
    shown = shown_speed(JOBS, Progress(), read)
    assert shown is not None
    assert shown.job is JOBS[0]
    assert shown_speed(JOBS[2:], Progress(), read) is None
    assert shown_speed([], Progress(), read) is None


def test_what_is_left_does_not_change_with_a_restart_and_a_first_interval() -> None:
    """A restart made $78 of $1,925 for minutes, and a first interval three times as much."""
    run = config(stages=[stage("256px", max_steps=20_000)])
    left, seconds = [], []
    for newest in (live(600), live(0), LiveState()):
        progress = progress_of(newest)
        state = stage_state(
            "256px",
            20_000,
            JOBS,
            StoredCheckpoint(500, (), final=False),
            progress,
            now=NOW,
            stall_after=900,
        )
        state = replace(state, shown=shown_speed(JOBS, progress, lambda job: live(600)))
        left += project(run, "us-east-1", [state], NOW).stages.values()
        seconds.append(state.remaining_seconds)
        assert _remaining(newest, state, 500, NOW.timestamp()).startswith("2.7 h")
    assert seconds == [9750.0] * 3
    assert left == [left[0]] * 3
    assert left[0] is not None
