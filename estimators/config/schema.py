"""The root of the run file: every key, its unit, its bounds and its default.

A validated :class:`RunConfig` is the only description of a run. What follows from it (world size,
effective batch size, cost) is computed in :mod:`sm_train.cost` and never stored here. Sizes are in
pixels or images, times in seconds, money in US dollars.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator, model_validator
from sm_train.cost.instances import instance_type
from sm_train.entrypoints.job_interface.index_location import index_uri, removal_list_uri
from sm_train.estimators.config.cluster import ClusterSection
from sm_train.estimators.config.consistency import RunParts, cross_section_problems
from sm_train.estimators.config.data import (
    ChannelSection,
    DataSection,
    FileSystemInputSection,
    SourceSection,
)
from sm_train.estimators.config.fields import (
    MAX_CHANNELS,
    RESERVED_CHANNELS,
    Bucket,
    BucketOwner,
    ChannelName,
    EntryArgument,
    EntryScript,
    KmsKey,
    Name,
    Region,
    Role,
    Section,
    TagKey,
    TagValue,
)
from sm_train.estimators.config.model import ModelSection
from sm_train.estimators.config.operations import (
    AlertsSection,
    BudgetSection,
    DoctorSection,
    HeartbeatSection,
)
from sm_train.estimators.config.platforms import KubernetesSection, SlurmSection
from sm_train.estimators.config.recovery import RecoverySection
from sm_train.estimators.config.stage import PRESET_OBJECTIVE, StageSection
from sm_train.estimators.config.trackers import TrackersField, TrackersSection
from sm_train.estimators.config.training import (
    CheckpointSection,
    EvaluationSection,
    TrainingSection,
)

MAX_TAGS = 50
RESERVED_TAGS = 12
"""Number of tags that sm-train may add to the user's."""


