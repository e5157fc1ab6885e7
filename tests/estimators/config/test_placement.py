"""A fallback placement keeps the effective batch size and names only resources of its region."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sm_train.cost.instances import instance_type, instance_types
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.config.load import RunFileError, load_run
from sm_train.estimators.config.placement import fallback_problems, placements, unique_placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.launch_plan import launch_plan
from sm_train.estimators.request.training_request import training_request
from sm_train.toolkit.submit.relocation import placement_request

from tests.support.run_documents import ECR, PLAN, config, run, runs, stage
from tests.support.service_model import request_errors

WEST = {"region": "us-west-2", "buckets": {"ai-bucket": "west"}}
BUNDLE = build_bundle(config(), None)
P5 = {"instance_type": "ml.p5.48xlarge"}


def effective_batch_size(config: RunConfig, stage: StageSection) -> int:
    gpus = stage.instances * instance_type(config.cluster.instance_type).accelerators
    return stage.per_device_batch_size * stage.gradient_accumulation_steps * gpus


@st.composite
def fallbacks(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """Fallbacks that are mostly valid for ``document``."""
    fallback: dict[str, Any] = {}
    if draw(st.booleans()):
        fallback["instance_type"] = draw(
            st.sampled_from([kind.name for kind in instance_types() if kind.obstacle is None])
        )
    if draw(st.booleans()):
        fallback["capacity"] = draw(st.sampled_from(["on-demand", "spot"]))
    if draw(st.booleans()):
        first = document["stages"][0]["name"]
        sizes = {
            "instances": draw(st.integers(1, 64)),
            "per_device_batch_size": draw(st.integers(1, 8)),
        }
        fallback["stages"] = {first: sizes}
    if draw(st.booleans()) or not fallback:
        uris = [
            document["data"]["uri"],
            document["data"].get("validation"),
            document["model"].get("components"),
            *(channel["uri"] for channel in document["channels"].values()),
        ]
        buckets = {"ai-bucket", *(uri.split("/")[2] for uri in uris if uri)}
        fallback |= {
            "region": "us-west-2",
            "buckets": {name: f"{name}-west" for name in buckets},
            "vpc": {"subnets": ["subnet-9"], "security_groups": ["sg-9"]},
        }
    return fallback


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_valid_fallback_keeps_the_batch_and_uses_regional_resources(data: st.DataObject) -> None:
    document = data.draw(runs())
    document["recovery"] = {"fallbacks": [data.draw(fallbacks(document))]}
    try:
        run_config = RunConfig.model_validate(document)
    except ValidationError:
        return
    if fallback_problems(run_config):
        return
    home, fallback = placements(run_config, "us-east-1")
    for before, after in zip(home.config.stages, fallback.config.stages, strict=True):
        assert effective_batch_size(run_config, before) == effective_batch_size(
            fallback.config, after
        )
        launch = launch_plan(home.config, before, ECR)
        first = training_request(
            home.config, before, launch, BUNDLE, region=home.region, staged="s3://x/y/input"
        )
        request = placement_request(first, fallback)
        assert request_errors(request) == []
        if fallback.region != home.region:
            text = str({key: request[key] for key in ("CheckpointConfig", "OutputDataConfig")})
            uris = [
                channel["DataSource"]["S3DataSource"]["S3Uri"]
                for channel in request["InputDataConfig"]
                if channel["ChannelName"] not in ("code", "sm_drivers")
            ]
            assert all(uri.split("/")[2].endswith("-west") for uri in uris)
            assert "ai-bucket-west" in text


def test_gradient_accumulation_adapts_to_the_micro_batch() -> None:
    sizes = {"256px": {"instances": 2, "per_device_batch_size": 4}}
    run_config = config(recovery={"fallbacks": [P5 | {"stages": sizes}]})
    moved = placements(run_config, "us-east-1")[1].config.stages[0]
    assert (moved.instances, moved.per_device_batch_size) == (2, 4)
    assert moved.gradient_accumulation_steps == 8
    # The speed stays that of the run's own cluster.
    assert moved.steps_per_second == 1.8
    assert moved.measured_on is not None
    assert moved.measured_on.instance_type == "ml.p4de.24xlarge"
    assert not moved.is_measured_here("ml.p5.48xlarge")


def test_settings_of_other_capacities_are_dropped() -> None:
    plan = {"capacity": "training-plan", "training_plan": f"{PLAN}own"}
    run_config = config(cluster=P5 | plan, recovery={"fallbacks": [WEST]})
    cluster = placements(run_config, "us-east-1")[1].config.cluster
    assert (cluster.capacity, cluster.training_plan) == ("on-demand", None)
    spot = config(
        cluster=P5 | {"capacity": "spot", "max_wait": "6d"},
        recovery={"fallbacks": [{"capacity": "on-demand"}]},
    )
    assert placements(spot, "us-east-1")[1].config.cluster.max_wait is None


def test_each_possible_instance_type_is_a_placement() -> None:
    run_config = config(
        cluster={"instance_type": "ml.p4de.24xlarge", "alternatives": ["ml.p4d.24xlarge"]},
        recovery={"fallbacks": [P5, WEST]},
    )
    unique = unique_placements(run_config, "us-east-1")
    assert [(placement.config.cluster.instance_type, placement.region) for placement in unique] == [
        ("ml.p4de.24xlarge", "us-east-1"),
        ("ml.p4d.24xlarge", "us-east-1"),
        ("ml.p5.48xlarge", "us-east-1"),
        ("ml.p4de.24xlarge", "us-west-2"),
        ("ml.p4d.24xlarge", "us-west-2"),
    ]
    assert all(placement.config.cluster.alternatives == [] for placement in unique)


@pytest.mark.parametrize(
    ("fallback", "changes", "message"),
    [
        ({}, {}, "recovery.fallbacks[0]: {}: changes nothing"),
        ({"region": "us-west-2"}, {}, "recovery.fallbacks[0].buckets: lacks ai-bucket"),
        (WEST, {"region": None}, "recovery.fallbacks[0].region: needs region in the run file"),
        (
            WEST,
            {"cluster": P5 | {"vpc": {"subnets": ["s-1"], "security_groups": ["g-1"]}}},
            "recovery.fallbacks[0].vpc: is missing",
        ),
        (
            WEST,
            {"output_kms_key": "arn:aws:kms:us-east-1:210987654321:key/1"},
            "output_kms_key arn:aws:kms:us-east-1:210987654321:key/1 is a key of one region",
        ),
        ({"buckets": {"ai-bucket": "west"}}, {}, "fallbacks[0].buckets: needs region"),
        ({"instance_type": "ml.p9"}, {}, "recovery.fallbacks[0].instance_type"),
        (
            P5 | {"stages": {"256px": {"instances": 3}}},
            {},
            "256px has an effective batch of 512 images, which no accumulation of 8 × 24 GPUs",
        ),
        ({"stages": {"512px": {}}}, {}, "fallbacks[0].stages.512px: is not a stage of the run"),
        (
            {"instance_type": "ml.p4de.24xlarge"},
            {"cluster": {"instance_type": "ml.g5.12xlarge"}, "stages": [stage(instances=1)]},
            "256px has 4 GPUs, which no number of ml.p4de.24xlarge has",
        ),
        (
            P5,
            {"cluster": {"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}},
            "recovery.fallbacks[0]: backend: smddp does not run on ml.p5.48xlarge",
        ),
    ],
)
def test_invalid_fallback_is_an_error_of_the_run_file(
    tmp_path: Path, fallback: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run(recovery={"fallbacks": [fallback]}, **changes)))
    with pytest.raises(RunFileError) as caught:
        load_run(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}:")
