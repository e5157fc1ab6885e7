"""The limits by which a run is stopped or somebody is called, in numbers.

What each does is tested next to its module, by its name.
"""

from __future__ import annotations

import pytest
from sm_train.entrypoints.clusters import node_record, node_recorder
from sm_train.entrypoints.monitoring import (
    alert_outbox,
    alert_sinks,
    first_failure,
    stall_detector,
    stragglers,
)
from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.monitoring.watchdog import stall_watch, storage_report

LIMITS = {
    "an alert is sent for a week": (alert_outbox._KEPT_SECONDS, 604_800.0),
    "clocks that differ by less agree": (node_record._AGREE_SECONDS, 2.0),
    "a node's record is stored twice a minute": (node_record.HEARTBEAT_SECONDS, 30.0),
    "segments of a log that keep all lines": (node_recorder.NEWEST_SEGMENTS, 64),
    "a node's end is stored within the time that Kubernetes leaves": (
        node_recorder._LAST_STORE_SECONDS,
        20.0,
    ),
    "attempts to reach a sink are a minute apart at most": (alert_sinks._MAX_BACKOFF, 60.0),
    "a lost node is waited for before it is the cause": (first_failure.LOST_NODE_SECONDS, 8.0),
    "steps whose durations are remembered": (
        stall_detector.WINDOW_DURATIONS[Phase.STEP],
        1000,
    ),
    "checkpoints whose durations are remembered": (
        stall_detector.WINDOW_DURATIONS[Phase.CHECKPOINT],
        20,
    ),
    "a smaller share of lost time is not reported": (stragglers.MIN_LOST_SHARE, 0.02),
    "steps of a window": (stragglers.WINDOW_STEPS, 2),
    "a minute before a rank is named": (stragglers.MIN_WINDOWS, 6),
    "two minutes are compared": (stragglers.MAX_WINDOWS, 12),
    "standard errors of a slow rank": (stragglers.CONFIDENCE, 3.0),
    "seconds between two looks at durations": (stall_watch.LEARN_SECONDS, 10.0),
    "the first node is waited for before others report": (
        stall_watch.PEER_DETECTION_SECONDS,
        10.0,
    ),
    "a report of a stall is written before the job ends": (stall_watch.REPORT_TIMEOUT, 40.0),
    "the last alert is sent before the job ends": (stall_watch.LAST_ALERT_TIMEOUT, 20.0),
    "uploads are looked at twice a minute": (storage_report.STORAGE_CHECK_SECONDS, 30.0),
}


@pytest.mark.parametrize("meaning", LIMITS)
def test_limit_is_the_documented_one(meaning: str) -> None:
    value, expected = LIMITS[meaning]
    assert value == expected
