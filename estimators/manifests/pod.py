"""The pod of one node: init container, container, resources and scheduling."""

from __future__ import annotations

from typing import Any

from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.manifests.pod_patch import merged
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

FETCH_IMAGE = "public.ecr.aws/aws-cli/aws-cli:2.31.0"
"""Image of the init container, with sh, aws and sha256sum."""

SERVICE_ACCOUNT = "sm-train"
"""ServiceAccount of the pods, whose IAM role (Pod Identity or IRSA) reads the data and writes the
checkpoints."""

_CPUS_PER_GPU, _MEMORY_GIB_PER_GPU = 2, 8
"""Requests that fit the smallest types, such as g5.xlarge with 4 CPUs and 16 GiB for one GPU."""

_HUGE_PAGES = "5120Mi"
"""2 MiB huge pages of a pod with EFA (EKS guide, "Run machine learning training on Amazon EKS with
EFA")."""


def pod_template(
    job: StageJob,
    volumes: PodVolumes,
    *,
    container: str,
    node_labels: dict[str, str],
    launcher: str,
    metadata: dict[str, Any],
    spec: dict[str, Any],
) -> dict[str, Any]:
    """Return the pod of a node, with the user's ``kubernetes.pod_patch``.

    ``node_labels`` select the nodes, and ``spec`` holds what one operator needs besides.

    Raises:
        ManifestError: the run file does not fit.
    """
    kubernetes = job.config.kubernetes
    trains = {
        "name": container,
        "image": job.image,
        "command": ["/bin/bash", "-c", START],
        "env": _variables(job, volumes, launcher),
        "resources": _resources(job),
        "volumeMounts": volumes.mounts,
    }
    own = {
        "serviceAccountName": SERVICE_ACCOUNT,
        "terminationGracePeriodSeconds": kubernetes.grace_period,
        "nodeSelector": node_labels,
        "tolerations": [{"key": GPU, "operator": "Exists"}],
        "initContainers": [_init_container(job)],
        "containers": [trains],
        "volumes": volumes.volumes,
    }
    return merged({"metadata": metadata, "spec": {**own, **spec}}, kubernetes.pod_patch)


def _init_container(job: StageJob) -> dict[str, Any]:
    variables = {
        "AWS_REGION": job.region,
        "BUNDLE_URI": job.code_uri,
        "BUNDLE_SHA256": job.bundle.sha256,
    }
    return {
        "name": "fetch-code",
        "image": FETCH_IMAGE,
        "command": ["/bin/sh", "-c", FETCH],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [{"name": "work", "mountPath": WORK_FOLDER}],
    }


def _variables(job: StageJob, volumes: PodVolumes, launcher: str) -> list[dict[str, Any]]:
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


def _resources(job: StageJob) -> dict[str, Any]:
    """Return requests and limits of a pod, which is alone on its node.

    Kubernetes allows no difference between them for GPUs, EFA and huge pages, and requires a
    request for memory with huge pages.

    Raises:
        ManifestError: the type has not as many EFA interfaces.
    """
    gpus = job.instance.accelerators
    devices: dict[str, str] = {GPU: str(gpus)}
    if interfaces := _efa_interfaces(job):
        devices |= {EFA: str(interfaces), HUGE_PAGES: _HUGE_PAGES}
    requests = {
        "cpu": str(_CPUS_PER_GPU * gpus),
        "memory": f"{_MEMORY_GIB_PER_GPU * gpus}Gi",
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
