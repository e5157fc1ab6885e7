"""Volumes of the pods: scratch space, /dev/shm, data and checkpoints.

Mountpoint for Amazon S3 provides no volumes on demand: an existing bucket is a PersistentVolume of
its own (mountpoint-s3-csi-driver, examples/kubernetes/static_provisioning, read 2026-11).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sm_train.entrypoints.job_interface.node_description import NodeChannel
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import StageJob, mounted

WORK_FOLDER = "/opt/ml"
WORK_VOLUME, CHECKPOINT_VOLUME = "work", "checkpoints"
_BUCKETS, _FILE_SYSTEM, _CHECKPOINTS = "/mnt/s3", "/mnt/data", "/mnt/checkpoints"

_ANY_SIZE = "1200Gi"
"""Kubernetes requires a size, which the driver ignores."""


@dataclass
class PodVolumes:
    """Volumes of a pod, where its container mounts them, and the objects that they refer to."""

    volumes: list[dict[str, Any]] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)
    objects: list[dict[str, Any]] = field(default_factory=list)
    channels: list[NodeChannel] = field(default_factory=list)
    checkpoints: str = ""

    def add(self, name: str, path: str, source: dict[str, Any], *, read_only: bool = False) -> None:
        self.volumes.append({"name": name, **source})
        mount: dict[str, Any] = {"name": name, "mountPath": path}
        self.mounts.append({**mount, "readOnly": True} if read_only else mount)


def pod_volumes(job: StageJob) -> PodVolumes:
    """Return the volumes of a stage's pods.

    Raises:
        ManifestError: the run file names no volume where it needs one.
    """
    found = PodVolumes()
    found.add(WORK_VOLUME, WORK_FOLDER, _work_volume(job))
    # Kubernetes limits a memory volume to half of the node's memory.
    found.add("dshm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
    data, previous = job.channels()
    found.channels += _data(job, data, found)
    folder = _checkpoint_folder(job, found)
    if folder is None:
        found.checkpoints = job.checkpoint_uri
        found.channels += previous
    else:
        found.checkpoints = f"{folder}/{job.stage.name}"
        found.channels += job.in_shared_checkpoints(previous, folder)
    return found


def _work_volume(job: StageJob) -> dict[str, Any]:
    """Return the source of the pod's own disk."""
    volume = job.config.kubernetes.work_volume
    if volume is None:
        return {"emptyDir": {}}
    if volume.host_path is not None:
        folder = f"{volume.host_path.rstrip('/')}/{job.name}"
        return {"hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    if volume.storage_class is None:
        return {"emptyDir": {"sizeLimit": volume.size}}
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": volume.storage_class,
        "resources": {"requests": {"storage": volume.size}},
    }
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def _data(job: StageJob, channels: list[NodeChannel], found: PodVolumes) -> list[NodeChannel]:
    kubernetes = job.config.kubernetes
    if kubernetes.data == "sync":
        return channels
    if kubernetes.data == "file-system":
        file_system = kubernetes.file_system
        if file_system is None:
            raise ManifestError(
                "kubernetes.file_system: not set; data: file-system needs its claim and s3"
            )
        if file_system.s3 is None:
            raise ManifestError(
                "kubernetes.file_system.s3: not set; write the S3 prefix that the file system shows"
            )
        found.add("data", _FILE_SYSTEM, _claim(file_system.claim), read_only=True)
        return mounted(channels, _FILE_SYSTEM, file_system.s3, "kubernetes.file_system.s3")
    # What a training job downloads before it starts is downloaded here, too.
    streamed = job.streamed()
    buckets = dict.fromkeys(
        _bucket(channel.uri) for channel in channels if channel.name in streamed
    )
    for number, bucket in enumerate(buckets):
        name = f"sm-train-{kubernetes.namespace}-{bucket}"
        found.objects += _bucket_objects(job, name, bucket)
        found.add(f"bucket-{number}", f"{_BUCKETS}/{bucket}", _claim(name), read_only=True)
    return [
        NodeChannel(
            channel.name,
            channel.uri,
            f"{_BUCKETS}/{channel.uri.removeprefix('s3://')}".rstrip("/"),
            channel.sharded,
        )
        if channel.name in streamed
        else channel
        for channel in channels
    ]


def _bucket(uri: str) -> str:
    return uri.removeprefix("s3://").partition("/")[0]


def _claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name}}


def _bucket_objects(job: StageJob, name: str, bucket: str) -> list[dict[str, Any]]:
    namespace = job.config.kubernetes.namespace
    size = {"storage": _ANY_SIZE}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": size,
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": name},
            "mountOptions": ["read-only", "allow-other", f"region {job.region}"],
            "csi": {
                "driver": "s3.csi.aws.com",
                "volumeHandle": name,
                "volumeAttributes": {"bucketName": bucket},
            },
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": name,
            "resources": {"requests": size},
        },
    }
    return [volume, claim]


def _checkpoint_folder(job: StageJob, found: PodVolumes) -> str | None:
    """Return the folder of the run in the shared volume; None if checkpoints are copied to S3."""
    kubernetes = job.config.kubernetes
    if kubernetes.checkpoints == "sync":
        return None
    volume = kubernetes.checkpoint_volume
    if volume is None:
        raise ManifestError(
            "kubernetes.checkpoint_volume: not set; checkpoints: volume needs a claim, or a "
            "storage_class to create one"
        )
    claim = volume.claim
    if claim is None:
        claim = f"sm-train-{job.config.name.lower()}-checkpoints"
        spec = {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": volume.storage_class,
            "resources": {"requests": {"storage": volume.size}},
        }
        found.objects.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": claim, "namespace": kubernetes.namespace},
                "spec": spec,
            }
        )
    found.add(CHECKPOINT_VOLUME, _CHECKPOINTS, _claim(claim))
    return f"{_CHECKPOINTS}/{job.config.name}"
