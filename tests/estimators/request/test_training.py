"""A request contains every setting of the run file, and botocore's service model accepts it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError
from sm_train.cost.instances import instance_types
from sm_train.entrypoints.job_interface.events import FIELDS, format_event
from sm_train.estimators.bundle.bundle import build_bundle, pack
from sm_train.estimators.config.cluster import ClusterSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launch_plan import framework_version, launch_plans, pytorch_version
from sm_train.estimators.request.metric_definitions import metric_definitions
from sm_train.estimators.request.processing import ProcessingJob, processing_request
from sm_train.estimators.request.training_request import (
    code_uri,
    hyperparameter,
    stage_name,
    training_requests,
)

from tests.estimators.request.training_support import NOW, requests
from tests.support.run_documents import ECR, PLAN, config, run, runs, stage
from tests.support.service_model import request_errors, shape_limits

ANY_BUNDLE = pack({}, "train.py")


def channels(request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_aws_accepts_the_requests_of_any_valid_run_file(document: dict[str, Any]) -> None:
    for request in requests(RunConfig.model_validate(document), ANY_BUNDLE):
        assert request_errors(request) == []


def _with_value(
    document: dict[str, Any], path: tuple[str | int, ...], value: Any
) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    parent: Any = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


_PATHS: list[tuple[str | int, ...]] = [
    *[(key,) for key in ("name", "region", "role", "bucket", "output_kms_key", "tags", "channels")],
    *[("data", key) for key in ("uri", "validation", "index")],
    *[("model", "components"), ("stages", 0, "name"), ("stages", 0, "instances")],
    # What request_patch adds is validated with the request, before it is shown.
    *[("cluster", key) for key in ClusterSection.model_fields if key != "request_patch"],
]
# Below and above every bound of the service model.
_LENGTHS = (0, 1, 13, 32, 33, 63, 64, 65, 128, 129, 255, 256, 257, 512, 513, 990, 1000, 1024, 2100)
_TEXTS = [
    *("a" * length for length in _LENGTHS),
    *(f"s3://user/{'a' * length}/" for length in _LENGTHS),
    *(f"arn:aws:iam::210987654321:role/{'a' * length}" for length in _LENGTHS),
    *(f"s3://user/{'a' * length}/b/" for length in _LENGTHS),
    *(f"{PLAN}{'a' * length}" for length in _LENGTHS),
    "arn:aws:sagemaker:r:210987654321:training-plan/a",
    *(f"arn:aws:iam::{digits}:role/{name}" for digits in ("1" * 11, "١" * 12) for name in "aé"),
    *("a b", "a/b", "a:b", "a_b", "-a", "a-", "..", "é", "a\n", "a\tb", "a'b", "\x00", "aws:a"),
    *("sg-1", "2.3.0", "٢.٣", "us-east-1", "us-east-٢", "alias/own", "train", "arn:aws:kms:a.b"),
    *(instance.name for instance in instance_types()),
]
_NUMBERS = [-1, 0, 1, 30, 31, 60, 1799, 1800, 16385, 21600, 21601, 2419200, 2419201, 10**12, "2d"]
_SIZES = (1, 4, 5, 6, 12, 13, 16, 17, 40, 41, 96, 97, 101)


def _values() -> Iterator[Any]:
    yield from (None, True, *_TEXTS, *_NUMBERS)
    for text in _TEXTS:
        yield [text]
        yield {text: "a"}
        yield {"a": text}
        yield {text: {"uri": "s3://user/a/"}}
        yield {"user": {"uri": text}}
        yield {"subnets": [text], "security_groups": ["sg-1"]}
        yield {"subnets": ["subnet-1"], "security_groups": [text]}
    for size in _SIZES:
        items = [f"user{index}" for index in range(size)]
        yield from (items, dict.fromkeys(items, "a"))
        yield {key: {"uri": "s3://user/a/"} for key in items}
        yield {"subnets": items, "security_groups": ["sg-1"]}
        yield {"subnets": ["subnet-1"], "security_groups": items}


@pytest.mark.parametrize("path", _PATHS, ids=lambda path: ".".join(map(str, path)))
def test_invalid_requests_are_rejected_in_the_run_file(path: tuple[str | int, ...]) -> None:
    """For any value of one key, either the run file is invalid or AWS accepts the request."""
    base = run(
        stages=[stage("a"), stage("b", optimizer_state="keep")],
        cluster={"instance_type": "ml.p3.16xlarge", "image": ECR, "vpc": VPC},
    )
    for value in _values():
        try:
            changed = RunConfig.model_validate(_with_value(base, path, value))
        except ValidationError:
            continue
        for request in requests(changed, ANY_BUNDLE):
            assert request_errors(request) == [], value


VPC = {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}
SHARDED, REPLICATED = "ShardedByS3Key", "FullyReplicated"


def channel_modes(request: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    """URI, distribution over the instances, and input mode of each channel."""
    return {
        name: (
            channel["DataSource"]["S3DataSource"]["S3Uri"],
            channel["DataSource"]["S3DataSource"]["S3DataDistributionType"],
            channel["InputMode"],
        )
        for name, channel in channels(request).items()
    }


def test_each_channel_has_its_distribution_and_input_mode() -> None:
    """Only the training shards are split: an instance needs all of everything else."""
    run = config(
        stages=[
            stage("a", max_steps=300, sources=[{"channel": "train"}, {"channel": "art"}]),
            stage("b", optimizer_state="keep"),
        ],
        data={"uri": "s3://ai-bucket/shards/", "validation": "s3://ai-bucket/held-out/"},
        model={"preset": "sd2", "components": "s3://ai-bucket/components/"},
        cluster={"instance_type": "ml.p5.48xlarge"},
        channels={
            "masks": {"uri": "s3://ai-bucket/masks/", "mode": "File", "sharded": True},
            "labels": {"uri": "s3://ai-bucket/labels/"},
            "art": {"uri": "s3://ai-bucket/art/shards/"},
        },
    )
    staged = "s3://ai-bucket/demo/code/b-20261120120000/input"
    checkpoints = "s3://ai-bucket/demo/checkpoints/a"
    _, request = requests(run)
    assert channel_modes(request) == {
        "train": ("s3://ai-bucket/shards/", SHARDED, "FastFile"),
        "index": ("s3://ai-bucket/index.parquet", REPLICATED, "File"),
        "validation": ("s3://ai-bucket/held-out/", REPLICATED, "FastFile"),
        "model": ("s3://ai-bucket/components/", REPLICATED, "File"),
        "previous": (f"{checkpoints}/final/", REPLICATED, "File"),
        "previous_state": (f"{checkpoints}/step-00000300/", REPLICATED, "File"),
        "masks": ("s3://ai-bucket/masks/", SHARDED, "File"),
        "labels": ("s3://ai-bucket/labels/", REPLICATED, "FastFile"),
        "art": ("s3://ai-bucket/art/shards/", REPLICATED, "FastFile"),
        "index_art": ("s3://ai-bucket/art/index.parquet", REPLICATED, "File"),
        "code": (f"{staged}/code/sourcedir.tar.gz", REPLICATED, "File"),
        "sm_drivers": (f"{staged}/sm_drivers/", REPLICATED, "File"),
    }
    sources = [channel["DataSource"]["S3DataSource"] for channel in channels(request).values()]
    assert {source["S3DataType"] for source in sources} == {"S3Prefix"}


def test_job_has_retries_and_a_checkpoint_location() -> None:
    [request] = requests(config(cluster={"instance_type": "ml.p5.48xlarge", "retries": 7}))
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 7}
    assert request["CheckpointConfig"] == {
        "S3Uri": "s3://ai-bucket/demo/checkpoints/256px/",
        "LocalPath": "/opt/ml/checkpoints",
    }
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 5 * 86400}


@pytest.mark.parametrize("slash", ["", "/"])
def test_folders_end_with_a_slash_and_objects_do_not(slash: str) -> None:
    """SageMaker matches keys by string prefix: ``shards`` is also the beginning of
    ``shards-old/``.
    """
    run = config(
        stages=[stage("a"), stage("b", optimizer_state="keep")],
        data={"uri": f"s3://ai-bucket/shards{slash}", "validation": f"s3://ai-bucket/v1.5{slash}"},
        model={"preset": "sd2", "components": f"s3://ai-bucket{slash}"},
        cluster={"instance_type": "ml.p5.48xlarge"},
        channels={
            "masks": {"uri": f"s3://ai-bucket/masks{slash}"},
            "words": {"uri": "s3://ai-bucket/words.v2/words.txt"},
            "bucket": {"uri": f"s3://own.images.org{slash}"},
        },
    )
    _, request = requests(run)
    uris = {name: uri for name, (uri, _, _) in channel_modes(request).items()}
    objects = {"index", "words", "code"}
    assert {name for name, uri in uris.items() if not uri.endswith("/")} == objects
    assert uris["words"] == "s3://ai-bucket/words.v2/words.txt"
    assert not any(uri.endswith("//") for uri in uris.values())
    assert request["CheckpointConfig"]["S3Uri"].endswith("/checkpoints/b/")


def test_profiler_and_compression_are_off() -> None:
    [request] = requests(config())
    assert request["ProfilerConfig"] == {"DisableProfiler": True}
    assert request["OutputDataConfig"]["CompressionType"] == "NONE"


def test_zero_retries_omits_the_field() -> None:
    [request] = requests(config(cluster={"instance_type": "ml.p5.48xlarge", "retries": 0}))
    assert "RetryStrategy" not in request


def test_later_stage_starts_from_the_previous_final_model() -> None:
    first, second = requests(config(stages=[stage("a"), stage("b")]))
    assert "previous" not in channels(first)
    source = channels(second)["previous"]["DataSource"]["S3DataSource"]
    assert source["S3Uri"] == "s3://ai-bucket/demo/checkpoints/a/final/"
    assert source["S3DataDistributionType"] == "FullyReplicated"
    assert "previous_state" not in channels(second)


@pytest.mark.parametrize("settings", [{"init_from": "raw"}, {"optimizer_state": "keep"}])
def test_stage_that_needs_state_gets_the_last_checkpoint(settings: dict[str, str]) -> None:
    stages = [stage("a", max_steps=300), stage("b", **settings)]
    _, second = requests(config(stages=stages))
    source = channels(second)["previous_state"]["DataSource"]["S3DataSource"]
    assert source["S3Uri"] == "s3://ai-bucket/demo/checkpoints/a/step-00000300/"


def test_channel_names_are_valid_shell_variables() -> None:
    """The SDK's start script exports SM_CHANNEL_NAME and fails if that is not valid."""
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
            {"instance_type": "ml.p3.16xlarge", "volume_kms_key": "alias/own"},
            "ResourceConfig",
            {
                "InstanceType": "ml.p3.16xlarge",
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
    ],
)
def test_each_setting_changes_only_its_field(
    cluster: dict[str, Any], field: str, expected: object
) -> None:
    [default] = requests(config(cluster={"instance_type": "ml.p5.48xlarge", "image": ECR}))
    [request] = requests(
        config(cluster={"instance_type": "ml.p5.48xlarge", "image": ECR} | cluster)
    )
    assert request[field] == expected
    changed = {
        key for key in request.keys() | default.keys() if request.get(key) != default.get(key)
    }
    spot = {"StoppingCondition", "EnableManagedSpotTraining"} if "spot" in cluster.values() else {}
    # The run file is in the bundle, whose digest is a tag and a variable.
    assert changed <= {field, "Tags", "Environment", *spot}
    expected_variables = default["Environment"] | {
        "SM_TRAIN_BUNDLE": request["Environment"]["SM_TRAIN_BUNDLE"]
    }
    if "network_isolation" in cluster:  # without network no list can be read again
        del expected_variables["SM_TRAIN_REMOVALS_0"]
    assert request["Environment"] == expected_variables


