"""The run file's ``kubernetes`` and ``slurm``: the same run on clusters other than SageMaker's.

``sm-train manifest`` reads them; ``submit`` ignores them. Instance type, number of nodes and
environment are those of ``cluster`` and ``stages``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from sm_train.estimators.config.fields import (
    ATTACHMENT_PATTERN,
    CONTAINER_IMAGE_PATTERN,
    INTERFACE_PATTERN,
    LABEL_KEY_PATTERN,
    LABEL_VALUE_PATTERN,
    MODULE_PATTERN,
    RESOURCE_NAME_PATTERN,
    SCHEDULE_PATTERN,
    SECRET_KEY_PATTERN,
    SLURM_IMAGE_PATTERN,
    SLURM_NAME_PATTERN,
    Duration,
    NonNegativeInt,
    PositiveInt,
    Quantity,
    S3Folder,
    Section,
    ShellPath,
    VariableName,
)

MAX_CRON_NAME = 52
"""Longest name of a CronJob: Kubernetes appends 11 characters to those of its jobs."""

MAX_NAME = 63
"""Longest name of a pod, label value or service (RFC 1123 label, in Kubernetes' own validation)."""


def _check_length(value: str) -> str:
    if len(value) > MAX_NAME:
        raise ValueError(f"has {len(value)} characters, and Kubernetes allows {MAX_NAME}")
    return value


def _reject_numbers(value: Any) -> Any:
    """Refuse a number, of which YAML may have read another text, such as 1:30:00."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'YAML reads this as a number, not as text: quote it, such as "{value}"')
    if not isinstance(value, str | bool):
        raise ValueError("must be text, or true or false")
    return value


def _check_slurm_option(value: str | bool) -> str | bool:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_.,:=@%/+-]{1,256}", value):
        raise ValueError("must be letters, digits and _ . , : = @ % / + -")
    return value


ResourceName = Annotated[str, Field(pattern=RESOURCE_NAME_PATTERN), AfterValidator(_check_length)]
LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN, max_length=317)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN), AfterValidator(_check_length)]
ContainerImage = Annotated[str, Field(pattern=CONTAINER_IMAGE_PATTERN, max_length=512)]
SecretKey = Annotated[str, Field(pattern=SECRET_KEY_PATTERN, max_length=320)]
CronSchedule = Annotated[str, Field(pattern=SCHEDULE_PATTERN, max_length=100)]
InterfaceName = Annotated[str, Field(pattern=INTERFACE_PATTERN)]
AttachmentName = Annotated[str, Field(pattern=ATTACHMENT_PATTERN)]
SlurmImage = Annotated[str, Field(pattern=SLURM_IMAGE_PATTERN, max_length=512)]
SlurmOption = Annotated[
    str | bool, BeforeValidator(_reject_numbers), AfterValidator(_check_slurm_option)
]
SlurmOptionName = Annotated[str, Field(pattern=SLURM_NAME_PATTERN, max_length=40)]


class FileSystemSection(Section):
    """A shared file system, such as FSx for Lustre, as a PersistentVolumeClaim of the cluster."""

    claim: ResourceName = Field(description="Name of the PersistentVolumeClaim (ReadWriteMany).")
    s3: S3Folder | None = Field(
        default=None,
        description="S3 prefix that the root of the file system shows (an FSx data repository "
        "association). Required by `data: file-system`.",
    )


class CheckpointVolumeSection(Section):
    """The shared volume of all pods for checkpoints: an existing claim, or one to create."""

    claim: ResourceName | None = Field(
        default=None, description="Name of an existing PersistentVolumeClaim (ReadWriteMany)."
    )
    storage_class: ResourceName | None = Field(
        default=None,
        description="StorageClass of the claim to create, such as one of the FSx for Lustre CSI "
        "driver.",
    )
    size: Quantity = Field(
        default="1200Gi",
        description="Size of the claim to create. 1200Gi is the smallest FSx for Lustre file "
        "system.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> CheckpointVolumeSection:
        if (self.claim is None) == (self.storage_class is None):
            raise ValueError(
                "claim: write the name of an existing claim, or else the storage_class of a new one"
            )
        return self


class NetworkSection(Section):
    """The network between pods: InfiniBand or RoCE, or EFA on AWS."""

    kind: Literal["efa", "infiniband", "roce"] = Field(
        default="efa",
        description="Network of the nodes. The others ask for no EFA interface and no huge pages.",
    )
    resources: dict[LabelKey, PositiveInt] = Field(
        default_factory=dict,
        max_length=10,
        description="Extended resources of a pod, such as {rdma/hca_shared_devices_a: 1} of the "
        "RDMA shared device plugin. `kubectl describe node` lists those of a node. Required by "
        "infiniband and roce with several nodes: without one, NCCL uses TCP.",
    )
    ipc_lock: bool = Field(
        default=True,
        description="Whether the container gets the capability IPC_LOCK, without which RDMA cannot "
        "register memory under a limit of locked memory.",
    )
    host_network: bool = Field(
        default=False, description="Whether pods use the network of their node (hostNetwork)."
    )
    attachments: list[AttachmentName] = Field(
        default_factory=list,
        max_length=32,
        description="Multus networks of a pod: NAME or NAMESPACE/NAME of its "
        "NetworkAttachmentDefinitions.",
    )
    interface: InterfaceName | None = Field(
        default=None,
        description="Interface through which ranks find each other, such as eth0 "
        "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME). None leaves the choice to NCCL.",
    )
    adapters: list[InterfaceName] = Field(
        default_factory=list,
        max_length=32,
        description="RDMA adapters to use, such as [mlx5_0, mlx5_3] (NCCL_IB_HCA). Empty leaves "
        "the choice to NCCL.",
    )
    gid_index: NonNegativeInt | None = Field(
        default=None,
        description="GID of RoCE (NCCL_IB_GID_INDEX). None: NCCL 2.21 and later find RoCE v2's.",
    )
    traffic_class: NonNegativeInt | None = Field(
        default=None, description="Traffic class of RDMA packets (NCCL_IB_TC)."
    )


class WorkVolumeSection(Section):
    """The pod's own disk for code, packages, copies of data and checkpoints."""

    size: Quantity | None = Field(
        default=None,
        description="Size of the volume. Alone, it is ephemeral storage of the node, which the pod "
        "requests; with storage_class, the size of the claim.",
    )
    storage_class: ResourceName | None = Field(
        default=None,
        description="StorageClass of a claim that each pod creates and deletes (a generic "
        "ephemeral volume).",
    )
    host_path: ShellPath | None = Field(
        default=None,
        description="Folder of the node, such as the mount of its local NVMe disks. Each job has a "
        "folder in it, which is emptied when a pod starts.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> WorkVolumeSection:
        if self.storage_class is not None and self.size is None:
            raise ValueError("size: is required by storage_class")
        if (self.host_path is None) == (self.size is None):
            raise ValueError("size: write a size, or else a host_path")
        return self


class TopologySection(Section):
    """Nodes that are close to each other in the network."""

    label: LabelKey = Field(
        description="Node label whose value the nodes of a run share, such as that of their rack."
    )
    required: bool = Field(
        default=True, description="false also accepts nodes with other values if none are free."
    )


class KubernetesSection(Section):
    """The run on Kubernetes: Kubeflow Trainer, its older PyTorchJob, or HyperPod on EKS."""

    image: ContainerImage | None = Field(
        default=None,
        description="Container image of the training, with PyTorch; also for `slurm`. None takes "
        "`cluster.image`; `sm-train image RUN --dockerfile` prints one. For hyperpod-eks it must "
        "contain hyperpod-elastic-agent.",
    )
    namespace: ResourceName = Field(
        default="default",
        description="Namespace of all objects. HyperPod resumes jobs in `kubeflow` and in "
        "namespaces that start with `hyperpod` (its documentation on auto-resume).",
    )
    service_account: ResourceName = Field(
        default="sm-train",
        description="Service account of the pods, whose IAM role (EKS Pod Identity or IRSA) reads "
        "the data and the code. Outside of AWS, `default` exists in every namespace.",
    )
    queue: ResourceName | None = Field(
        default=None, description="Kueue's local queue (label kueue.x-k8s.io/queue-name)."
    )
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, max_length=50, description="Labels of every object and pod."
    )
    pod_patch: dict[str, Any] = Field(
        default_factory=dict,
        description="Strategic merge patch of every pod template (metadata and spec), such as "
        "{spec: {priorityClassName: high, containers: [{name: node, resources: {requests: "
        "{memory: 512Gi}}}]}}. The container is `node` of a TrainJob and `pytorch` elsewhere.",
    )
    secrets: dict[VariableName, SecretKey] = Field(
        default_factory=dict,
        max_length=50,
        description="Environment variables from Kubernetes secrets: NAME: SECRET/KEY, such as "
        "SM_TRAIN_SLACK_WEBHOOK: alerts/slack. Never the value itself.",
    )
    efa: NonNegativeInt | None = Field(
        default=None,
        description="EFA interfaces of a pod (vpc.amazonaws.com/efa). None takes all of the type, "
        "and none on a single node.",
    )
    network: NetworkSection = Field(
        default_factory=NetworkSection, description="InfiniBand or RoCE between the pods."
    )
    node_labels: dict[LabelKey, LabelValue] | None = Field(
        default=None,
        max_length=20,
        description="Labels of the nodes to run on. None selects those of "
        "`cluster.instance_type`, which nodes outside of AWS do not have.",
    )
    memory: Quantity | None = Field(
        default=None,
        description="Memory of a pod, request and limit. None requests 8Gi for each GPU and sets "
        "no limit.",
    )
    scheduler: ResourceName | None = Field(
        default=None, description="Scheduler of the pods (schedulerName)."
    )
    priority: ResourceName | None = Field(
        default=None, description="Priority class of the pods (priorityClassName)."
    )
    topology: TopologySection | None = Field(
        default=None,
        description="Keeps the pods of a run together: with `queue` by Kueue's topology-aware "
        "scheduling, otherwise by affinity.",
    )
    work_volume: WorkVolumeSection | None = Field(
        default=None,
        description="The pod's own disk. None is ephemeral storage without a size, for which a "
        "node that runs full evicts the pod.",
    )
    data: Literal["mountpoint-s3", "file-system", "sync"] = Field(
        default="mountpoint-s3",
        description="How channels reach the pods: mountpoint-s3 mounts their buckets with the "
        "Mountpoint for Amazon S3 CSI driver; file-system reads `file_system`; sync downloads "
        "them, the training data in parts, to the pod's local disk.",
    )
    file_system: FileSystemSection | None = Field(
        default=None, description="The shared file system of `data: file-system`."
    )
    checkpoints: Literal["sync", "volume"] = Field(
        default="sync",
        description="Where checkpoints go: sync copies each pod's to the same S3 prefix as a "
        "training job's, the marker last; volume writes to `checkpoint_volume`.",
    )
    checkpoint_volume: CheckpointVolumeSection | None = Field(
        default=None, description="The shared volume of `checkpoints: volume`."
    )
    max_restarts: NonNegativeInt = Field(
        default=3,
        description="How often a failed or stopped job is started again. 3 is the default of "
        "`cluster.retries`. A TrainJob counts attempts that stored no new checkpoint; other "
        "operators count all.",
    )
    watch_schedule: CronSchedule | None = Field(
        default="*/2 * * * *",
        description="Schedule of the CronJob that watches the run from outside of its pods, in "
        "cron's syntax: it alerts when their heartbeats cease, and stops the run at its budget. It "
        "is written if `alerts`, a secret with a webhook, or `budget` is set. None writes none.",
    )
    grace_period: Annotated[Duration, Field(ge=30, le=3600)] = Field(
        default=120,
        description="Time between SIGTERM and SIGKILL, for the last checkpoint. A training job "
        "has 120.",
    )


class SlurmSection(Section):
    """The run on Slurm: HyperPod, ParallelCluster, or a cluster of your own."""

    shared_folder: ShellPath | None = Field(
        default=None,
        description="Folder that all nodes share, such as /fsx/sm-train: code, logs and "
        "checkpoints. Required by `manifest --to slurm`.",
    )
    local_folder: ShellPath = Field(
        default="/tmp",
        description="Folder on each node's own disk, for downloads and shared-memory files.",
    )
    container: bool = Field(
        default=True,
        description="Whether to run in an image with Pyxis (srun --container-image). false runs "
        "`python`.",
    )
    image: SlurmImage | None = Field(
        default=None,
        description="Image of Pyxis: the path of a squash file of all nodes, such as "
        "/fsx/images/train.sqsh, or an image. None takes `kubernetes.image` or `cluster.image`.",
    )
    python: ShellPath = Field(
        default="python3",
        description="The Python with PyTorch, in the container or on the nodes.",
    )
    options: dict[SlurmOptionName, SlurmOption] = Field(
        default_factory=dict,
        max_length=50,
        description="Options of sbatch by their long names, such as {partition: gpu, qos: high, "
        "gres: 'gpu:h100:8', exclusive: false}. false leaves out one that the script has. Without "
        "exclusive, a job needs mem and cpus-per-task.",
    )
    max_restarts: NonNegativeInt = Field(
        default=3,
        description="How often a job is started again without a new checkpoint since its last "
        "start: after a preemption, the loss of a node, a time limit or a flagged node. Restarts "
        "after a new checkpoint are not counted, and an error of the program ends the job.",
    )
    watch_schedule: CronSchedule | None = Field(
        default="*/10 * * * *",
        description="Schedule of the entry in Slurm's crontab (scrontab) that watches the run from "
        "outside of its nodes: it alerts when their heartbeats cease, and stops the run at its "
        "budget. `manifest` prints the command that adds it if `alerts` or `budget` is set. None "
        "prints none.",
    )
    modules: list[Annotated[str, Field(pattern=MODULE_PATTERN, max_length=128)]] = Field(
        default_factory=list, max_length=20, description="Environment modules to load."
    )
    data: Literal["shared", "sync"] = Field(
        default="sync",
        description="How channels reach the nodes: shared reads `data_folder`; sync downloads "
        "them, the training data in parts, to `local_folder`.",
    )
    data_folder: ShellPath | None = Field(
        default=None,
        description="Folder on all nodes that shows `data_s3`: an FSx for Lustre file system or a "
        "mount of Mountpoint for Amazon S3. Required by `data: shared`.",
    )
    data_s3: S3Folder | None = Field(
        default=None, description="S3 prefix that `data_folder` shows. Required by `data: shared`."
    )

    @model_validator(mode="after")
    def _check_data(self) -> SlurmSection:
        for key in ("data_folder", "data_s3"):
            if self.data == "shared" and getattr(self, key) is None:
                raise ValueError(f"{key}: is required by data: shared")
        return self
