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
@given(
    attempts=st.lists(
        st.tuples(
            st.integers(1, 600), st.integers(0, STARTUP_SECONDS // 60), st.integers(PERIODS, 200)
        ),
        min_size=1,
        max_size=4,
    ),
    delay=delays,
    extra=extras,
)
def test_a_job_that_waits_or_that_sagemaker_restarts_never_fires(
    attempts: list[tuple[int, int, int]], delay: int, extra: int
) -> None:
    """Without instances for any time, then without heartbeats until training begins again."""
    timeline = [(False, 0)] * 60
    for waiting, starting, training in attempts:
        timeline += [(False, 0)] * waiting + [(True, 0)] * starting + [(True, 2)] * training
    for now in range(PERIODS + extra, len(timeline)):
        assert not fires(timeline, now, delay=delay, extra=extra)


GPU: Any = job_alarms(config(), monitored_jobs(config()), "topic")[2].request


def gpu_fires(periods: list[tuple[float | None, int]], extra: int) -> bool:
    """Return whether the alarm on GPUs is in ALARM state after ``periods`` of five minutes.

    Each has the sum of GPU utilization, None without instances, and the number of heartbeats.
    Missing points count as OK only as far as real ones are too few.
    """
    count = GPU["EvaluationPeriods"]
    points = [used for used, heartbeats in periods[-count - extra :] if used and heartbeats]
    points = [used for used in points if used is not None][-count:]
    return sum(used < GPU["Threshold"] for used in points) >= GPU["DatapointsToAlarm"]


@quick
@given(
    attempts=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(1, 30)), max_size=4
    ),
    extra=extras,
)
def test_idle_gpus_count_only_while_heartbeats_arrive(
    attempts: list[tuple[int, int, int]], extra: int
) -> None:
    """Instances that wait, or download for hours after a restart, are not wasted by the job."""
    *queries, expression = GPU["Metrics"]
    full = 2 * GPU["Threshold"]
    nodes = ", ".join(query["Id"] for query in queries[:-1])
    assert expression["Expression"] == f"IF(heartbeats > 0, SUM([{nodes}]), {full:.0f})"
    periods: list[tuple[float | None, int]] = []
    for waiting, downloading, training in attempts:
        for kind, count in (
            ((None, 0), waiting),
            ((0.001, 0), downloading),
            ((full, 10), training),
        ):
            for _ in range(count):
                periods.append(kind)
                assert not gpu_fires(periods, extra)
    idle = [(0.1 * full, 10)] * GPU["EvaluationPeriods"]
    assert gpu_fires([*periods, *idle], extra)
    assert not gpu_fires([*periods, *idle[1:]], extra)


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
