"""A large start needs a job or a canary of the last 90 days on its path."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sm_train.toolkit.records.training_job import JobPath, TrainingJob, job_path
from sm_train.toolkit.submit.proven_path import evidence

from tests.support.aws.described_jobs import described

NOW = datetime(2026, 11, 20, tzinfo=UTC)
REQUEST: dict[str, Any] = {
    "AlgorithmSpecification": {"TrainingImage": "image:1"},
    "ResourceConfig": {"InstanceType": "ml.p4de.24xlarge", "InstanceCount": 4},
    "EnableManagedSpotTraining": True,
    "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
    "HyperParameters": {"sagemaker_distributed_dataparallel_enabled": "true"},
}


def test_the_path_of_a_request_is_that_of_the_job_as_aws_describes_it() -> None:
    path = job_path(REQUEST)
    assert path == JobPath("ml.p4de.24xlarge", "image:1", "SMDDP", "spot", "a VPC", True)
    assert str(path) == ("ml.p4de.24xlarge (spot), several instances, SMDDP, a VPC, image image:1")
    chosen = {
        "InstancePreferences": [
            {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2},
            {"InstanceType": "ml.p4de.24xlarge", "InstanceCount": 4},
        ]
    }
    assert job_path(REQUEST | {"ResourceConfig": chosen}).instance_type == "ml.p5.48xlarge"
    selected = chosen | {"SelectedInstanceType": "ml.p4de.24xlarge", "SelectedInstanceCount": 4}
    assert job_path(REQUEST | {"ResourceConfig": selected}) == path


def job(name: str = "demo--a-0001", status: str = "Completed", **changes: Any) -> TrainingJob:
    begin = NOW - timedelta(days=2)
    times = {"CreationTime": begin, "TrainingStartTime": begin, "TrainingEndTime": NOW}
    return described(name, status, REQUEST | times | changes)


OTHERS = {
    "another image": {"AlgorithmSpecification": {"TrainingImage": "image:2"}},
    "another type": {"ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 4}},
    "a single instance": {
        "ResourceConfig": {"InstanceType": "ml.p4de.24xlarge", "InstanceCount": 1}
    },
    "another capacity": {"EnableManagedSpotTraining": False},
    "another network": {"VpcConfig": None},
    "another backend": {"HyperParameters": {}},
    "not started": {"TrainingStartTime": None},
}


@pytest.mark.parametrize("difference", OTHERS)
def test_a_job_on_another_path_proves_nothing(difference: str) -> None:
    assert evidence(job_path(REQUEST), [job(**OTHERS[difference])]) is None


def test_a_failed_job_proves_nothing_and_the_newest_that_ran_does() -> None:
    path = job_path(REQUEST)
    assert evidence(path, [job(status="Failed")]) is None
    newer = {"CreationTime": NOW - timedelta(days=1)}
    found = evidence(path, [job("demo--a-0002", "Stopped", **newer), job()])
    assert found is not None
    assert found.name == "demo--a-0002"


def test_a_canary_runs_on_demand_and_a_run_with_several_instances_proves_a_single_one() -> None:
    canary = job("demo-canary-1120101010--canary-0001", EnableManagedSpotTraining=False)
    assert evidence(job_path(REQUEST), [canary]) == canary
    single = {"InstanceType": "ml.p4de.24xlarge", "InstanceCount": 1}
    assert evidence(job_path(REQUEST | {"ResourceConfig": single}), [canary]) == canary
