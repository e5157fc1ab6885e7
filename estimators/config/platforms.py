"""The run file's ``kubernetes`` and ``slurm``: the same run on clusters other than SageMaker's.

``sm-train manifest`` reads them; ``submit`` ignores them. Instance type, number of nodes and
environment are those of ``cluster`` and ``stages``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from sm_train.estimators.config.fields import (
    CONTAINER_IMAGE_PATTERN,
    LABEL_KEY_PATTERN,
    LABEL_VALUE_PATTERN,
    RESOURCE_NAME_PATTERN,
    SECRET_KEY_PATTERN,
    Duration,
    NonNegativeInt,
    PlainText,
    Quantity,
    S3Folder,
    Section,
    ShellPath,
    VariableName,
)

MAX_NAME = 63
"""Longest name of a pod, label value or service (RFC 1123 label, in Kubernetes' own validation)."""


def _check_length(value: str) -> str:
    if len(value) > MAX_NAME:
        raise ValueError(f"has {len(value)} characters, and Kubernetes allows {MAX_NAME}")
    return value


ResourceName = Annotated[str, Field(pattern=RESOURCE_NAME_PATTERN), AfterValidator(_check_length)]
LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN, max_length=317)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN), AfterValidator(_check_length)]
ContainerImage = Annotated[str, Field(pattern=CONTAINER_IMAGE_PATTERN, max_length=512)]
SecretKey = Annotated[str, Field(pattern=SECRET_KEY_PATTERN, max_length=320)]
SlurmOption = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN, max_length=128)]


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


class KubernetesSection(Section):
    """The run on Kubernetes: Kubeflow Trainer, its older PyTorchJob, or HyperPod on EKS."""

    image: ContainerImage | None = Field(
        default=None,
        description="Container image of the training, with PyTorch; also for `slurm`. None takes "
        "`cluster.image`; `sm-train image RUN --dockerfile` prints one. For hyperpod-eks it must "
        "contain hyperpod-elastic-agent.",
    )
    fetch_image: ContainerImage = Field(
        default="public.ecr.aws/aws-cli/aws-cli:2.31.0",
        description="Image of the init container, which fetches the bundle: it needs sh, aws and "
        "sha256sum.",
    )
    image_pull_secret: ResourceName | None = Field(
        default=None, description="Name of the secret with the registry's credentials."
    )
    namespace: ResourceName = Field(
        default="default",
        description="Namespace of all objects. HyperPod resumes jobs in `kubeflow` and in "
        "namespaces that start with `hyperpod` (its documentation on auto-resume).",
    )
    service_account: ResourceName = Field(
        default="sm-train",
        description="ServiceAccount of the pods, whose IAM role (Pod Identity or IRSA) reads the "
        "data and writes the checkpoints.",
    )
    queue: ResourceName | None = Field(
        default=None, description="Kueue's local queue (label kueue.x-k8s.io/queue-name)."
    )
    priority_class: ResourceName | None = Field(
        default=None, description="Kueue's workload priority class."
    )
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, max_length=50, description="Labels of every object and pod."
    )
    annotations: dict[LabelKey, PlainText] = Field(
        default_factory=dict, max_length=50, description="Annotations of every object and pod."
    )
    node_selector: dict[LabelKey, LabelValue] | None = Field(
        default=None,
        description="Labels of the nodes to run on. None takes "
        "node.kubernetes.io/instance-type: the instance type, on HyperPod with `ml.`.",
    )
    tolerations: list[LabelKey] = Field(
        default=["nvidia.com/gpu"],
        max_length=20,
        description="Keys of node taints that the pods tolerate, whatever their value and effect.",
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
    hugepages: Quantity = Field(
        default="5120Mi",
        description="2 MiB huge pages of a pod with EFA. 5120Mi is the value of the EKS guide "
        '("Run machine learning training on Amazon EKS with EFA").',
    )
    cpu: Quantity | None = Field(
        default=None, description="CPUs that a pod requests. None: 2 for each GPU."
    )
    memory: Quantity | None = Field(
        default=None, description="Memory that a pod requests. None: 8Gi for each GPU."
    )
    shm_size: Quantity | None = Field(
        default=None,
        description="Limit of /dev/shm, a memory volume. None: half of the node's memory, the "
        "default of Kubernetes.",
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
        "`cluster.retries`.",
    )
    restart_policy: Literal["OnFailure", "ExitCode", "Never"] = Field(
        default="OnFailure",
        description="PyTorchJob: which failed containers are started again. Stopped jobs exit with "
        "143, failed ones with 1.",
    )
    clean_pods: Literal["Running", "None", "All"] = Field(
        default="Running",
        description="PyTorchJob and HyperPod: pods to delete when the job has ended. Running keeps "
        "the others, whose logs `diagnose` and `review` read.",
    )
    auto_resume: bool = Field(
        default=True,
        description="hyperpod-eks: whether HyperPod replaces faulty nodes and starts the job again "
        "(annotation sagemaker.amazonaws.com/enable-job-auto-resume).",
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
        description="Whether to run in `kubernetes.image` or `cluster.image` with Pyxis (srun "
        "--container-image). false runs `python`.",
    )
    python: ShellPath = Field(
        default="python3",
        description="The Python with PyTorch, in the container or on the nodes.",
    )
    partition: SlurmOption | None = Field(
        default=None, description="Partition. None takes the cluster's default."
    )
    account: SlurmOption | None = Field(default=None, description="Account that is charged.")
    qos: SlurmOption | None = Field(default=None, description="Quality of service.")
    gres: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_:.-]+$", max_length=64)] | None = Field(
        default=None, description="GPUs of a node for --gres. None: gpu: and their number."
    )
    exclusive: bool = Field(default=True, description="Whether the job has its nodes for itself.")
    auto_resume: bool = Field(
        default=True,
        description="Whether HyperPod replaces a faulty node and repeats the step (srun "
        "--auto-resume=1). false on clusters other than HyperPod, whose srun has no such option.",
    )
    modules: list[Annotated[str, Field(pattern=r"^[a-zA-Z0-9_./+-]+$", max_length=128)]] = Field(
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
