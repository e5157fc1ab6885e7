"""What every target's manifest contains of a stage: names, environment, code and channels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from sm_train.cost.instances import InstanceType, instance_type
from sm_train.entrypoints.job_interface.node_description import (
    NODE_VARIABLE,
    TORCHRUN,
    NodeChannel,
    NodeDescription,
    Platform,
)
from sm_train.entrypoints.storage.bucket_settings import bucket_variables
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.config.naming import (
    ROLE_NOT_SET,
    checkpoint_uri,
    code_prefix,
    staging_bucket,
)
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.request.launch_plan import LaunchPlan
from sm_train.estimators.request.training_request import (
    SourceBundle,
    input_channels,
    job_environment,
    previous_stage,
)

if TYPE_CHECKING:
    from types_boto3_sagemaker.type_defs import ChannelTypeDef

Target = Literal["trainjob", "pytorchjob", "hyperpod-eks", "slurm"]

START_MODULE = "sm_train.entrypoints.clusters.start"
WATCH_MODULE = "sm_train.entrypoints.clusters.watch_once"
"""Modules of the bundle: a node's first process, and the watcher outside of the nodes."""

_PREVIOUS_CHANNELS = ("previous", "previous_state")
_ALERTED = ("status", "stop", "cancel", "resume")
"""Purposes of the commands that alerts, and `stop`, name."""
_CODE_CHANNELS = ("code", "sm_drivers")
"""Channels of training jobs that the init container, or the batch script, replaces."""


@dataclass(frozen=True)
class StageJob:
    """One stage for one target, whatever the target.

    ``commands`` are those of the ``platform`` for this job, by their purpose. With ``take_over`` it
    continues from checkpoints that another platform wrote.
    """

    config: RunConfig
    stage: StageSection
    bundle: SourceBundle
    region: str
    commit: str | None
    platform: Platform = "kubernetes"
    commands: Mapping[str, str] = field(default_factory=dict)
    take_over: bool = False

    @property
    def name(self) -> str:
        """Return the job's name: lower case, because Kubernetes has no other."""
        return f"{self.config.name}-{self.stage.name}".lower()

    @property
    def instance(self) -> InstanceType:
        return instance_type(self.config.cluster.instance_type)

    @property
    def nodes(self) -> int:
        return self.stage.instances

    @property
    def bucket(self) -> str:
        return staging_bucket(self.config, self.region)

    @property
    def code_uri(self) -> str:
        """Return the bundle's place in S3, the same for the same content."""
        folder = f"{code_prefix(self.config.name)}/manifest-{self.bundle.sha256[:16]}"
        return f"s3://{self.bucket}/{folder}/{ARCHIVE_NAME}"

    @property
    def checkpoint_uri(self) -> str:
        return checkpoint_uri(self.config, self.stage, self.bucket)

    @property
    def annotations(self) -> dict[str, str]:
        """Return what identifies the run, for people and scripts."""
        found = {
            "sm-train/run": self.config.name,
            "sm-train/stage": self.stage.name,
            "sm-train/bundle": self.bundle.sha256,
        }
        return found if self.commit is None else {**found, "sm-train/commit": self.commit}

    @property
    def image(self) -> str:
        """Return the image of the training.

        Raises:
            ManifestError: the run file names none.
        """
        image = self.config.kubernetes.image or self.config.cluster.image
        if image is None:
            raise ManifestError(
                "kubernetes.image: not set; write the image with PyTorch that the cluster can pull "
                "(`sm-train image RUN --dockerfile` prints a Dockerfile)"
            )
        return image

    def variables(
        self, channels: list[NodeChannel], checkpoints: str, launcher: str = TORCHRUN
    ) -> dict[str, str]:
        """Return the variables of a training job, those that SageMaker sets itself, and the node's
        description.
        """
        description = NodeDescription(
            stage=self.stage.name,
            entry=self.bundle.entry,
            instance_type=self.instance.name,
            nodes=self.nodes,
            processes=self.instance.accelerators,
            channels=tuple(channels),
            checkpoints=checkpoints,
            launcher=launcher,
            platform=self.platform,
            commands={name: self.commands[name] for name in _ALERTED if name in self.commands},
            take_over=self.take_over,
        )
        return {
            NODE_VARIABLE: description.to_json(),
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            **job_environment(self.config, self.bundle, self.commit),
            **bucket_variables(self.config.bucket_owners, self.config.bucket_keys),
        }

    def channels(self) -> tuple[list[NodeChannel], list[NodeChannel]]:
        """Return the training job's channels of data, and those with the previous stage's results.

        Its code is not among them, and none is mounted yet.
        """
        found = [
            NodeChannel(
                name=channel["ChannelName"],
                uri=channel["DataSource"]["S3DataSource"]["S3Uri"],
                sharded=channel["DataSource"]["S3DataSource"].get("S3DataDistributionType")
                == "ShardedByS3Key",
            )
            for channel in self._inputs()
            if channel["ChannelName"] not in _CODE_CHANNELS
        ]
        data = [channel for channel in found if channel.name not in _PREVIOUS_CHANNELS]
        return data, [channel for channel in found if channel.name in _PREVIOUS_CHANNELS]

    def streamed(self) -> set[str]:
        """Return the names of the channels that a training job reads as a stream (FastFile)."""
        return {
            channel["ChannelName"]
            for channel in self._inputs()
            if channel.get("InputMode") == "FastFile"
        }

    def _inputs(self) -> list[ChannelTypeDef]:
        """Return the training request's channels; the code's, which depend on it, are not used."""
        launch = LaunchPlan("torchrun", "", None, "")
        return input_channels(self.config, self.stage, launch, "", self.bucket)

    def in_shared_checkpoints(self, channels: list[NodeChannel], folder: str) -> list[NodeChannel]:
        """Return the channels of the previous stage's results, in the run's ``folder``."""
        previous = previous_stage(self.config, self.stage)
        return [
            replace(
                channel,
                path=f"{folder}/{previous.name}/{channel.uri.rstrip('/').rpartition('/')[2]}",
            )
            for channel in channels
            if previous is not None
        ]


