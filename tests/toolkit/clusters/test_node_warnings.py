"""What endangers a run on a cluster now: nodes of a live attempt, not of one that has ended."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sm_train.toolkit.clusters.node_records.cluster_job import cluster_jobs
from sm_train.toolkit.clusters.node_records.cluster_run import ClusterRun
from sm_train.toolkit.records.checkpoints import StoredCheckpoint
from sm_train.toolkit.records.live_state import Progress
from sm_train.toolkit.records.stage_state import stage_state

from tests.entrypoints.clusters.silence_support import NOW, ended, node
from tests.support.run_documents import config

LOST = node("algo-2", 600)


@pytest.mark.parametrize(
    ("other", "warnings"),
    [
        (node("algo-1", 10), ["no heartbeat of algo-2 for 10 minutes"]),
        (ended("algo-1", 590, 1), []),
        (node("algo-1", 600), []),
    ],
)
def test_lost_nodes_of_a_live_attempt_are_named(other: object, warnings: list[str]) -> None:
    jobs = cluster_jobs([other, LOST], "s3://bucket/checkpoints/a", "us-east-1", NOW)  # type: ignore[list-item]
    now = datetime.fromtimestamp(NOW, UTC)
    stored = StoredCheckpoint(None, (), final=False)
    stage = stage_state("a", 100, jobs, stored, Progress(), now=now, stall_after=900)
    run = ClusterRun(
        target="demo", config=config(), region="us-east-1", root="/shared", stages=("a",)
    )
    assert run.notices([stage], now) == warnings
