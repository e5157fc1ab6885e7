"""A job's own sums give the same speed from its newest event and from its whole log."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.cost.timeline import mean_speed
from sm_train.entrypoints.monitoring.heartbeat import TrainingClock

INTERVALS = st.lists(
    st.tuples(st.integers(1, 1000), st.floats(0.1, 1000.0), st.floats(0.0, 1.0)),
    min_size=2,
    max_size=30,
)


def step_events(intervals: list[tuple[int, float, float]]) -> list[dict[str, Any]]:
    clock, step, time = TrainingClock(), 0, 0.0
    events: list[dict[str, Any]] = [{"kind": "start", "time": 0.0}]
    for steps, seconds, share in intervals:
        step, time = step + steps, time + seconds
        events.append(
            {
                "kind": "step",
                "time": time,
                "step": step,
                "steps_per_second": steps / seconds,
                "data_wait_share": share,
                **clock.add(steps, seconds, share * seconds),
            }
        )
    return events


@given(INTERVALS)
def test_newest_event_has_the_speed_of_the_whole_log(
    intervals: list[tuple[int, float, float]],
) -> None:
    events = step_events(intervals)
    whole, newest = mean_speed(events), mean_speed(events[-1:])
    assert whole is not None
    assert newest is not None
    assert newest.steps_per_second == pytest.approx(whole.steps_per_second)
    assert newest.data_wait_share == pytest.approx(whole.data_wait_share)
    # The first interval, with compilation and the first batches, does not count.
    seconds = sum(interval[1] for interval in intervals[1:])
    assert newest.steps_per_second == pytest.approx(
        sum(interval[0] for interval in intervals[1:]) / seconds
    )
    waited = sum(interval[1] * interval[2] for interval in intervals[1:])
    assert newest.data_wait_share == pytest.approx(waited / seconds)


def test_stalls_count_and_restarts_add_up() -> None:
    first = step_events([(10, 60.0, 0.0), (10, 10.0, 0.0), (10, 90.0, 0.5)])
    second = step_events([(10, 60.0, 0.0), (20, 20.0, 0.0)])
    speed = mean_speed([*first, *second])
    assert speed is not None
    assert speed.steps_per_second == pytest.approx(40 / 120)
    assert speed.data_wait_share == pytest.approx(45 / 120)
    assert speed.usual == 1.0


def test_first_interval_counts_while_there_is_no_other() -> None:
    speed = mean_speed(step_events([(10, 20.0, 0.25)]))
    assert speed is not None
    assert (speed.steps_per_second, speed.data_wait_share) == (0.5, 0.25)


def test_unknown_waits_stay_unknown() -> None:
    clock = TrainingClock()
    clock.add(1, 1.0, 0.0)
    assert clock.add(1, 1.0, None)["waited_seconds"] is None
    assert clock.add(1, 1.0, 0.5)["waited_seconds"] is None
