"""The pod of one node: init container, container, resources and scheduling."""

from __future__ import annotations

from typing import Any

from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import StageJob, start_command
from sm_train.estimators.manifests.volumes import WORK_FOLDER, PodVolumes

GPU, EFA, HUGE_PAGES = "nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi"
HEALTH = "sagemaker.amazonaws.com/node-health-status"

_ARCHIVE = f"{WORK_FOLDER}/{ARCHIVE_NAME}"
_CODE = f"{WORK_FOLDER}/input/data/code"

FETCH = (
    'aws s3 cp --only-show-errors "$BUNDLE_URI" ' + _ARCHIVE + " && "
    'echo "$BUNDLE_SHA256  ' + _ARCHIVE + '" | sha256sum -c -'
)
"""The init container's command: a bundle of another digest fails the pod."""

START = start_command(_ARCHIVE, _CODE, "python3")
"""The container's command: Python becomes process 1, which gets SIGTERM."""

_CPUS_PER_GPU, _MEMORY_GIB_PER_GPU = 2, 8
"""Requests that fit the smallest types, such as g5.xlarge with 4 CPUs and 16 GiB for one GPU."""


def pod_spec(
    job: StageJob,
    volumes: PodVolumes,
    *,
    container: str,
    node_labels: dict[str, str],
    restart_policy: str | None,
) -> dict[str, Any]:
    """Return the pod of a node, whose ``container`` does nothing yet (:func:`container_work`).

    ``node_labels`` are the target's own labels of nodes, unless the run file names others.
    """
    kubernetes = job.config.kubernetes
    selected = node_labels if kubernetes.node_selector is None else kubernetes.node_selector
    spec: dict[str, Any] = {
        "serviceAccountName": kubernetes.service_account,
        "terminationGracePeriodSeconds": kubernetes.grace_period,
    }
    if restart_policy is not None:
        spec["restartPolicy"] = restart_policy
    if selected:
        spec["nodeSelector"] = selected
    if kubernetes.tolerations:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in kubernetes.tolerations]
    if kubernetes.image_pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": kubernetes.image_pull_secret}]
    return {
        **spec,
        "initContainers": [_init_container(job)],
        "containers": [{"name": container, "image": job.image, "volumeMounts": volumes.mounts}],
        "volumes": volumes.volumes,
    }


def _init_container(job: StageJob) -> dict[str, Any]:
    variables = {
        "AWS_REGION": job.region,
        "BUNDLE_URI": job.code_uri,
        "BUNDLE_SHA256": job.bundle.sha256,
    }
    return {
        "name": "fetch-code",
        "image": job.config.kubernetes.fetch_image,
        "command": ["/bin/sh", "-c", FETCH],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [{"name": "work", "mountPath": WORK_FOLDER}],
    }


def command() -> list[str]:
    """Return the command of the container that trains."""
    return ["/bin/bash", "-c", START]


def variables(job: StageJob, volumes: PodVolumes, launcher: str) -> list[dict[str, Any]]:
    """Return the variables of the container that trains; secrets are references."""
    plain = job.variables(volumes.channels, volumes.checkpoints, launcher)
    secrets = job.config.kubernetes.secrets
    if both := sorted(plain.keys() & secrets.keys()):
        raise ManifestError(
            f"kubernetes.secrets.{both[0]}: is also a variable of the job; remove one of them"
        )
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *(_from_secret(name, reference) for name, reference in secrets.items()),
    ]


def _from_secret(name: str, reference: str) -> dict[str, Any]:
    secret, _, key = reference.partition("/")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def resources(job: StageJob) -> dict[str, Any]:
    """Return requests and limits of a pod, which is alone on its node.

    Kubernetes allows no difference between them for GPUs, EFA and huge pages, and requires a
    request for memory with huge pages.

    Raises:
        ManifestError: the type has not as many EFA interfaces.
    """
    kubernetes, gpus = job.config.kubernetes, job.instance.accelerators
    devices: dict[str, str] = {GPU: str(gpus)}
    if interfaces := _efa_interfaces(job):
        devices |= {EFA: str(interfaces), HUGE_PAGES: kubernetes.hugepages}
    requests = {
        "cpu": kubernetes.cpu or str(_CPUS_PER_GPU * gpus),
        "memory": kubernetes.memory or f"{_MEMORY_GIB_PER_GPU * gpus}Gi",
    }
    return {"requests": {**requests, **devices}, "limits": devices}


def _efa_interfaces(job: StageJob) -> int:
    name, available = job.instance.name, job.instance.efa_interfaces or 0
    wanted = job.config.kubernetes.efa
    if wanted is None:
        return available if job.nodes > 1 else 0
    if wanted > available:
        interfaces = "interface" if available == 1 else "interfaces"
        has = f"has {available} EFA {interfaces}" if available else "has no EFA"
        raise ManifestError(f"kubernetes.efa: {wanted}: {name} {has}; write {available} or less")
    return wanted
