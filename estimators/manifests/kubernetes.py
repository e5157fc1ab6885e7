"""Manifests for Kubeflow Trainer, PyTorchJob and HyperPod on EKS.

Sources, read 2026-11: kubeflow/trainer 2.3 (pkg/runtime/framework/plugins/torch/torch.go,
manifests/base/runtimes/torch_distributed.yaml), kubeflow/training-operator 1.9 (PyTorchJob v1),
sagemaker-hyperpod 3.12 (HyperPodPytorchJob), awslabs/awsome-distributed-training
(3.test_cases/pytorch/FSDP/kubernetes).
"""

from __future__ import annotations

from typing import Any

from sm_train.entrypoints.job_interface.node_description import (
    FAILED_AFTER_PROGRESS,
    HYPERPODRUN,
    JOB_VARIABLE,
    STOPPED,
    TORCHRUN,
)
from sm_train.estimators.config.platforms import MAX_NAME
from sm_train.estimators.manifests.pod import HEALTH, pod_template
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import StageJob
from sm_train.estimators.manifests.volumes import PodVolumes, pod_volumes
from sm_train.estimators.manifests.watch_cron_job import watcher

Object = dict[str, Any]

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_TRAINER = "trainer.kubeflow.org"
_AUTO_RESUME = "sagemaker.amazonaws.com/enable-job-auto-resume"
_RETRIES = "sagemaker.amazonaws.com/job-max-retry-count"
_QUEUE = "kueue.x-k8s.io/queue-name"
_DISRUPTIONS = {
    "rules": [
        {
            "action": "FailJob",
            # JobSet's CRD has no default for the status.
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        {
            "action": "FailJob",
            # One stopped node stops the others, which may end first.
            "onExitCodes": {
                "containerName": "node",
                "operator": "In",
                "values": [FAILED_AFTER_PROGRESS, STOPPED],
            },
        },
    ]
}
"""Marks a job whose pods were drained, preempted or stopped, or that failed after it stored a new
checkpoint, as one that its policy has failed."""

_UNCOUNTED = {
    "name": "disruption",
    "action": "RestartJobSetAndIgnoreMaxRestarts",
    "onJobFailureReasons": ["PodFailurePolicy"],
}
"""Starts such a job again without counting it (JobSet documentation, failure policy)."""

_JOB_NUMBER = {
    "name": JOB_VARIABLE,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"}},
}
"""The id of the JobSet, which labels its pods with it (JobSet documentation, labels): pods that
start again keep it, and a job that somebody starts again has another."""

_KEPT_PODS = "Running"
"""The pods that an operator deletes at the end; `diagnose` and `review` read the others' logs."""


def trainjob(job: StageJob) -> list[Object]:
    """Return a TrainingRuntime and the TrainJob that refers to it, for Kubeflow Trainer v2.

    A TrainJob can only name its command, image and resources; init container and volumes belong to
    a runtime, so the run has one of its own. A failed pod restarts all (JobSet's failure policy).
    """
    _check_name(job, f"-node-0-{job.nodes - 1}")
    volumes = pod_volumes(job)
    never = {"restartPolicy": "Never"}
    pod = _pod(job, volumes, "node", TORCHRUN, node_labels=_ec2_label(job), spec=never)
    # What the TrainJob sets itself.
    node = next(each for each in pod["spec"]["containers"] if each["name"] == "node")
    trainer = {name: node.pop(name) for name in ("command", "env", "resources")}
    replicated = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "podFailurePolicy": _DISRUPTIONS, "template": pod},
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
                    "failurePolicy": {
                        "maxRestarts": job.config.kubernetes.max_restarts,
                        "rules": [_UNCOUNTED],
                    },
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
                "image": node["image"],
                "command": trainer["command"],
                "numNodes": job.nodes,
                "numProcPerNode": job.instance.accelerators,
                "resourcesPerNode": trainer["resources"],
                "env": [*trainer["env"], _JOB_NUMBER],
            },
        },
    }
    return [*volumes.objects, runtime, train, *watcher(job, volumes)]


def pytorchjob(job: StageJob) -> list[Object]:
    """Return a PyTorchJob for Kubeflow's training operator v1."""
    _check_name(job, f"-worker-{max(0, job.nodes - 2)}")
    kubernetes = job.config.kubernetes
    volumes = pod_volumes(job)
    pod = _pod(job, volumes, "pytorch", TORCHRUN, node_labels=_ec2_label(job))
    # A stopped job exits with 143, a failed one with 1: both are started again.
    replica = {"restartPolicy": "OnFailure", "template": pod}
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
                    "cleanPodPolicy": _KEPT_PODS,
                    "backoffLimit": kubernetes.max_restarts,
                    "activeDeadlineSeconds": job.config.cluster.max_runtime,
                },
                "pytorchReplicaSpecs": replicas,
            },
        },
        *watcher(job, volumes),
    ]


def hyperpod_job(job: StageJob) -> list[Object]:
    """Return a HyperPodPyTorchJob for HyperPod's training operator on EKS."""
    _check_name(job, f"-pods-{job.nodes - 1}")
    kubernetes = job.config.kubernetes
    volumes = pod_volumes(job)
    healthy = {"key": HEALTH, "operator": "In", "values": ["Schedulable"]}
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [healthy]}]
            }
        }
    }
    spec = {"affinity": affinity}
    labels = {INSTANCE_TYPE: job.instance.name}
    pod = _pod(job, volumes, "pytorch", HYPERPODRUN, node_labels=labels, spec=spec)
    metadata = _metadata(job, labels=_queue_labels(job))
    metadata["annotations"] |= {_AUTO_RESUME: "true", _RETRIES: str(kubernetes.max_restarts)}
    return [
        *volumes.objects,
        {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": metadata,
            "spec": {
                "nprocPerNode": str(job.instance.accelerators),
                "runPolicy": {
                    "cleanPodPolicy": _KEPT_PODS,
                    "jobMaxRetryCount": kubernetes.max_restarts,
                    "activeDeadlineSeconds": job.config.cluster.max_runtime,
                },
                "replicaSpecs": [
                    {
                        "name": "pods",
                        "replicas": job.nodes,
                        "template": pod,
                    }
                ],
            },
        },
        *watcher(job, volumes),
    ]


def _pod(
    job: StageJob,
    volumes: PodVolumes,
    container: str,
    launcher: str,
    *,
    node_labels: dict[str, str],
    spec: Object | None = None,
) -> Object:
    return pod_template(
        job,
        volumes,
        container=container,
        node_labels=node_labels,
        launcher=launcher,
        metadata={"labels": _labels(job), "annotations": job.annotations},
        spec=spec or {},
    )


def _ec2_label(job: StageJob) -> dict[str, str]:
    """Return the label of nodes of the run's type; of a machine of the user's own there is none."""
    name = job.instance.name.removeprefix("ml.")
    return {} if job.instance.is_own else {INSTANCE_TYPE: name}


def _metadata(job: StageJob, labels: dict[str, str]) -> Object:
    kubernetes = job.config.kubernetes
    return {
        "name": job.name,
        "namespace": kubernetes.namespace,
        "labels": {**_labels(job), **labels},
        "annotations": dict(job.annotations),
    }


def _labels(job: StageJob) -> dict[str, str]:
    return {
        **job.config.kubernetes.labels,
        "app.kubernetes.io/name": "sm-train",
        "app.kubernetes.io/instance": job.name,
    }


def _queue_labels(job: StageJob) -> dict[str, str]:
    queue = job.config.kubernetes.queue
    return {} if queue is None else {_QUEUE: queue}


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
