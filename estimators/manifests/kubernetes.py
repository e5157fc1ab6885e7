"""Manifests for Kubeflow Trainer, PyTorchJob and HyperPod on EKS.

Sources, read 2026-11: kubeflow/trainer 2.3 (pkg/runtime/framework/plugins/torch/torch.go,
manifests/base/runtimes/torch_distributed.yaml), kubeflow/training-operator 1.9 (PyTorchJob v1),
sagemaker-hyperpod 3.12 (HyperPodPytorchJob), awslabs/awsome-distributed-training
(3.test_cases/pytorch/FSDP/kubernetes).
"""

from __future__ import annotations

from typing import Any

from sm_train.entrypoints.common.node_description import HYPERPODRUN, TORCHRUN
from sm_train.estimators.config.platforms import MAX_NAME
from sm_train.estimators.manifests.pod import (
    HEALTH,
    command,
    pod_spec,
    resources,
    variables,
)
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import StageJob
from sm_train.estimators.manifests.volumes import PodVolumes, pod_volumes

Object = dict[str, Any]

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_TRAINER = "trainer.kubeflow.org"
_AUTO_RESUME = "sagemaker.amazonaws.com/enable-job-auto-resume"
_RETRIES = "sagemaker.amazonaws.com/job-max-retry-count"
_QUEUE = "kueue.x-k8s.io/queue-name"
_PRIORITY = "kueue.x-k8s.io/priority-class"


def trainjob(job: StageJob) -> list[Object]:
    """Return a TrainingRuntime and the TrainJob that refers to it, for Kubeflow Trainer v2.

    A TrainJob can only name its command, image and resources; init container and volumes belong to
    a runtime, so the run has one of its own. A failed pod restarts all (JobSet's failure policy).
    """
    _check_name(job, f"-node-0-{job.nodes - 1}")
    volumes = pod_volumes(job)
    pod = pod_spec(
        job,
        volumes,
        container="node",
        node_labels={INSTANCE_TYPE: job.instance.name.removeprefix("ml.")},
        restart_policy="Never",
    )
    replicated = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": {"metadata": _pod_metadata(job), "spec": pod}},
        },
    }
    runtime = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, labels={f"{_TRAINER}/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": job.config.kubernetes.max_restarts},
                    "replicatedJobs": [replicated],
                }
            },
        },
    }
    train = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, labels=_queue_labels(job)),
        "spec": {
            "activeDeadlineSeconds": job.config.cluster.max_runtime,
            "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "image": job.image,
                "command": command(),
                "numNodes": job.nodes,
                "numProcPerNode": job.instance.accelerators,
                "resourcesPerNode": resources(job),
                "env": variables(job, volumes, TORCHRUN),
            },
        },
    }
    return [*volumes.objects, runtime, train]


def pytorchjob(job: StageJob) -> list[Object]:
    """Return a PyTorchJob for Kubeflow's training operator v1."""
    _check_name(job, f"-worker-{max(0, job.nodes - 2)}")
    kubernetes = job.config.kubernetes
    volumes = pod_volumes(job)
    pod = _complete_pod(job, volumes, "pytorch", job.instance.name.removeprefix("ml."), TORCHRUN)
    replica = {
        "restartPolicy": kubernetes.restart_policy,
        "template": {"metadata": _pod_metadata(job), "spec": pod},
    }
    replicas = {"Master": {"replicas": 1, **replica}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **replica}
    return [
        *volumes.objects,
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": _metadata(job, labels=_queue_labels(job)),
            "spec": {
                "nprocPerNode": str(job.instance.accelerators),
                "runPolicy": {
                    "cleanPodPolicy": kubernetes.clean_pods,
                    "backoffLimit": kubernetes.max_restarts,
                    "activeDeadlineSeconds": job.config.cluster.max_runtime,
                },
                "pytorchReplicaSpecs": replicas,
            },
        },
    ]


def hyperpod_job(job: StageJob) -> list[Object]:
    """Return a HyperPodPyTorchJob for HyperPod's training operator on EKS."""
    _check_name(job, f"-pods-{job.nodes - 1}")
    kubernetes = job.config.kubernetes
    volumes = pod_volumes(job)
    pod = _complete_pod(job, volumes, "pytorch", job.instance.name, HYPERPODRUN)
    healthy = {"key": HEALTH, "operator": "In", "values": ["Schedulable"]}
    pod["affinity"] = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [healthy]}]
            }
        }
    }
    metadata = _metadata(job, labels=_queue_labels(job))
    if kubernetes.auto_resume:
        metadata["annotations"] |= {
            _AUTO_RESUME: "true",
            _RETRIES: str(kubernetes.max_restarts),
        }
    return [
        *volumes.objects,
        {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": metadata,
            "spec": {
                "nprocPerNode": str(job.instance.accelerators),
                "runPolicy": {
                    "cleanPodPolicy": kubernetes.clean_pods,
                    "jobMaxRetryCount": kubernetes.max_restarts,
                    "activeDeadlineSeconds": job.config.cluster.max_runtime,
                },
                "replicaSpecs": [
                    {
                        "name": "pods",
                        "replicas": job.nodes,
                        "template": {"metadata": _pod_metadata(job), "spec": pod},
                    }
                ],
            },
        },
    ]


def _complete_pod(
    job: StageJob, volumes: PodVolumes, container: str, instance_type: str, launcher: str
) -> Object:
    """Return a pod with its command; the operator sets its restart policy."""
    pod = pod_spec(
        job,
        volumes,
        container=container,
        node_labels={INSTANCE_TYPE: instance_type},
        restart_policy=None,
    )
    pod["containers"][0] |= {
        "command": command(),
        "env": variables(job, volumes, launcher),
        "resources": resources(job),
    }
    return pod


def _metadata(job: StageJob, labels: dict[str, str]) -> Object:
    kubernetes = job.config.kubernetes
    return {
        "name": job.name,
        "namespace": kubernetes.namespace,
        "labels": {**_labels(job), **labels},
        "annotations": {**kubernetes.annotations, **job.annotations},
    }


def _pod_metadata(job: StageJob) -> Object:
    annotations = {**job.config.kubernetes.annotations, **job.annotations}
    return {"labels": _labels(job), "annotations": annotations}


def _labels(job: StageJob) -> dict[str, str]:
    return {
        **job.config.kubernetes.labels,
        "app.kubernetes.io/name": "sm-train",
        "app.kubernetes.io/instance": job.name,
    }


def _queue_labels(job: StageJob) -> dict[str, str]:
    kubernetes = job.config.kubernetes
    labels = {_QUEUE: kubernetes.queue, _PRIORITY: kubernetes.priority_class}
    return {key: value for key, value in labels.items() if value is not None}


def _check_name(job: StageJob, suffix: str) -> None:
    """Check the longest name that the operator derives: of a pod and its service."""
    name = f"{job.name}{suffix}"
    if len(name) > MAX_NAME:
        raise ManifestError(
            f"stages.{job.stage.name}.name: the pod {name} has {len(name)} characters, and "
            f"Kubernetes allows {MAX_NAME}; shorten the name of the run or the stage by "
            f"{len(name) - MAX_NAME}"
        )
    if not name[0].isalpha():
        raise ManifestError(
            f"name: {job.config.name}: starts with a digit, and the name of a Kubernetes service "
            "starts with a letter"
        )
