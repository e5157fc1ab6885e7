"""The request: every choice of the run file is in it, and botocore's own model accepts it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError
from sm_train.cost.instances import instance_types
from sm_train.entrypoints.common.events import FIELDS, format_event
from sm_train.estimators.bundle.bundle import Bundle, build_bundle, pack
from sm_train.estimators.config.cluster import ClusterSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launcher import framework_version, launch_plans, pytorch_version
from sm_train.estimators.request.metrics import metric_definitions
from sm_train.estimators.request.training import code_uri, training_requests

from tests.support.run_documents import ECR, PLAN, config, run, runs, stage
from tests.support.service_model import request_errors

NOW = datetime(2026, 11, 20, 12, 0, 0)

ANY_BUNDLE = pack({}, "train.py")


def requests(config: RunConfig, bundle: Bundle | None = None) -> list[dict[str, Any]]:
    bundle = bundle or build_bundle(config, framework_version(config))
    image = config.cluster.image or ECR
    return training_requests(
        config, launch_plans(config, config.stages, image), bundle, region="us-east-1", now=NOW
    )


def channels(request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_any_run_file_that_validates_gives_requests_that_aws_accepts(good: dict[str, Any]) -> None:
    for request in requests(RunConfig.model_validate(good), ANY_BUNDLE):
        assert request_errors(request) == []


def _replaced(good: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(good)
    place: Any = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return changed


_PLACES: list[tuple[str | int, ...]] = [
    *[(key,) for key in ("name", "region", "role", "bucket", "output_kms_key", "tags", "channels")],
    *[("data", key) for key in ("uri", "validation", "index")],
    *[("model", "components"), ("stages", 0, "name"), ("stages", 0, "instances")],
    *[("cluster", key) for key in ClusterSection.model_fields],
]
# Around every bound that the service model has.
_LENGTHS = (0, 1, 13, 32, 33, 63, 64, 65, 128, 129, 255, 256, 257, 512, 513, 990, 1000, 1024, 2100)
_TEXTS = [
    *("a" * length for length in _LENGTHS),
    *(f"s3://own/{'a' * length}/" for length in _LENGTHS),
    *(f"arn:aws:iam::111122223333:role/{'a' * length}" for length in _LENGTHS),
    *(f"s3://own/{'a' * length}/b/" for length in _LENGTHS),
    *(f"{PLAN}{'a' * length}" for length in _LENGTHS),
    "arn:aws:sagemaker:r:111122223333:training-plan/a",
    *(f"arn:aws:iam::{digits}:role/{name}" for digits in ("1" * 11, "١" * 12) for name in "aé"),
    *("a b", "a/b", "a:b", "a_b", "-a", "a-", "..", "é", "a\n", "a\tb", "a'b", "\x00", "aws:a"),
    *("sg-1", "2.3.0", "٢.٣", "us-east-1", "us-east-٢", "alias/own", "train", "arn:aws:kms:a.b"),
    *(machine.name for machine in instance_types()),
]
_NUMBERS = [-1, 0, 1, 30, 31, 60, 1799, 1800, 16385, 21600, 21601, 2419200, 2419201, 10**12, "2d"]
_SIZES = (1, 4, 5, 6, 12, 13, 16, 17, 40, 41, 96, 97, 101)


def _values() -> Iterator[Any]:
    yield from (None, True, *_TEXTS, *_NUMBERS)
    for text in _TEXTS:
        yield [text]
        yield {text: "a"}
        yield {"a": text}
        yield {text: {"uri": "s3://own/a/"}}
        yield {"own": {"uri": text}}
        yield {"subnets": [text], "security_groups": ["sg-1"]}
        yield {"subnets": ["subnet-1"], "security_groups": [text]}
    for size in _SIZES:
        many = [f"own{index}" for index in range(size)]
        yield from (many, dict.fromkeys(many, "a"), {key: {"uri": "s3://own/a/"} for key in many})
        yield {"subnets": many, "security_groups": ["sg-1"]}
        yield {"subnets": ["subnet-1"], "security_groups": many}


@pytest.mark.parametrize("place", _PLACES, ids=lambda place: ".".join(map(str, place)))
def test_a_run_file_whose_request_aws_would_refuse_does_not_validate(
    place: tuple[str | int, ...],
) -> None:
    """Whatever stands in one place: either it is refused at once, or AWS takes the request."""
    base = run(
        stages=[stage("a"), stage("b", optimizer_state="keep")],
        cluster={"instance_type": "ml.p6e-gb200.36xlarge", "image": ECR},
    )
    for value in _values():
        try:
            changed = RunConfig.model_validate(_replaced(base, place, value))
        except ValidationError:
            continue
        for request in requests(changed, ANY_BUNDLE):
            assert request_errors(request) == [], value


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


@pytest.mark.parametrize("takes", [{"init_from": "raw"}, {"optimizer_state": "keep"}])
def test_a_stage_that_takes_more_gets_the_last_checkpoint(takes: dict[str, str]) -> None:
    stages = [stage("a", max_steps=300), stage("b", **takes)]
    _, second = requests(config(stages=stages))
    source = channels(second)["previous_state"]["DataSource"]["S3DataSource"]
    assert source["S3Uri"] == "s3://my-bucket/demo/checkpoints/a/step-00000300/"


def test_every_channel_can_be_in_the_name_of_a_shell_variable() -> None:
    """The SDK's start script exports SM_CHANNEL_NAME, and ends where that is none."""
    _, second = requests(config(stages=[stage("a"), stage("b", init_from="raw")]))
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
            {"capacity": "warm-pool", "keep_alive_period": "30m"},
            "ResourceConfig",
            {
                "InstanceType": "ml.p5.48xlarge",
                "InstanceCount": 4,
                "VolumeSizeInGB": 30,
                "KeepAlivePeriodInSeconds": 1800,
            },
        ),
        (
            {"capacity": "training-plan", "training_plan": f"{PLAN}own"},
            "ResourceConfig",
            {
                "InstanceType": "ml.p5.48xlarge",
                "InstanceCount": 4,
                "VolumeSizeInGB": 30,
                "TrainingPlanArn": f"{PLAN}own",
            },
        ),
        (
            {"max_pending": "2h"},
            "StoppingCondition",
            {"MaxRuntimeInSeconds": 432000, "MaxPendingTimeInSeconds": 7200},
        ),
        (
            {"instance_type": "ml.p6e-gb200.36xlarge", "volume_kms_key": "alias/own"},
            "ResourceConfig",
            {
                "InstanceType": "ml.p6e-gb200.36xlarge",
                "InstanceCount": 4,
                "VolumeSizeInGB": 30,
                "VolumeKmsKeyId": "alias/own",
            },
        ),
        (
            {"vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}},
            "VpcConfig",
            {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        ),
        ({"network_isolation": True, "image": ECR}, "EnableNetworkIsolation", True),
        ({"encrypt_traffic": True}, "EnableInterContainerTrafficEncryption", True),
        ({"remote_debug": True}, "RemoteDebugConfig", {"EnableRemoteDebug": True}),
        ({"infra_check": True}, "InfraCheckConfig", {"EnableInfraCheck": True}),
    ],
)
def test_each_choice_sets_its_own_field_and_no_other(
    cluster: dict[str, Any], field: str, expected: object
) -> None:
    [plain] = requests(config(cluster={"instance_type": "ml.p5.48xlarge", "image": ECR}))
    [request] = requests(
        config(cluster={"instance_type": "ml.p5.48xlarge", "image": ECR} | cluster)
    )
    assert request[field] == expected
    changed = {key for key in request.keys() | plain.keys() if request.get(key) != plain.get(key)}
    spot = {"StoppingCondition", "EnableManagedSpotTraining"} if "spot" in cluster.values() else {}
    # The run document is in the bundle, whose digest is a tag.
    assert changed <= {field, "Tags", *spot}


