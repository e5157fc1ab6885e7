"""The request: every choice of the run file is in it, and botocore's own model accepts it."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import botocore.loaders
import botocore.model
import botocore.validate
import pytest
from hypothesis import HealthCheck, given, settings
from sm_train.entrypoints.events import FIELDS, format_event
from sm_train.estimators.bundle import build_bundle
from sm_train.estimators.launch import framework_version
from sm_train.estimators.metrics import metric_definitions
from sm_train.estimators.request import code_uri, image_uri, training_request
from sm_train.estimators.run_config import RunConfig

from tests.estimators.runs import config, runs, stage

NOW = datetime(2026, 11, 20, 12, 0, 0)
IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/own:1"
_SERVICE = botocore.model.ServiceModel(
    botocore.loaders.Loader().load_service_model("sagemaker", "service-2")
)


def requests(run: RunConfig) -> list[dict[str, Any]]:
    bundle = build_bundle(run, framework_version(run))
    return [
        training_request(
            run,
            one,
            bundle,
            region="us-east-1",
            image=IMAGE,
            staged=code_uri(run, one, "us-east-1", NOW),
        )
        for one in run.stages
    ]


def channels(request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_any_run_file_that_validates_gives_requests_that_aws_accepts(run: dict[str, Any]) -> None:
    shape = _SERVICE.operation_model("CreateTrainingJob").input_shape
    for request in requests(RunConfig.model_validate(run)):
        report = botocore.validate.ParamValidator().validate(request, shape)
        assert not report.has_errors(), report.generate_report()
        _assert_limits(request, shape)


def _assert_limits(value: Any, shape: Any) -> None:
    """botocore checks types and least lengths only; the service checks these bounds as well."""
    bounds = shape.metadata
    if shape.type_name == "structure":
        for name, item in value.items():
            _assert_limits(item, shape.members[name])
    elif shape.type_name == "list":
        assert len(value) <= bounds.get("max", len(value)), shape.name
        for item in value:
            _assert_limits(item, shape.member)
    elif shape.type_name == "map":
        assert len(value) <= bounds.get("max", len(value)), shape.name
        for key, item in value.items():
            _assert_limits(key, shape.key)
            _assert_limits(item, shape.value)
    elif shape.type_name == "string":
        assert len(value) <= bounds.get("max", len(value)), (shape.name, value)
        pattern = bounds.get("pattern")
        if pattern:
            python = pattern.replace(r"\p{L}", "a-zA-Z").replace(r"\p{Z}", " ")
            python = python.replace(r"\p{N}", "0-9")
            assert re.fullmatch(python, value), (shape.name, value)
    elif shape.type_name in ("integer", "long"):
        assert bounds.get("min", value) <= value <= bounds.get("max", value), shape.name


def test_data_streams_and_is_dealt_out_between_instances() -> None:
    train = channels(requests(config())[0])["train"]
    assert train["InputMode"] == "FastFile"
    source = train["DataSource"]["S3DataSource"]
    assert source == {
        "S3DataType": "S3Prefix",
        "S3Uri": "s3://my-bucket/shards/",
        "S3DataDistributionType": "ShardedByS3Key",
    }


def test_a_run_survives_internal_errors_and_restarts() -> None:
    [request] = requests(config(cluster={"instance_type": "ml.p5.48xlarge", "retries": 7}))
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 7}
    assert request["CheckpointConfig"] == {
        "S3Uri": "s3://my-bucket/demo/checkpoints/256px",
        "LocalPath": "/opt/ml/checkpoints",
    }
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 5 * 86400}


def test_no_retries_leaves_the_field_out() -> None:
    [request] = requests(config(cluster={"instance_type": "ml.p5.48xlarge", "retries": 0}))
    assert "RetryStrategy" not in request


def test_a_later_stage_starts_from_the_final_model_of_the_one_before() -> None:
    first, second = requests(config(stages=[stage("a"), stage("b")]))
    assert "previous" not in channels(first)
    source = channels(second)["previous"]["DataSource"]["S3DataSource"]
    assert source["S3Uri"] == "s3://my-bucket/demo/checkpoints/a/final/"
    assert source["S3DataDistributionType"] == "FullyReplicated"
    assert "previous_state" not in channels(second)


@pytest.mark.parametrize("takes", [{"start": "raw"}, {"optimizer": "carried"}])
def test_a_stage_that_takes_more_gets_the_last_checkpoint(takes: dict[str, str]) -> None:
    stages = [stage("a", iterations=300), stage("b", **takes)]
    _, second = requests(config(stages=stages))
    source = channels(second)["previous_state"]["DataSource"]["S3DataSource"]
    assert source["S3Uri"] == "s3://my-bucket/demo/checkpoints/a/step-00000300/"


def test_every_channel_can_be_in_the_name_of_a_shell_variable() -> None:
    """The SDK's start script exports SM_CHANNEL_NAME, and ends where that is none."""
    _, second = requests(config(stages=[stage("a"), stage("b", start="raw")]))
    assert {"train", "previous", "previous_state"} < channels(second).keys()
    assert all(name.isidentifier() for name in channels(second))