_SINKS = ("SM_TRAIN_SLACK_WEBHOOK", "SM_TRAIN_WEBHOOK")
"""Variables with addresses for alerts (entrypoints/monitoring/alert_sinks.py)."""


def is_watched(config: RunConfig, schedule: str | None, secrets: Collection[str] = ()) -> bool:
    """Return whether a watcher outside of the nodes has something to do, and is scheduled.

    It alerts, so the run needs a sink of alerts, or it stops the run at its budget. ``secrets`` are
    the variables that it gets besides those of ``cluster.environment``.
    """
    alerts = config.alerts
    sinks = (alerts.slack_secret, alerts.webhook_secret, alerts.sns_topic)
    variables = {*secrets, *config.cluster.environment}
    is_useful = any(sinks) or config.budget is not None or any(name in variables for name in _SINKS)
    return is_useful and schedule is not None


def start_command(archive: str, code: str, python: str, module: str = START_MODULE) -> str:
    """Return the shell command that unpacks the bundle and becomes ``module``'s process.

    ``archive`` and ``code`` are paths as the shell reads them.
    """
    return (
        f"rm -rf {code} && mkdir -p {code} && tar -xzf {archive} -C {code} && cd {code} && "
        f"exec {python} -m {module}"
    )


def off_sagemaker(config: RunConfig) -> RunConfig:
    """Return the run without what training jobs of SageMaker alone have.

    NCCL takes the place of SMDDP, and the S3 prefixes that of the file systems that a training job
    mounts.
    """
    changes: dict[str, object] = {}
    if config.cluster.backend == "smddp":
        changes["cluster"] = config.cluster.model_copy(update={"backend": "nccl"})
    if config.file_systems:
        changes["data"] = config.data.model_copy(update={"file_system": None})
        changes["channels"] = {
            name: channel.model_copy(update={"file_system": None})
            for name, channel in config.channels.items()
        }
    return config.model_copy(update=changes)


def check_job(job: StageJob) -> None:
    """Check what all targets need.

    Raises:
        ManifestError: a key is missing or does not fit.
    """
    config = job.config
    if config.bucket is None and (config.role or ROLE_NOT_SET) == ROLE_NOT_SET:
        raise ManifestError("bucket: not set; the cluster fetches the code from it")
    if not job.instance.trains:
        raise ManifestError(
            f"cluster.instance_type: {job.instance.name}: has no GPU, which the trainer needs"
        )
    for name, channel in config.channels.items():
        if channel.uri is None:
            raise ManifestError(
                f"channels.{name}.uri: not set; only training jobs mount its file_system: write "
                "the S3 prefix of the same files"
            )
    if config.cluster.capacity == "training-plan":
        raise ManifestError(
            "cluster.capacity: training-plan: is for training jobs; give --set "
            "cluster.capacity=on-demand --set cluster.training_plan=null"
        )


def mounted(channels: list[NodeChannel], folder: str, root: str, key: str) -> list[NodeChannel]:
    """Return ``channels`` with their paths in ``folder``, which shows the S3 prefix ``root``.

    Raises:
        ManifestError: a channel is not below ``root``; the message names the run file's ``key``.
    """
    found = []
    for channel in channels:
        if not channel.uri.startswith(root):
            raise ManifestError(
                f"{key}: {root}: does not contain channel {channel.name} ({channel.uri}); write a "
                "prefix of all channels, or data: sync"
            )
        path = f"{folder.rstrip('/')}/{channel.uri.removeprefix(root)}".rstrip("/")
        found.append(NodeChannel(channel.name, channel.uri, path, channel.sharded))
    return found