def test_alternatives_of_as_many_gpus_share_one_count() -> None:
    cluster = {"instance_type": "ml.p4de.24xlarge", "alternatives": ["ml.p5.48xlarge"]}
    [request] = requests(config(cluster=cluster))
    assert request["ResourceConfig"] == {
        "InstancePreferences": [
            {"InstanceType": "ml.p4de.24xlarge"},
            {"InstanceType": "ml.p5.48xlarge"},
        ],
        "InstanceCount": 4,
        "VolumeSizeInGB": 30,
    }
    # One image and one way to start for all of them: NCCL.
    assert "ContainerEntrypoint" in request["AlgorithmSpecification"]


def test_alternatives_with_fewer_gpus_come_in_a_number_that_keeps_the_batch() -> None:
    cluster = {"instance_type": "ml.g6e.48xlarge", "alternatives": ["ml.g6e.12xlarge"]}
    [request] = requests(config(cluster=cluster))
    assert request["ResourceConfig"] == {
        "InstancePreferences": [
            {"InstanceType": "ml.g6e.48xlarge", "InstanceCount": 4},
            {"InstanceType": "ml.g6e.12xlarge", "InstanceCount": 8},
        ],
        "VolumeSizeInGB": 30,
    }


def test_further_channels_come_after_ours() -> None:
    own = {"masks": {"uri": "s3://my-bucket/masks/", "mode": "File", "sharded": True}}
    [request] = requests(config(channels=own))
    assert channels(request)["masks"] == {
        "ChannelName": "masks",
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": "s3://my-bucket/masks/",
                "S3DataDistributionType": "ShardedByS3Key",
            }
        },
        "InputMode": "File",
    }