def test_alternatives_with_equal_gpus_share_one_count() -> None:
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
    assert "sagemaker_program" not in request["HyperParameters"]


def test_alternatives_with_fewer_gpus_have_higher_counts() -> None:
    cluster = {"instance_type": "ml.g6e.48xlarge", "alternatives": ["ml.g6e.12xlarge"]}
    [request] = requests(config(cluster=cluster))
    assert request["ResourceConfig"] == {
        "InstancePreferences": [
            {"InstanceType": "ml.g6e.48xlarge", "InstanceCount": 4},
            {"InstanceType": "ml.g6e.12xlarge", "InstanceCount": 8},
        ],
        "VolumeSizeInGB": 30,
    }


def test_a_training_plan_is_first_and_on_demand_instances_follow() -> None:
    """A type may appear only once, and one without a plan is on demand (botocore's model)."""
    cluster = {
        "instance_type": "ml.p5.48xlarge",
        "capacity": "training-plan",
        "training_plan": f"{PLAN}own",
        "alternatives": ["ml.p4de.24xlarge"],
    }
    [request] = requests(config(cluster=cluster))
    assert request["ResourceConfig"] == {
        "InstancePreferences": [
            {"InstanceType": "ml.p5.48xlarge", "TrainingPlanArns": [f"{PLAN}own"]},
            {"InstanceType": "ml.p4de.24xlarge"},
        ],
        "InstanceCount": 4,
        "VolumeSizeInGB": 30,
    }


