"""Manifests hold in the typed models of the packages that define the objects.

These models ignore keys that they do not know, so each object is also compared with what the model
read of it: a misspelled key would be missing there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.stage_job import Target

from tests.estimators.manifests.documents import (
    IMAGE,
    INFINIBAND,
    TARGETS,
    config,
    infiniband_20b,
    manifest,
    only,
    pods,
    preset,
)

pytest.importorskip("kubernetes")
pytest.importorskip("kubeflow_trainer_api")

SCHEMA = Path(__file__).parent / "hyperpod_pytorch_job.schema.json"

RUNS: dict[str, RunConfig] = {
    "bria": preset("bria-2.0"),
    "20 B": infiniband_20b(),
    "plain": config(),
    "volumes": config(
        kubernetes={
            "image": IMAGE,
            "data": "file-system",
            "file_system": {"claim": "fsx", "s3": "s3://ai-bucket/"},
            "checkpoints": "volume",
            "checkpoint_volume": {"storage_class": "fsx-sc"},
            "queue": "team-a",
            "secrets": {"SM_TRAIN_SLACK_WEBHOOK": "alerts/slack"},
            "labels": {"team": "research"},
            "pod_patch": {
                "metadata": {"annotations": {"owner": "someone"}},
                "spec": {
                    "imagePullSecrets": [{"name": "registry"}],
                    "priorityClassName": "high",
                    "volumes": [{"name": "dshm", "emptyDir": {"sizeLimit": "64Gi"}}],
                },
            },
        }
    ),
}
RUNS |= {
    "infiniband": config(
        kubernetes={
            "image": IMAGE,
            "data": "sync",
            "network": INFINIBAND,
            "node_labels": {"gpu": "h100"},
            "memory": "1800Gi",
            "scheduler": "volcano",
            "priority": "high",
            "topology": {"label": "topology.kubernetes.io/rack"},
            "work_volume": {"size": "8Ti"},
        }
    ),
    "roce": config(
        kubernetes={
            "image": IMAGE,
            "network": {"kind": "roce", "resources": {"nvidia.com/roce": 8}, "gid_index": 3},
            "queue": "team-a",
            "topology": {"label": "rack", "required": False},
            "work_volume": {"size": "8Ti", "storage_class": "local-nvme"},
        }
    ),
    "local disk": config(
        kubernetes={
            "image": IMAGE,
            "topology": {"label": "rack", "required": False},
            "work_volume": {"host_path": "/mnt/nvme"},
        }
    ),
}
KUBERNETES: tuple[Target, ...] = tuple(target for target in TARGETS if target != "slurm")


class _Response:
    """What kubernetes' deserializer reads."""

    def __init__(self, document: object) -> None:
        self.data = json.dumps(document)


def read_by_kubernetes(document: dict[str, Any], kind: str) -> Any:
    """Return ``document`` as the class ``kind`` of the Kubernetes client reads and writes it."""
    from kubernetes.client import ApiClient

    client = ApiClient()
    return client.sanitize_for_serialization(client.deserialize(_Response(document), kind))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("target", KUBERNETES)
def test_pods_and_volumes_are_kubernetes_objects(run: str, target: Target) -> None:
    found = manifest(RUNS[run], target)
    for pod in pods(found):
        assert read_by_kubernetes(pod, "V1PodTemplateSpec") == pod
    for item in found.objects:
        if item["apiVersion"] in ("v1", "batch/v1"):
            assert read_by_kubernetes(item, f"V1{item['kind']}") == item


@pytest.mark.parametrize("run", RUNS)
def test_trainjob_and_runtime_hold_in_the_models_of_kubeflow_trainer(run: str) -> None:
    from kubeflow_trainer_api import models

    found = manifest(RUNS[run], "trainjob")
    for kind in ("TrainJob", "TrainingRuntime"):
        document = only(found, kind)
        model = getattr(models, f"TrainerV1alpha1{kind}").from_dict(document)
        assert model is not None
        assert model.to_dict() == document


@pytest.mark.parametrize("run", RUNS)
def test_pytorchjob_holds_in_the_model_of_the_training_operator(run: str) -> None:
    from kubeflow.training import models
    from kubernetes import client

    document = only(manifest(RUNS[run], "pytorchjob"), "PyTorchJob")
    for name in dir(models):
        # The models refer to Kubernetes' classes by their names.
        if name.startswith("KubeflowOrg"):
            setattr(client.models, name, getattr(models, name))
    assert read_by_kubernetes(document, "KubeflowOrgV1PyTorchJob") == document


def _without_misread_parts(pod: dict[str, Any]) -> None:
    """Leave out what the package misreads: its model has node selectors in a pod's affinity, and
    another name for the template of a claim. Kubernetes' own model reads both, in the test above.
    """
    pod.get("affinity", {}).pop("podAffinity", None)
    pod["volumes"] = [volume for volume in pod["volumes"] if "ephemeral" not in volume]


@pytest.mark.parametrize("run", RUNS)
def test_hyperpod_job_holds_in_the_model_of_the_hyperpod_package(run: str) -> None:
    document = only(manifest(RUNS[run], "hyperpod-eks"), "HyperPodPyTorchJob")
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    for replica in document["spec"]["replicaSpecs"]:
        _without_misread_parts(replica["template"]["spec"])
    assert list(validator.iter_errors(document["spec"])) == []
    # It rejects what it does not know.
    misspelled = document["spec"]["runPolicy"] | {"jobMaxRetries": 1}
    assert list(validator.iter_errors(document["spec"] | {"runPolicy": misspelled}))
