"""Helpers of the tests of screen, which other tests use as well."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sm_train.entrypoints.job_interface.events import FIELDS
from sm_train.toolkit.planning.spent import Projection
from sm_train.toolkit.records.checkpoints import StoredCheckpoint
from sm_train.toolkit.records.job_logs import Event
from sm_train.toolkit.records.live_state import LiveState, fold_events, progress_of
from sm_train.toolkit.records.stage_state import stage_state
from sm_train.toolkit.runs.remediation import NoAction
from sm_train.toolkit.runs.run_state import RunState
from sm_train.toolkit.runs.watch.controller import WatchResult
from sm_train.toolkit.runs.watch.screen import ScreenState

from tests.support.aws.described_jobs import described, run_on_sagemaker
from tests.support.run_documents import config, stage

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def logged(kind: str, ago: float, node: str = "algo-1", **fields: Any) -> tuple[str, Event]:
    header = {"kind": kind, "time": NOW.timestamp() - ago}
    return node, header | dict.fromkeys(FIELDS[kind]) | fields


def cluster(nodes: int, warnings: int = 3) -> LiveState:
    """Return an hour of a run that slows down; the third node is slow, its heartbeat late."""
    lines = [
        logged(
            "step",
            3600 - 20 * number,
            step=8000 + 36 * number,
            loss=0.3 * math.exp(-number / 90),
            steps_per_second=1.8 if number < 150 else 1.2,
            images_per_second=3686.4,
            data_wait_share=0.021,
            mfu=0.412,
        )
        for number in range(180)
    ]
    for number in range(1, nodes + 1):
        node = f"algo-{number}"
        slow = [{"rank": 16, "node": 2, "busy_seconds": 0.7, "ratio": 1.4}] if nodes > 2 else []
        lines += [
            logged(
                "heartbeat", 400 if number == 3 else 12, node, step=14440, seconds_since_step=0.4
            ),
            logged(
                "node",
                30,
                node,
                ranks=[],
                stragglers=slow if number == 1 else None,
                gpu_utilization_mean=97.0,
                gpu_utilization_min=91.0,
                gpu_memory_used_max=71 * 2**30,
                gpu_temperature_max=67.0,
                data_wait_share_max=0.03,
                network_receive_bytes_per_second=1e6,
                efa_receive_bytes_per_second=3.1e10,
                efa_send_bytes_per_second=3e10,
            ),
        ]
    lines += [
        logged("warning", 300 - number, code=f"code-{number}", message="a long message " * 20)
        for number in range(warnings)
    ]
    return fold_events(lines)


def model(live: LiveState, nodes: int, **changes: Any) -> ScreenState:
    description: dict[str, Any] = {
        "SecondaryStatus": "Training",
        "CreationTime": NOW - timedelta(hours=2),
        "TrainingStartTime": NOW - timedelta(hours=2),
        "ResourceConfig": {"InstanceType": "ml.p4de.24xlarge", "InstanceCount": nodes},
    }
    job = described("demo--256px-0001", "InProgress", description)
    run = config(stages=[stage(max_steps=20_000)], budget={"usd": 2500})
    at = stage_state(
        "256px",
        20_000,
        [job],
        StoredCheckpoint(14_000, (), final=False),
        progress_of(live),
        now=NOW,
        stall_after=900,
    )
    state = RunState(
        run_on_sagemaker(run),
        (at,),
        Projection(1204.0, 1204.0, 1204.0, 1204.0, {"256px": 1406.0}),
        NOW,
        live,
    )
    warning = "the run is projected to cost $2,610, more than budget.usd $2,500"
    result = WatchResult(state, NoAction("training"), "training", warning)
    return replace(
        ScreenState(result, live, footer="next poll in 43 s; Ctrl-C ends the watch"), **changes
    )
