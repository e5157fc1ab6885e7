"""When the heartbeat alarm fires, simulated by the rules of CloudWatch's user guide.

It must never fire during a healthy job, and soon after heartbeats stop.
"""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sm_train.estimators.request.alarm_requests import (
    METRIC_DELAY_SECONDS,
    STARTUP_SECONDS,
    job_alarms,
)

from tests.support.run_documents import config, monitored_jobs

HEARTBEAT: Any = job_alarms(config(), monitored_jobs(config()), "topic")[0].request
TO_ALARM, PERIODS = HEARTBEAT["DatapointsToAlarm"], HEARTBEAT["EvaluationPeriods"]

Minute = tuple[bool, int]
"""Whether instances run in this minute, and how many heartbeats they send."""


def datapoint(running: bool, heartbeats: int) -> int | None:
    """Evaluate IF(TIME_SERIES(1) > instance, 1, heartbeats) for one minute.

    The comparison treats a missing value as 0, and IF drops a point whose value is missing.
    """
    return 1 if int(running) < 1 else heartbeats or None


def fires(timeline: list[Minute], now: int, *, delay: int, extra: int) -> bool:
    """Return whether the alarm is in ALARM state at minute ``now``.

    CloudWatch retrieves ``extra`` points beyond the evaluation range and treats missing ones as
    breaching only as far as real points are too few ("Configuring how CloudWatch alarms treat
    missing data"). Metrics of the last ``delay`` minutes have not arrived.
    """
    span = range(now - PERIODS - extra, now)
    points = [
        datapoint(*timeline[minute]) if minute < now - delay else datapoint(False, 0)
        for minute in span
    ]
    present = [point for point in points if point is not None][-PERIODS:]
    breaching = sum(point < HEARTBEAT["Threshold"] for point in present) + PERIODS - len(present)
    return breaching >= TO_ALARM


def test_simulation_matches_the_alarm() -> None:
    *queries, expression = HEARTBEAT["Metrics"]
    assert expression["Expression"] == "IF(TIME_SERIES(1) > instance, 1, heartbeats)"
    assert {query["MetricStat"]["Stat"] for query in queries} == {"SampleCount"}
    assert {query["MetricStat"]["Period"] for query in queries} == {60}
    assert HEARTBEAT["ComparisonOperator"] == "LessThanThreshold"


quick = settings(max_examples=100, deadline=None)
delays, extras = st.integers(0, METRIC_DELAY_SECONDS // 60), st.integers(0, 12)


@quick
@given(
    starting=st.integers(0, STARTUP_SECONDS // 60),
    training=st.integers(1, 200),
    uploading=st.integers(0, 25),
    delay=delays,
    extra=extras,
)
def test_healthy_job_never_fires(
    starting: int, training: int, uploading: int, delay: int, extra: int
) -> None:
    # The gaps of start and upload add up only if training takes minutes.
    assume(starting + uploading < TO_ALARM or training > PERIODS)
    timeline = [(False, 0)] * 60 + [(True, 0)] * starting + [(True, 2)] * training
    timeline += [(True, 0)] * uploading + [(False, 0)] * 100
    for now in range(PERIODS + extra, len(timeline)):
        assert not fires(timeline, now, delay=delay, extra=extra)


@quick
@given(training=st.integers(0, 200), delay=delays, extra=extras)
def test_job_without_heartbeats_fires_in_time(training: int, delay: int, extra: int) -> None:
    timeline = [(False, 0)] * 60 + [(True, 2)] * training + [(True, 0)] * 120
    last_heartbeat = 60 + training
    firing = [
        now
        for now in range(PERIODS + extra, len(timeline))
        if fires(timeline, now, delay=delay, extra=extra)
    ]
    assert last_heartbeat + TO_ALARM <= firing[0] <= last_heartbeat + PERIODS + extra + delay
    assert firing == list(range(firing[0], len(timeline)))
