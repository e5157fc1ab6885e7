"""Valid run files for tests, as plain data, and Hypothesis strategies that vary them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from sm_train.cost.instances import InstanceType, instance_types
from sm_train.entrypoints.job_interface.job_config import JOB_FILE
from sm_train.estimators.bundle.job_configs import job_configs
from sm_train.estimators.config.naming import job_name
from sm_train.estimators.config.schema import MAX_TAGS, RESERVED_TAGS, RunConfig
from sm_train.estimators.request.alarm_requests import MonitoredJob
from sm_train.estimators.secrets.secret_scan import find_secret


def stage(name: str = "256px", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "resolution": 256,
        "instances": 4,
        "per_device_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 1000,
        "learning_rate": 1e-4,
        "steps_per_second": 1.8,
        "sharding": "none",
    } | changes


def run(**changes: Any) -> dict[str, Any]:
    return {
        "name": "demo",
        "region": "us-east-1",
        "role": "arn:aws:iam::210987654321:role/sm-train",
        "bucket": "ai-bucket",
        "data": {"uri": "s3://ai-bucket/shards/"},
        "model": {"preset": "sd2"},
        # The published 1.8 it/s is without compilation.
        "training": {"compile": False},
        "stages": [stage()],
        "cluster": {"instance_type": "ml.p4de.24xlarge"},
    } | changes


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(run(**changes))


def job_document(config: RunConfig) -> dict[str, Any]:
    """Return the content of the bundle's job configuration file, which is plain data by stage."""
    return {name: asdict(job) for name, job in job_configs(config).items()}


def write_job_file(folder: Path, config: RunConfig) -> Path:
    """Write the job configuration of ``config`` as a bundle holds it; return its path."""
    path = folder / JOB_FILE
    path.write_text(json.dumps(job_document(config)))
    return path


def monitored_jobs(run: RunConfig) -> list[MonitoredJob]:
    """Return the first job of each stage, as alarms are created for it."""
    cluster = run.cluster
    return [
        MonitoredJob(
            job_name(run.name, stage.name, 1),
            None if cluster.alternatives else (cluster.instance_type, stage.instances),
        )
        for stage in run.stages
    ]


ECR = "210987654321.dkr.ecr.us-east-1.amazonaws.com/own:1"
PLAN = "arn:aws:sagemaker:us-east-1:210987654321:training-plan/"

_name_texts = st.from_regex(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,10}", fullmatch=True)
_plain_texts = st.text(
    st.characters(codec="ascii", min_codepoint=32, exclude_characters="'\"\\\x7f")
)
_keys = st.sampled_from(["1234abcd-12ab-34cd-56ef-1234567890ab", "alias/own"])
_uris = st.from_regex(r"s3://[a-z0-9]{3,20}(/[a-z0-9_=-]{1,8}){0,3}/", fullmatch=True)
_tag_characters = st.characters(categories=["L", "N", "Zs"], include_characters="_.:/=+-@")


def _is_user_tag(text: str) -> bool:
    return not text.lower().startswith(("aws:", "sm-train:"))


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid ``cluster``."""
    kinds = [kind for kind in instance_types() if kind.obstacle is None]
    instance = draw(st.sampled_from(kinds))
    backends = ["auto", "nccl"] + ["smddp"] * instance.supports_smddp
    cluster: dict[str, Any] = {
        "instance_type": instance.name,
        "backend": draw(st.sampled_from(backends)),
        "retries": draw(st.integers(0, 30)),
        "max_runtime": draw(st.integers(1, 28 * 86400)),
        "volume_gb": draw(st.integers(1, min(16384, int(instance.local_nvme_gb or 16384)))),
        "environment": draw(
            st.dictionaries(
                st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True),
                _plain_texts.filter(lambda text: len(text) <= 512 and not find_secret(text)),
                max_size=92,
            )
        ),
        "image": ECR,
    }
    capacity = draw(st.sampled_from(["on-demand", "spot", "warm-pool", "training-plan"]))
    cluster["capacity"] = capacity
    if capacity == "spot":
        cluster["max_wait"] = cluster["max_runtime"] + draw(st.integers(0, 86400))
    if capacity == "warm-pool":
        cluster["keep_alive_period"] = draw(st.integers(60, 21600))
    if capacity == "training-plan":
        cluster["training_plan"] = PLAN + draw(_name_texts).lower()
    if capacity == "on-demand":
        cluster["alternatives"] = draw(_alternatives(instance, cluster))
    if not instance.local_nvme_gb and not cluster.get("alternatives") and draw(st.booleans()):
        cluster["volume_kms_key"] = draw(_keys)
    if draw(st.booleans()):
        cluster["max_pending"] = draw(st.integers(1800, 28 * 86400))
    if draw(st.booleans()):
        cluster["vpc"] = {"subnets": ["subnet-1"], "security_groups": ["sg-1", "sg-2"]}
    for switch in ("network_isolation", "encrypt_traffic", "remote_debug"):
        cluster[switch] = draw(st.booleans())
    return cluster


def _alternatives(first: InstanceType, cluster: dict[str, Any]) -> st.SearchStrategy[list[str]]:
    """Draw types whose GPUs divide those of ``first``, so that any instance count fits."""
    candidates = [
        other.name
        for other in instance_types()
        if other != first
        and other.obstacle is None
        and first.accelerators % other.accelerators == 0
        and cluster["volume_gb"] <= (other.local_nvme_gb or 16384)
        and (cluster["backend"] != "smddp" or other.supports_smddp)
    ]
    if not candidates:
        return st.just([])
    return st.lists(st.sampled_from(candidates), max_size=4, unique=True)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid run file."""
    names = draw(st.lists(_name_texts, min_size=1, max_size=4, unique=True))
    user_channels = st.dictionaries(
        st.from_regex(r"user[a-zA-Z0-9_]{0,60}", fullmatch=True),
        st.fixed_dictionaries(
            {
                "uri": _uris,
                "mode": st.sampled_from(["File", "FastFile"]),
                "sharded": st.booleans(),
            }
        ),
        max_size=12,
    )
    changes: dict[str, Any] = {
        "name": draw(_name_texts),
        "stages": [
            stage(
                name,
                instances=draw(st.integers(1, 64)),
                **({"optimizer_state": draw(st.sampled_from(["reset", "keep"]))} if index else {}),
            )
            for index, name in enumerate(names)
        ],
        "cluster": draw(clusters()),
        "channels": draw(user_channels),
        "tags": draw(
            st.dictionaries(
                st.text(_tag_characters, min_size=1, max_size=128).filter(_is_user_tag),
                st.text(_tag_characters, max_size=256).filter(lambda text: not find_secret(text)),
                max_size=MAX_TAGS - RESERVED_TAGS,
            )
        ),
        "data": {"uri": draw(_uris), "index": draw(st.booleans())},
        "model": {"preset": "sd2"},
    }
    if draw(st.booleans()):
        changes["model"]["components"] = draw(_uris)
    if draw(st.booleans()):
        changes["data"]["validation"] = draw(_uris)
    if draw(st.booleans()):
        changes["output_kms_key"] = draw(_keys)
    return run(**changes)
