"""Run files for tests: a valid one as plain data, and ways to vary it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from sm_train.cost.instances import instance_type, instance_types
from sm_train.estimators.run_config import RunConfig


def stage(name: str = "256px", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "resolution": 256,
        "instances": 4,
        "per_gpu_batch": 8,
        "accumulation": 2,
        "iterations": 1000,
        "learning_rate": 1e-4,
        "iterations_per_second": 1.8,
    } | changes


def run(**changes: Any) -> dict[str, Any]:
    return {
        "name": "demo",
        "region": "us-east-1",
        "role": "arn:aws:iam::111122223333:role/sm-train",
        "bucket": "my-bucket",
        "data": {"uri": "s3://my-bucket/shards/"},
        "model": {"preset": "sd2"},
        "stages": [stage()],
        "cluster": {"instance_type": "ml.p4de.24xlarge"},
    } | changes


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(run(**changes))


_names = st.from_regex(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,10}", fullmatch=True)
_plain = st.text(st.characters(codec="ascii", min_codepoint=32, exclude_characters="'\"\\"))


@st.composite
def _clusters(draw: st.DrawFn) -> dict[str, Any]:
    machine = draw(st.sampled_from(sorted(machine.name for machine in instance_types())))
    collectives = ["auto", "nccl"]
    if instance_type(machine).supports_smddp:
        collectives.append("smddp")
    cluster: dict[str, Any] = {
        "instance_type": machine,
        "image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/own:1",
        "collective": draw(st.sampled_from(collectives)),
        "retries": draw(st.integers(0, 30)),
        "max_runtime": draw(st.integers(1, 28 * 86400)),
        "volume_gb": draw(st.integers(1, 16384)),
        "environment": draw(
            st.dictionaries(
                st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True),
                _plain.filter(lambda text: len(text) <= 512),
                max_size=92,
            )
        ),
    }
    capacity = draw(st.sampled_from(["on-demand", "spot", "warm-pool", "training-plan"]))
    cluster["capacity"] = capacity
    if capacity == "spot":
        cluster["max_wait"] = cluster["max_runtime"] + draw(st.integers(0, 86400))
    if capacity == "warm-pool":
        cluster["keep_alive"] = draw(st.integers(60, 21600))
    if capacity == "training-plan":
        cluster["training_plan"] = (
            "arn:aws:sagemaker:us-east-1:111122223333:training-plan/" + draw(_names).lower()
        )
    if draw(st.booleans()):
        cluster["vpc"] = {"subnets": ["subnet-1"], "security_groups": ["sg-1", "sg-2"]}
    return cluster


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Any run file that validates."""
    names = draw(st.lists(_names, min_size=1, max_size=4, unique=True))
    changes: dict[str, Any] = {
        "name": draw(_names),
        "stages": [stage(name, instances=draw(st.integers(1, 64))) for name in names],
        "cluster": draw(_clusters()),
        "tags": draw(
            st.dictionaries(
                st.from_regex(r"[a-zA-Z0-9 _.:/=+@-]{1,128}", fullmatch=True).filter(
                    lambda key: not key.lower().startswith("aws:")
                ),
                st.from_regex(r"[a-zA-Z0-9 _.:/=+@-]{0,256}", fullmatch=True),
                max_size=45,
            )
        ),
    }
    if draw(st.booleans()):
        changes["model"] = {"preset": "sd2", "components": "s3://my-bucket/components/"}
    return run(**changes)