def test_image_of_a_private_registry_is_pulled_through_the_vpc() -> None:
    function = "arn:aws:lambda:us-east-1:210987654321:function:registry"
    cluster = {"instance_type": "ml.p5.48xlarge", "vpc": VPC, "image": "registry.example.com/own:1"}
    [request] = requests(config(cluster=cluster))
    assert request["AlgorithmSpecification"]["TrainingImage"] == "registry.example.com/own:1"
    assert request["AlgorithmSpecification"]["TrainingImageConfig"] == {
        "TrainingRepositoryAccessMode": "Vpc"
    }
    [request] = requests(config(cluster=cluster | {"image_credentials": function}))
    assert request_errors(request) == []
    assert request["AlgorithmSpecification"]["TrainingImageConfig"] == {
        "TrainingRepositoryAccessMode": "Vpc",
        "TrainingRepositoryAuthConfig": {"TrainingRepositoryCredentialsProviderArn": function},
    }
    [request] = requests(config(cluster=cluster | {"image": ECR}))
    assert "TrainingImageConfig" not in request["AlgorithmSpecification"]


@pytest.mark.parametrize(
    ("index", "variable"),
    [
        ("https://packages.example.com/simple/", "PIP_INDEX_URL"),
        (
            "arn:aws:codeartifact:us-east-1:210987654321:repository/own/packages",
            "CA_REPOSITORY_ARN",
        ),
    ],
)
def test_package_index_reaches_the_job(index: str, variable: str) -> None:
    cluster = {"instance_type": "ml.p5.48xlarge", "package_index": index}
    run = config(cluster=cluster)
    [request] = requests(run)
    assert request["Environment"][variable] == index
    job = ProcessingJob("pack", "s3://ai-bucket/packed/", "ml.m5.xlarge", 2)
    packing = processing_request(run, job, region="us-east-1", image=ECR, now=NOW)
    assert packing["Environment"][variable] == index


