"""GPU utilization of jobs that do not log it: unknown where nothing is known of the instances."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sm_train.toolkit.planning.spent import Projection
from sm_train.toolkit.records.checkpoints import StoredCheckpoint
from sm_train.toolkit.records.live_state import LiveState, Progress
from sm_train.toolkit.records.stage_state import StageState
from sm_train.toolkit.runs.run_state import RunState
from sm_train.toolkit.runs.watch.gpu_metrics import gpu_utilization

from tests.support.aws.described_jobs import described, run_on_sagemaker
from tests.support.moto_server import aws_session
from tests.support.run_documents import config

NOW = datetime(2026, 11, 20, tzinfo=UTC)


def test_an_instance_type_that_is_not_in_the_table_has_no_utilization() -> None:
    """AWS has new types before this version knows them."""
    description: dict[str, Any] = {
        "ResourceConfig": {"InstanceType": "ml.p9.48xlarge", "InstanceCount": 2},
        "TrainingStartTime": NOW,
    }
    job = described("demo--a-0001", "InProgress", description)
    stored = StoredCheckpoint(None, (), final=False)
    stage = StageState("a", 100, "training", (job,), stored, Progress())
    projection = Projection(None, 0.0, None, 0.0, {})
    run = run_on_sagemaker(config(), session=aws_session())
    state = RunState(run, (stage,), projection, NOW, LiveState())
    assert gpu_utilization(state) == {}