def test_the_models_key_is_the_outputs() -> None:
    [request] = requests(config(output_kms_key="alias/own"))
    assert request["OutputDataConfig"]["KmsKeyId"] == "alias/own"


def test_isolated_smddp_takes_its_code_from_a_channel() -> None:
    """The container's toolkit would fetch it from S3 otherwise, which it cannot reach."""
    cluster = {"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}
    [request] = requests(config(cluster=cluster | {"image": ECR, "network_isolation": True}))
    place = "/opt/ml/input/data/code/sourcedir.tar.gz"
    assert request["HyperParameters"]["sagemaker_submit_directory"] == place
    assert "sm_drivers" not in channels(request)
    assert code_uri(request) == (
        "s3://my-bucket/demo/code/256px-20261120120000/input/code/sourcedir.tar.gz"
    )


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
        {"instance_type": "ml.p4de.24xlarge", "backend": "nccl"},
        {"instance_type": "ml.p4de.24xlarge", "framework_version": "2.6.0"},
        {"instance_type": "ml.p4de.24xlarge", "image": ECR},
    ],
)
def test_everything_else_starts_by_torchrun_from_the_code_channel(cluster: dict[str, Any]) -> None:
    [request] = requests(config(cluster=cluster))
    assert request["HyperParameters"] == {"stage": "256px"}
    assert request["AlgorithmSpecification"]["ContainerEntrypoint"] == ["/bin/bash"]
    assert {"code", "sm_drivers"} < channels(request).keys()


@pytest.mark.parametrize(
    ("cluster", "version"),
    [
        ({}, "2.3.0"),
        ({"backend": "nccl"}, "2.10.0"),
        ({"image": ECR}, None),
        ({"image": ECR, "framework_version": "2.4.1", "backend": "smddp"}, "2.4.1"),
        ({"image": ECR, "backend": "smddp"}, "2.3.0"),
    ],
)
def test_packages_are_those_for_the_images_pytorch(
    cluster: dict[str, Any], version: str | None
) -> None:
    run = config(cluster={"instance_type": "ml.p4de.24xlarge"} | cluster)
    assert pytorch_version(run) == version


def test_one_p4de_uses_torchrun() -> None:
    [request] = requests(config(stages=[stage(instances=1)]))
    assert request["HyperParameters"] == {"stage": "256px"}


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
    [request] = training_requests(
        run,
        launch_plans(run, run.stages, ECR),
        build_bundle(run, framework_version(run)),
        region="us-east-1",
        now=NOW,
        commit="0123abc-dirty",
    )
    assert {"Key": "sm-train:commit", "Value": "0123abc-dirty"} in request["Tags"]


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
