"""Run files with ``kubernetes`` and ``slurm`` sections, and their manifests."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any, get_args

import yaml
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import Manifest, build_manifest
from sm_train.estimators.manifests.stage_job import Target
from sm_train.toolkit.init.template import Values, fill, read_template

from tests.support import run_documents

IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/train:1"

INFINIBAND = {
    "kind": "infiniband",
    "resources": {"rdma/hca_shared_devices_a": 8},
    "attachments": ["research/ib0", "ib1"],
    "interface": "eth0",
    "adapters": ["mlx5_0", "mlx5_3"],
    "traffic_class": 106,
}

TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True)
class FixedBundle:
    """A bundle whose digest does not change with the training code."""

    sha256: str = "5f" * 32
    entry: str = "train.py"


def config(**changes: Any) -> RunConfig:
    """Return a run of two stages; ``changes`` replace sections."""
    stages = [run_documents.stage("256px"), run_documents.stage("512px", instances=8)]
    sections = {"kubernetes": {"image": IMAGE}, "slurm": {"shared_folder": "/fsx/sm-train"}}
    return run_documents.config(**{"stages": stages, **sections, **changes})


def preset(name: str, **changes: Any) -> RunConfig:
    """Return a shipped preset with an image and a shared folder."""
    text = (files("sm_train.toolkit") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    sections = {"kubernetes": {"image": IMAGE}, "slurm": {"shared_folder": "/fsx/sm-train"}}
    return RunConfig.model_validate({**yaml.safe_load(text), **sections, **changes})


def infiniband_20b(**values: str) -> RunConfig:
    """Return the run file that `init --preset infiniband-20b` writes with these answers."""
    answers = {
        "name": "big",
        "bucket": "ai-bucket",
        "data": "s3://ai-bucket/shards/",
        "image": "ghcr.io/team/train:1",
        "rdma_resource": "rdma/ib",
    }
    text = fill(read_template("infiniband-20b"), Values(**(answers | values)))
    return RunConfig.model_validate(yaml.safe_load(text))


def manifest(run: RunConfig, target: Target, stage: str | None = None) -> Manifest:
    chosen = next(stage_config for stage_config in run.stages if stage in (None, stage_config.name))
    return build_manifest(
        run, chosen, target, FixedBundle(), region="us-east-1", file=None, commit="0" * 40
    )


def only(found: Manifest, kind: str) -> dict[str, Any]:
    """Return the manifest's only object of ``kind``."""
    [item] = [item for item in found.objects if item["kind"] == kind]
    return item


def pods(found: Manifest) -> list[dict[str, Any]]:
    """Return the pod templates of a manifest, complete as the operator makes them."""
    if found.target == "trainjob":
        runtime, job = only(found, "TrainingRuntime"), only(found, "TrainJob")
        replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
        pod: dict[str, Any] = replicated["template"]["spec"]["template"]
        trainer = job["spec"]["trainer"]
        container = {
            **pod["spec"]["containers"][0],
            "image": trainer["image"],
            "command": trainer["command"],
            "env": trainer["env"],
            "resources": trainer["resourcesPerNode"],
        }
        containers = [container, *pod["spec"]["containers"][1:]]
        return [{**pod, "spec": {**pod["spec"], "containers": containers}}]
    if found.target == "pytorchjob":
        replicas = only(found, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]
        return [replica["template"] for replica in replicas.values()]
    specs = only(found, "HyperPodPyTorchJob")["spec"]["replicaSpecs"]
    return [spec["template"] for spec in specs]


def environment(pod: dict[str, Any]) -> dict[str, str]:
    """Return the plain variables of a pod's container."""
    variables = pod["spec"]["containers"][0]["env"]
    return {variable["name"]: variable["value"] for variable in variables if "value" in variable}
