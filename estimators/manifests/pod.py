"""The pod of one node: init container, container, resources and scheduling."""

from __future__ import annotations

from typing import Any

from sm_train.entrypoints.job_interface.node_description import MACHINE_VARIABLE
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.manifests.pod_network import (
    container_network,
    network_devices,
    network_variables,
    pod_network,
)
from sm_train.estimators.manifests.pod_patch import merged, require_pod
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import (
    WATCH_MODULE,
    StageJob,
    start_command,
)
from sm_train.estimators.manifests.volumes import WORK_FOLDER, WORK_VOLUME, PodVolumes

GPU = "nvidia.com/gpu"
HEALTH = "sagemaker.amazonaws.com/node-health-status"

_ARCHIVE = f"{WORK_FOLDER}/{ARCHIVE_NAME}"
_CODE = f"{WORK_FOLDER}/input/data/code"

FETCH = (
    'aws s3 cp --only-show-errors "$BUNDLE_URI" ' + _ARCHIVE + " && "
    'echo "$BUNDLE_SHA256  ' + _ARCHIVE + '" | sha256sum -c -'
)
"""The init container's command: a bundle of another digest fails the pod."""

_EMPTY = f"rm -rf {WORK_FOLDER}/* {WORK_FOLDER}/.[!.]* && "
"""Removes what an earlier pod left in a folder of the node: checkpoints are restored from S3."""

START = start_command(_ARCHIVE, _CODE, "python3")
"""The container's command: Python becomes process 1, which gets SIGTERM."""


def watch_command() -> str:
    """Return the command of the watcher's container."""
    return start_command(_ARCHIVE, _CODE, "python3", WATCH_MODULE)


FETCH_IMAGE = "public.ecr.aws/aws-cli/aws-cli:2.31.0"
"""Image of the init container, with sh, aws and sha256sum."""

_CPUS_PER_GPU, _MEMORY_GIB_PER_GPU = 2, 8
"""Requests that fit the smallest types, such as g5.xlarge with 4 CPUs and 16 GiB for one GPU."""

_TOPOLOGY = "kueue.x-k8s.io/podset"
"""Begins the annotations of Kueue's topology-aware scheduling (Kueue documentation, "Topology Aware
Scheduling")."""


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
        **container_network(job),
    }
    own = {
        "serviceAccountName": kubernetes.service_account,
        "terminationGracePeriodSeconds": kubernetes.grace_period,
        "nodeSelector": node_labels if kubernetes.node_labels is None else kubernetes.node_labels,
        "tolerations": [{"key": GPU, "operator": "Exists"}],
        "initContainers": [fetch_code(job, keeps_files=_keeps_files(job))],
        "containers": [trains],
        "volumes": volumes.volumes,
    }
    pod = {"metadata": metadata, "spec": {**own, **spec}}
    for part in (pod_network(job), _scheduling(job)):
        pod = merged(pod, part)
    if not kubernetes.pod_patch:
        return pod
    pod = merged(pod, kubernetes.pod_patch)
    require_pod(pod)
    return pod


def _scheduling(job: StageJob) -> dict[str, Any]:
    """Return what says where and when the pods of a run start."""
    kubernetes = job.config.kubernetes
    spec: dict[str, Any] = {}
    if kubernetes.scheduler is not None:
        spec["schedulerName"] = kubernetes.scheduler
    if kubernetes.priority is not None:
        spec["priorityClassName"] = kubernetes.priority
    topology = kubernetes.topology
    if topology is None:
        return {"spec": spec}
    if kubernetes.queue is not None:
        kind = "required" if topology.required else "preferred"
        annotations = {f"{_TOPOLOGY}-{kind}-topology": topology.label}
        return {"metadata": {"annotations": annotations}, "spec": spec}
    pods = {"matchLabels": {"app.kubernetes.io/instance": job.name}}
    term = {"labelSelector": pods, "topologyKey": topology.label}
    together: dict[str, Any]
    if topology.required:
        together = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    else:
        weighted = {"weight": 100, "podAffinityTerm": term}
        together = {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}
    return {"spec": {**spec, "affinity": {"podAffinity": together}}}


def fetch_code(job: StageJob, *, keeps_files: bool = False) -> dict[str, Any]:
    """Return the init container that fetches the bundle.

    With ``keeps_files`` the work folder has files of an earlier pod, which it removes.
    """
    variables = {
        "AWS_REGION": job.region,
        "BUNDLE_URI": job.code_uri,
        "BUNDLE_SHA256": job.bundle.sha256,
    }
    return {
        "name": "fetch-code",
        "image": FETCH_IMAGE,
        "command": ["/bin/sh", "-c", _EMPTY + FETCH if keeps_files else FETCH],
        # An S3-compatible store, and keys for it, are needed for the code, too.
        "env": [
            *(
                {"name": name, "value": value}
                for name, value in {**job.config.cluster.environment, **variables}.items()
            ),
            *secret_variables(job),
        ],
        "volumeMounts": [{"name": WORK_VOLUME, "mountPath": WORK_FOLDER}],
    }


def _keeps_files(job: StageJob) -> bool:
    """Return whether the pod's own disk has files of an earlier pod."""
    volume = job.config.kubernetes.work_volume
    return volume is not None and volume.host_path is not None


def secret_variables(job: StageJob) -> list[dict[str, Any]]:
    """Return the variables that are references to Kubernetes secrets."""
    found = []
    for name, reference in job.config.kubernetes.secrets.items():
        secret, _, key = reference.partition("/")
        source = {"secretKeyRef": {"name": secret, "key": key}}
        found.append({"name": name, "valueFrom": source})
    return found


def _variables(job: StageJob, volumes: PodVolumes, launcher: str) -> list[dict[str, Any]]:
    """Return the variables of the container that trains; secrets are references."""
    plain = network_variables(job) | job.variables(volumes.channels, volumes.checkpoints, launcher)
    secrets = job.config.kubernetes.secrets
    if both := sorted(plain.keys() & secrets.keys()):
        raise ManifestError(
            f"kubernetes.secrets.{both[0]}: is also a variable of the job; remove one of them"
        )
    machine = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        {"name": MACHINE_VARIABLE, "valueFrom": machine},
        *secret_variables(job),
    ]


def _resources(job: StageJob) -> dict[str, Any]:
    """Return requests and limits of a pod, which is alone on its node.

    Kubernetes allows no difference between them for GPUs, EFA and huge pages, and requires a
    request for memory with huge pages.

    Raises:
        ManifestError: the network does not fit the nodes.
    """
    kubernetes = job.config.kubernetes
    gpus = job.instance.accelerators
    devices = {GPU: str(gpus), **network_devices(job)}
    limits = dict(devices)
    if kubernetes.memory is not None:
        limits["memory"] = kubernetes.memory
    volume = kubernetes.work_volume
    if volume is not None and volume.size is not None and volume.storage_class is None:
        limits["ephemeral-storage"] = volume.size
    requests = {
        "cpu": str(_CPUS_PER_GPU * gpus),
        "memory": f"{_MEMORY_GIB_PER_GPU * gpus}Gi",
    }
    return {"requests": {**requests, **limits}, "limits": limits}