def test_file_systems_are_mounted_read_only() -> None:
    shards = {"id": "fs-0123456789abcdef0", "type": "FSxLustre", "directory": "/abcdbev4/shards"}
    words = {"id": "fs-01234567", "type": "EFS", "directory": "/words"}
    run = config(
        cluster={"instance_type": "ml.p5.48xlarge", "vpc": VPC},
        data={"uri": "s3://ai-bucket/shards/", "file_system": shards},
        channels={"words": {"file_system": words}},
    )
    [request] = requests(run)
    assert request_errors(request) == []
    assert channels(request)["train"] == {
        "ChannelName": "train",
        "DataSource": {
            "FileSystemDataSource": {
                "FileSystemId": "fs-0123456789abcdef0",
                "FileSystemAccessMode": "ro",
                "FileSystemType": "FSxLustre",
                "DirectoryPath": "/abcdbev4/shards",
            }
        },
        "InputMode": "File",
    }
    source = channels(request)["words"]["DataSource"]["FileSystemDataSource"]
    assert (source["FileSystemType"], source["DirectoryPath"]) == ("EFS", "/words")
    # The index is read from S3, as every instance sees all shards.
    index = channels(request)["index"]["DataSource"]["S3DataSource"]
    assert index["S3Uri"] == "s3://ai-bucket/index.parquet"
    assert not run.train_sharded


def test_output_kms_key_is_set() -> None:
    [request] = requests(config(output_kms_key="alias/own"))
    assert request["OutputDataConfig"]["KmsKeyId"] == "alias/own"


