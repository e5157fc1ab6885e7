"""When the heartbeat's alarm rings, by what CloudWatch's user guide says of expressions and missing
data: never in a healthy life, and soon when nobody speaks any more.
"""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sm_train.estimators.request.alarms import LATE_SECONDS, STARTING_SECONDS, alarms, first_jobs

from tests.support.run_documents import config

HEARTBEAT = alarms(config(), first_jobs(config()), "topic")[0].request
SILENT, PERIODS = HEARTBEAT["DatapointsToAlarm"], HEARTBEAT["EvaluationPeriods"]


def _value(machines: bool, beats: int) -> int | None:
    """IF(TIME_SERIES(1) > machine, 1, beats), as the user guide has it: a comparison takes a
    missing value for 0, and IF drops a point whose value is missing.
    """
    return 1 if int(machines) < 1 else beats or None


def _rings(life: list[tuple[bool, int]], now: int, *, late: int, extra: int) -> bool:
    """ "Configuring how CloudWatch alarms treat missing data": it retrieves some more points than
    asked for, and takes missing ones for breaching as few times as possible.
    """
    span = range(now - PERIODS - extra, now)
    seen = [_value(*life[minute]) if minute < now - late else _value(False, 0) for minute in span]
    existing = [one for one in seen if one is not None][-PERIODS:]
    breaching = sum(one < HEARTBEAT["Threshold"] for one in existing) + PERIODS - len(existing)
    return breaching >= SILENT


def test_the_simulation_is_of_this_alarm() -> None:
    *queries, watched = HEARTBEAT["Metrics"]
    assert watched["Expression"] == "IF(TIME_SERIES(1) > machine, 1, beats)"
    assert {one["MetricStat"]["Stat"] for one in queries} == {"SampleCount"}
    assert {one["MetricStat"]["Period"] for one in queries} == {60}
    assert HEARTBEAT["ComparisonOperator"] == "LessThanThreshold"


quick = settings(max_examples=100, deadline=None)
lates, extras = st.integers(0, LATE_SECONDS // 60), st.integers(0, 12)


@quick
@given(
    start=st.integers(0, STARTING_SECONDS // 60),
    trains=st.integers(1, 200),
    uploads=st.integers(0, 25),
    late=lates,
    extra=extras,
)
def test_a_job_that_waits_starts_trains_and_ends_rings_at_no_time(
    start: int, trains: int, uploads: int, late: int, extra: int
) -> None:
    # An upload's silence adds up with a start's only around a training of minutes.
    assume(start + uploads < SILENT or trains > PERIODS)
    life = [(False, 0)] * 60 + [(True, 0)] * start + [(True, 2)] * trains
    life += [(True, 0)] * uploads + [(False, 0)] * 100
    for now in range(PERIODS + extra, len(life)):
        assert not _rings(life, now, late=late, extra=extra)


@quick
@given(trains=st.integers(0, 200), late=lates, extra=extras)
def test_a_job_whose_monitor_dies_or_never_speaks_rings_in_time(
    trains: int, late: int, extra: int
) -> None:
    life = [(False, 0)] * 60 + [(True, 2)] * trains + [(True, 0)] * 120
    died = 60 + trains
    ringing = [
        now
        for now in range(PERIODS + extra, len(life))
        if _rings(life, now, late=late, extra=extra)
    ]
    assert died + SILENT <= ringing[0] <= died + PERIODS + extra + late
    assert ringing == list(range(ringing[0], len(life)))