@pytest.mark.parametrize(
    ("cluster", "field", "expected"),
    [
        (
            {"capacity": "spot", "max_wait": "6d"},
            "StoppingCondition",
            {"MaxRuntimeInSeconds": 432000, "MaxWaitTimeInSeconds": 518400},
        ),
        ({"capacity": "spot"}, "EnableManagedSpotTraining", True),
        (
            {"capacity": "warm-pool", "keep_alive": "30m"},
            "ResourceConfig",
            {
                "InstanceType": "ml.p5.48xlarge",
                "InstanceCount": 4,
                "VolumeSizeInGB": 30,
                "KeepAlivePeriodInSeconds": 1800,
            },
        ),
        (
            {"vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}},
            "VpcConfig",
            {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        ),
    ],
)
def test_each_kind_of_capacity_sets_its_own_field(
    cluster: dict[str, Any], field: str, expected: object
) -> None:
    [request] = requests(config(cluster={"instance_type": "ml.p5.48xlarge"} | cluster))
    assert request[field] == expected


def test_a_sharded_stage_takes_a_newer_pytorch_and_nccl_for_the_whole_run() -> None:
    stages = [stage("a"), stage("b", sharding="full_shard")]
    for request in requests(config(stages=stages)):
        assert "sagemaker_distributed_dataparallel_enabled" not in request["HyperParameters"]
        assert "2.3.0" not in request["AlgorithmSpecification"]["TrainingImage"]


def test_p4de_clusters_start_through_the_containers_own_smddp_launcher() -> None:
    [request] = requests(config())
    parameters = request["HyperParameters"]
    assert parameters["sagemaker_distributed_dataparallel_enabled"] == "true"
    assert parameters["sagemaker_program"] == "train.py"
    assert parameters["sagemaker_submit_directory"].endswith("/input/code/sourcedir.tar.gz")
    assert "ContainerEntrypoint" not in request["AlgorithmSpecification"]
    assert framework_version(config()) == "2.3.0"


@pytest.mark.parametrize(
    "cluster",
    [
        {"instance_type": "ml.p5.48xlarge"},
        {"instance_type": "ml.p4de.24xlarge", "collective": "nccl"},
        {"instance_type": "ml.p4de.24xlarge", "framework_version": "2.6.0"},
        {"instance_type": "ml.p4de.24xlarge", "image": IMAGE},
    ],
)
def test_everything_else_starts_by_torchrun_from_the_code_channel(cluster: dict[str, Any]) -> None:
    [request] = requests(config(cluster=cluster))
    assert request["HyperParameters"] == {"stage": "256px"}
    assert request["AlgorithmSpecification"]["ContainerEntrypoint"] == ["/bin/bash"]
    assert {"code", "sm_drivers"} < channels(request).keys()


def test_one_p4de_uses_torchrun() -> None:
    [request] = requests(config(stages=[stage(instances=1)]))
    assert request["HyperParameters"] == {"stage": "256px"}


@pytest.mark.parametrize(
    ("cluster", "image"),
    [
        ({}, "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.3.0-gpu-py311"),
        (
            {"collective": "nccl"},
            "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.10.0-gpu-py313",
        ),
        ({"image": IMAGE}, IMAGE),
    ],
)
def test_the_image_follows_from_the_collective(cluster: dict[str, Any], image: str) -> None:
    run = config(cluster={"instance_type": "ml.p4de.24xlarge"} | cluster)
    assert image_uri(run, "us-east-1") == image


def test_the_users_environment_wins_over_ours() -> None:
    [request] = requests(
        config(cluster={"instance_type": "ml.p5.48xlarge", "environment": {"NCCL_DEBUG": "WARN"}})
    )
    assert request["Environment"]["NCCL_DEBUG"] == "WARN"


def test_tags_tell_run_stage_and_bundle() -> None:
    run = config(tags={"team": "imaging"})
    [request] = requests(run)
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    digest = build_bundle(run, framework_version(run)).sha256
    assert tags == {
        "team": "imaging",
        "sm-train:run": "demo",
        "sm-train:stage": "256px",
        "sm-train:bundle": digest,
    }


def test_every_metric_reads_its_number_from_a_real_event_line() -> None:
    lines = [
        format_event(kind, dict.fromkeys(sorted(fields), 0.25), time=1.0, node=0, rank=0)
        for kind, fields in FIELDS.items()
    ]
    definitions = metric_definitions()
    assert len(definitions) <= 40
    for definition in definitions:
        found = [match[1] for line in lines if (match := re.search(definition["Regex"], line))]
        assert found == ["0.25"], definition


@pytest.mark.parametrize("value", [1e-4, 12, -0.5, 1.5e20])
def test_metrics_read_numbers_as_json_writes_them(value: float) -> None:
    fields = dict.fromkeys(FIELDS["step"], value)
    line = format_event("step", fields, time=1.0, node=0, rank=0)
    loss = next(one for one in metric_definitions() if one["Name"] == "sm_train:loss")
    match = re.search(loss["Regex"], line)
    assert match is not None
    assert float(match[1]) == value