def test_isolated_smddp_reads_its_code_from_a_channel() -> None:
    """The container's toolkit cannot download it from S3 without network access."""
    cluster = {"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}
    [request] = requests(config(cluster=cluster | {"image": ECR, "network_isolation": True}))
    archive = "/opt/ml/input/data/code/sourcedir.tar.gz"
    assert hyperparameter(request, "sagemaker_submit_directory") == archive
    assert "sm_drivers" not in channels(request)
    assert code_uri(request) == (
        "s3://ai-bucket/demo/code/256px-20261120120000/input/code/sourcedir.tar.gz"
    )


def smddp(**changes: Any) -> RunConfig:
    cluster = {"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}
    return config(cluster=cluster | changes.pop("cluster", {}), **changes)


def test_smddp_runs_on_the_newest_image_that_includes_it() -> None:
    [request] = requests(smddp())
    parameters = request["HyperParameters"]
    assert parameters["sagemaker_distributed_dataparallel_enabled"] == "true"
    assert hyperparameter(request, "sagemaker_program") == "train.py"
    directory = hyperparameter(request, "sagemaker_submit_directory")
    assert directory
    assert directory.endswith("/code/sourcedir.tar.gz")
    assert framework_version(smddp()) == "2.5.1"
    for version in ("2.3.0", "2.4.0"):
        assert framework_version(smddp(cluster={"framework_version": version})) == version


def test_all_stages_use_one_image() -> None:
    run = smddp(stages=[stage("a"), stage("b", instances=1)])
    first, second = requests(run)
    images = {request["AlgorithmSpecification"]["TrainingImage"] for request in (first, second)}
    assert len(images) == 1
    assert "sagemaker_program" in first["HyperParameters"]
    assert "sagemaker_program" not in second["HyperParameters"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1e3", "007", "true", "null", "256px"])
def test_hyperparameters_of_smddp_survive_the_toolkits_json(name: str) -> None:
    """AWS's toolkit parses every value as JSON, and falls back to the text."""
    [request] = requests(smddp(stages=[stage(name)]))
    assert json.loads(request["HyperParameters"]["stage"]) == name
    assert stage_name(request) == name
    [request] = requests(config(stages=[stage(name)]))
    assert stage_name(request) == request["HyperParameters"]["stage"] == name


@pytest.mark.parametrize("run", [config(), smddp()])
def test_entrypoint_fits_the_service_model(run: RunConfig) -> None:
    """No element may be longer than 256 characters."""
    [request] = requests(run)
    algorithm = request["AlgorithmSpecification"]
    for field in ("ContainerEntrypoint", "ContainerArguments"):
        elements = algorithm[field]
        elements_limit = shape_limits(f"Training{field}")
        length_limit = shape_limits(
            {
                "ContainerEntrypoint": "TrainingContainerEntrypointString",
                "ContainerArguments": "TrainingContainerArgument",
            }[field]
        )
        assert elements_limit["min"] <= len(elements) <= elements_limit["max"]
        assert max(map(len, elements)) <= length_limit["max"]


@pytest.mark.parametrize(
    "cluster",
    [
        {"instance_type": "ml.p5.48xlarge"},
        {"instance_type": "ml.p4de.24xlarge"},
        {"instance_type": "ml.p4de.24xlarge", "backend": "nccl"},
        {"instance_type": "ml.p4de.24xlarge", "framework_version": "2.6.0"},
        {"instance_type": "ml.p4de.24xlarge", "image": ECR},
    ],
)
def test_other_clusters_start_with_torchrun(cluster: dict[str, Any]) -> None:
    [request] = requests(config(cluster=cluster))
    assert request["HyperParameters"] == {"stage": "256px"}
    assert request["AlgorithmSpecification"]["ContainerEntrypoint"] == ["/bin/bash"]
    assert {"code", "sm_drivers"} < channels(request).keys()


@pytest.mark.parametrize(
    ("cluster", "version"),
    [
        ({}, "2.13.0"),
        ({"backend": "nccl"}, "2.13.0"),
        ({"backend": "smddp"}, "2.5.1"),
        ({"image": ECR}, None),
        ({"image": ECR, "framework_version": "2.4.1", "backend": "smddp"}, "2.4.1"),
        ({"image": ECR, "backend": "smddp"}, "2.5.1"),
    ],
)
def test_pytorch_version_follows_the_image(cluster: dict[str, Any], version: str | None) -> None:
    run = config(cluster={"instance_type": "ml.p4de.24xlarge"} | cluster)
    assert pytorch_version(run) == version


def test_single_p4de_starts_with_torchrun() -> None:
    [request] = requests(config(stages=[stage(instances=1)]))
    assert request["HyperParameters"] == {"stage": "256px"}


def test_user_environment_overrides_defaults() -> None:
    [request] = requests(
        config(cluster={"instance_type": "ml.p5.48xlarge", "environment": {"NCCL_DEBUG": "WARN"}})
    )
    assert request["Environment"]["NCCL_DEBUG"] == "WARN"


def test_tags_name_run_stage_and_bundle() -> None:
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


def test_every_metric_matches_a_real_event_line() -> None:
    lines = [
        format_event(kind, dict.fromkeys(sorted(fields), 0.25), time=1.0, node=0, rank=0)
        for kind, fields in FIELDS.items()
    ]
    definitions = metric_definitions()
    assert len(definitions) <= 40
    for definition in definitions:
        values = [match[1] for line in lines if (match := re.search(definition["Regex"], line))]
        assert values == ["0.25"], definition


@pytest.mark.parametrize("value", [1e-4, 12, -0.5, 1.5e20])
def test_metrics_parse_numbers_as_json_writes_them(value: float) -> None:
    fields = dict.fromkeys(FIELDS["step"], value)
    line = format_event("step", fields, time=1.0, node=0, rank=0)
    loss = next(metric for metric in metric_definitions() if metric["Name"] == "sm_train:loss")
    match = re.search(loss["Regex"], line)
    assert match is not None
    assert float(match[1]) == value