class RunConfig(Section):
    """A run file."""

    name: Name = Field(
        description="Name of the run and prefix of its job names: letters, digits and single "
        "inner hyphens."
    )
    region: Region | None = Field(
        default=None, description="AWS region. None takes the AWS profile's region."
    )
    role: Role | None = Field(
        default=None, description="ARN of the IAM role that the jobs assume. Required by `submit`."
    )
    bucket: Bucket | None = Field(
        default=None,
        description="Bucket for code, checkpoints and results. None takes SageMaker's default "
        "bucket, sagemaker-REGION-ACCOUNT.",
    )
    bucket_owners: dict[Bucket, BucketOwner] = Field(
        default_factory=dict,
        description="Accounts that own buckets of the run, by bucket; default: the caller's "
        "account. S3 denies requests to a bucket of another account. `any` accepts every owner.",
    )
    output_kms_key: KmsKey | None = Field(
        default=None,
        description="KMS key that encrypts the job's output, and what sm-train writes to the run's "
        "bucket. It can be an ID, an ARN or an alias.",
    )
    bucket_kms_keys: dict[Bucket, KmsKey] = Field(
        default_factory=dict,
        description="KMS keys for new objects, by bucket; default: `output_kms_key` in the run's "
        "own bucket, and otherwise the bucket's default encryption, as with `default`.",
    )
    tags: dict[TagKey, TagValue] = Field(
        default_factory=dict,
        max_length=MAX_TAGS - RESERVED_TAGS,
        description="AWS tags of every job.",
    )
    code: str | None = Field(
        default=None,
        description="Folder of user code (Python files), relative to the run file. It is added to "
        "the bundle next to the training code; a .smtrainignore file in it excludes files.",
    )
    entry: EntryScript | None = Field(
        default=None,
        description="File below `code` to start instead of the built-in training script. A script "
        "that trains with Accelerate needs no change.",
    )
    entry_args: Annotated[tuple[EntryArgument, ...], Field(max_length=500)] = Field(
        default=(),
        description="Arguments of `entry`. `{checkpoints}`, `{channel.NAME}`, `{model}` and "
        "`{output}` are folders, `{resume}` is the newest complete checkpoint (without one, the "
        "option is left out); `{stage}`, `{resolution}`, `{per_device_batch_size}`, "
        "`{gradient_accumulation_steps}`, `{max_steps}`, `{learning_rate}` and `{seed}` are values "
        "of the run file.",
    )
    channels: dict[ChannelName, ChannelSection] = Field(
        default_factory=dict,
        max_length=MAX_CHANNELS - len(RESERVED_CHANNELS),
        description="Additional inputs. Each is a folder /opt/ml/input/data/NAME in the job.",
    )
    data: DataSection = Field(description="The training set.")
    model: ModelSection = Field(
        default=ModelSection(), description="The model that is trained; required without `entry`."
    )
    stages: Annotated[list[StageSection], Field(min_length=1, max_length=20)] = Field(
        description="Stages of the run, in order: one training job each. A stage starts from the "
        "weights of the previous one."
    )
    training: TrainingSection = TrainingSection()
    cluster: ClusterSection = Field(description="Instance type, capacity and network of the jobs.")
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    heartbeat: HeartbeatSection = HeartbeatSection()
    recovery: RecoverySection = RecoverySection()
    doctor: DoctorSection = DoctorSection()
    alerts: AlertsSection = AlertsSection()
    trackers: TrackersField = Field(
        default=TrackersSection(),
        description="Experiment trackers: tensorboard, wandb, mlflow; a list of names, or a "
        "mapping from each name to its settings.",
    )
    budget: BudgetSection | None = Field(
        default=None, description="The maximum cost of the whole run. None sets no limit."
    )

    kubernetes: KubernetesSection = Field(
        default=KubernetesSection(),
        description="The same run on Kubernetes, for `sm-train manifest`; `submit` ignores it.",
    )
    slurm: SlurmSection = Field(
        default=SlurmSection(),
        description="The same run on Slurm, for `sm-train manifest`; `submit` ignores it.",
    )

    @property
    def is_outside_of_aws(self) -> bool:
        """Return whether SageMaker cannot have jobs of it: AWS lacks its machine or its store."""
        endpoints = {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}
        return self.cluster.is_own_machine or not endpoints.isdisjoint(self.cluster.environment)

    @property
    def train_sharded(self) -> bool:
        """Return whether each instance gets a part of the training data (`data.sharded`)."""
        default = self.entry is None and self.data.file_system is None
        return default if self.data.sharded is None else self.data.sharded

    @property
    def file_systems(self) -> dict[str, FileSystemInputSection]:
        """Return the file systems that training jobs mount, by the run file's key."""
        named = {"data.file_system": self.data.file_system}
        for name, channel in self.channels.items():
            named[f"channels.{name}.file_system"] = channel.file_system
        return {key: section for key, section in named.items() if section is not None}

    @property
    def reads_index(self) -> bool:
        """Return whether the job gets the index of the shards (`data.index`)."""
        if self.data.synthetic_samples:
            return False
        default = self.entry is None and self.data.reader == "indexed"
        default = default or bool(self.conditions)
        return default if self.data.index is None else self.data.index

    @property
    def conditions(self) -> set[str]:
        """Return the conditions of the samples to read, of all sources."""
        sources = [self.data.sources, *(stage.sources for stage in self.stages)]
        stated = [self.data.where, *(source.where for each in sources for source in each)]
        return {*filter(None, stated)}

    @property
    def reads_shards(self) -> bool:
        """Return whether the training data must be shards: a script may read any files."""
        return self.entry is None or self.reads_index

    @property
    def bucket_keys(self) -> dict[str, str]:
        """Return the KMS key of each bucket that has one.

        The default bucket of an account is a name with ``*``
        (:func:`sm_train.entrypoints.storage.bucket_settings.bucket_key`).
        """
        if self.output_kms_key is None:
            return dict(self.bucket_kms_keys)
        if self.bucket is None:
            account = self.role.split(":")[4] if self.role else "*"
            names = [f"sagemaker-*-{account}"]
        else:
            relocated = (fallback.buckets.get(self.bucket) for fallback in self.recovery.fallbacks)
            names = [self.bucket, *filter(None, relocated)]
        own = dict.fromkeys(names, self.output_kms_key)
        return {**own, **self.bucket_kms_keys}

    @property
    def secret_names(self) -> dict[str, str]:
        """Return the names of the secrets that the job reads, by the run file's key."""
        names = {
            "alerts.slack_secret": self.alerts.slack_secret,
            "alerts.webhook_secret": self.alerts.webhook_secret,
        }
        trackers = self.trackers.job_config()
        names |= {f"trackers.{tracker.name}.secret": tracker.secret for tracker in trackers}
        return {key: name for key, name in names.items() if name is not None}

    @property
    def index_uri(self) -> str | None:
        """Return the URI of the index; None if it is off or if `data.uri` is a whole bucket."""
        return index_uri(self.data.uri) if self.reads_index else None

    def sources_of(self, stage: StageSection) -> list[SourceSection]:
        """Return the sources that a stage mixes; empty if it reads `data.uri` alone."""
        return stage.sources or self.data.sources

    def objective_of(self, stage: StageSection) -> str | None:
        """Return the function that computes a stage's loss; None is the preset's."""
        objective = stage.objective or self.training.objective
        return None if objective == PRESET_OBJECTIVE else objective

    @property
    def source_channels(self) -> dict[str, ChannelSection]:
        """Return the run's own channels that a stage reads as a source."""
        names = {source.channel for stage in self.stages for source in self.sources_of(stage)}
        return {name: self.channels[name] for name in self.channels if name in names}

    @property
    def source_indexes(self) -> dict[str, str]:
        """Return the URIs of the indexes of :attr:`source_channels` that have one."""
        if not self.reads_index:
            return {}
        found = {
            name: index_uri(channel.uri)
            for name, channel in self.source_channels.items()
            if channel.uri is not None
        }
        return {name: uri for name, uri in found.items() if uri is not None}

    @property
    def removal_lists(self) -> dict[str, str]:
        """Return where the samples removed from each channel of shards are listed, by channel."""
        if self.data.synthetic_samples:
            return {}
        shards = {"train": self.data.uri, "validation": self.data.validation}
        shards |= {name: channel.uri for name, channel in self.source_channels.items()}
        lists = {name: removal_list_uri(uri) for name, uri in shards.items() if uri is not None}
        return {name: uri for name, uri in lists.items() if uri is not None}

    @field_validator("entry")
    @classmethod
    def _check_entry_has_code(cls, entry: str | None, info: ValidationInfo) -> str | None:
        if entry is not None and info.data.get("code") is None:
            raise ValueError("requires code: the folder that contains it")
        return entry

    @field_validator("entry_args")
    @classmethod
    def _check_entry_args_have_entry(
        cls, arguments: tuple[str, ...], info: ValidationInfo
    ) -> tuple[str, ...]:
        if arguments and info.data.get("entry", "") is None:
            raise ValueError("requires entry: the script that takes the arguments")
        return arguments

    @model_validator(mode="after")
    def _check_sections_fit(self) -> RunConfig:
        problems = cross_section_problems(
            RunParts(
                run=self.name,
                stages=list(enumerate(self.stages)),
                gpus_per_instance=instance_type(self.cluster.instance_type).accelerators,
                cluster=self.cluster,
                training=self.training,
                model=self.model,
                own_script=self.entry is not None,
                data=self.data,
                channels=self.channels,
            )
        )
        if problems:
            raise ValueError("; ".join(problem.message for problem in problems))
        return self
