"""The run file's typed models: every key, its unit, its bounds and its default.

A validated :class:`RunConfig` is the one description of a run. What can be derived from it
(world size, effective batch, dollars) is derived in :mod:`sm_train.cost`, never stored here.
Sizes are pixels or images, times are seconds, money is US dollars.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from sm_train.cost.instances import instance_type
from sm_train.estimators.config.cluster import ClusterSection, release
from sm_train.estimators.config.fallback import MOST_FALLBACKS, FallbackSection
from sm_train.estimators.config.fields import (
    CHANNEL_LIMIT,
    JOB_NAME_LIMIT,
    OWN_CHANNELS,
    Bucket,
    ChannelName,
    Count,
    Duration,
    EntryScript,
    KmsKey,
    Name,
    NotNegative,
    PlainText,
    Positive,
    PromptText,
    Region,
    Role,
    S3Uri,
    SecretName,
    Section,
    Share,
    TagKey,
    TagValue,
    Topic,
    no_bool,
)
from sm_train.estimators.config.presets import preset_names, preset_prediction

JOB_NAME_ADDS = len("--") + len("-0001")
"""Characters of a job's name beside the run's and the stage's (estimators.request.job_name)."""


TAG_LIMIT = 50
OWN_TAGS = 10
"""Tags that sm-train may put on a job beside the user's own."""

SHARDING_FRAMEWORK = (2, 6)
"""The first PyTorch with FSDP2 (torch.distributed.fsdp.fully_shard)."""


INDEX_NAME = "index.parquet"
"""The index's name beside the folder of shards (entrypoints/data/shard_index.py)."""


class DataSection(Section):
    """The training set: WebDataset tars, and how a sample is told apart inside them."""

    uri: S3Uri = Field(
        description="S3 prefix that holds the shards and nothing else: every object below it is "
        "dealt to one instance (FastFile, ShardedByS3Key)."
    )
    local: str | None = Field(
        default=None,
        description="The same shards on this machine, relative to the run file; "
        "`submit --local` reads them.",
    )
    validation: S3Uri | None = Field(
        default=None, description="S3 prefix of shards that are not trained on: held-out loss."
    )
    local_validation: str | None = Field(
        default=None, description="The same on this machine, for `submit --local`."
    )
    samples: Count | None = Field(
        default=None,
        description="Samples in the shards; `cost` warns of stages that see less than an epoch.",
    )
    image_key: PlainText = Field(
        default="jpg;jpeg;png;webp", description="Extensions of a sample's image, by preference."
    )
    caption_key: PlainText = Field(default="txt", description="Extension of a sample's caption.")
    index: bool = Field(
        default=True,
        description="Read the shards' index, which `sm-train pack` and `sm-train index` leave "
        "beside them; without it every start reads the headers of all shards.",
    )
    crop: Literal["center", "random"] = Field(
        default="center", description="Which part of an image is kept where its shape is another."
    )
    interpolation: Literal["bicubic", "bilinear"] = Field(
        default="bicubic", description="How images are scaled; antialiased either way."
    )
    aspect_buckets: bool = Field(
        default=False,
        description="Batches of portraits and landscapes beside squares, of about one area.",
    )
    max_bad_fraction: float = Field(
        default=0.01,
        ge=0.0,
        le=1.0,
        description="The job stops when more samples than this share cannot be used.",
    )

    @property
    def index_uri(self) -> str | None:
        """Where the index lies; None without one, as where a whole bucket is the prefix."""
        above = self.uri.rstrip("/").rpartition("/")[0]
        return f"{above}/{INDEX_NAME}" if self.index and above.count("/") > 1 else None

    @model_validator(mode="after")
    def _is_a_prefix(self) -> DataSection:
        last = self.uri.rsplit("/", 1)[-1]
        if re.search(r"\.(tar|tar\.gz|tgz|zip|parquet|csv|jsonl?)$", last):
            raise ValueError(
                f"uri: {self.uri} is a single object; FastFile with ShardedByS3Key needs the "
                f"prefix above it: {self.uri.removesuffix(last)}"
            )
        return self


class ModelSection(Section):
    """What is trained."""

    preset: str = Field(
        description="A model configuration that ships with sm-train.",
        json_schema_extra=lambda schema: schema.update(enum=list(preset_names())),
    )
    components: S3Uri | None = Field(
        default=None,
        description="Frozen parts (vae, text_encoder, tokenizer) and, if there, the U-Net to "
        "start from, in diffusers' folder layout. Without it they start random.",
    )
    local_components: str | None = Field(
        default=None, description="The same components on this machine, for `submit --local`."
    )
    prediction_type: Literal["v_prediction", "epsilon", "flow"] | None = Field(
        default=None,
        description="What the network predicts; the preset's own otherwise: U-Nets noise or "
        "velocity, transformers a rectified flow.",
    )
    zero_terminal_snr: bool = Field(
        default=False,
        description="v_prediction: the schedule's last step is pure noise (arXiv 2305.08891).",
    )
    min_snr_gamma: Positive | None = Field(
        default=None,
        description="U-Nets: timesteps weigh by min-SNR, usually 5 (arXiv 2303.09556).",
    )
    timestep_shift: Positive | None = Field(
        default=None,
        description="flow: timesteps are shifted towards noise; resolution / 256 otherwise.",
    )

    @model_validator(mode="after")
    def _known_preset(self) -> ModelSection:
        if self.preset not in preset_names():
            raise ValueError(f"preset: {self.preset!r} is not one of {', '.join(preset_names())}")
        own = preset_prediction(self.preset)
        flow = own == "flow"
        prediction = self.prediction_type or own
        if flow != (prediction == "flow"):
            learns = "a flow" if flow else "v_prediction or epsilon"
            raise ValueError(
                f"prediction_type: {self.preset} learns {learns}, not {prediction}; leave it out"
            )
        if self.zero_terminal_snr and prediction != "v_prediction":
            raise ValueError(
                f"zero_terminal_snr: needs prediction_type: v_prediction, and {self.preset} has "
                f"{prediction}"
            )
        for key, fits in (("min_snr_gamma", not flow), ("timestep_shift", flow)):
            if getattr(self, key) is not None and not fits:
                raise ValueError(f"{key}: means nothing to {prediction}; leave it out")
        return self


class StageSection(Section):
    """One resolution on one cluster size: one training job."""

    name: Name
    resolution: Annotated[int, BeforeValidator(no_bool), Field(ge=8, le=4096)] = Field(
        description="Side of the square training image, in pixels."
    )
    instances: Annotated[Count, Field(le=10_000)] = Field(
        description="Machines of the cluster's instance type."
    )
    per_device_batch_size: Count = Field(
        description="Images of one forward and backward pass on one GPU."
    )
    gradient_accumulation_steps: Count = Field(
        default=1, description="Passes before one optimizer step."
    )
    effective_batch_size: Count | None = Field(
        default=None,
        description="Checked if given: per_device_batch_size × accumulation × instances × GPUs.",
    )
    max_steps: Count = Field(description="Optimizer steps.")
    learning_rate: Positive
    sharding: Literal["none", "shard_grad_op", "full_shard", "hybrid_shard"] = Field(
        default="none",
        description="What GPUs split: none (DDP), gradients and optimizer, weights too, or weights "
        "within a machine (FSDP2).",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Compute activations again in the backward pass: less memory, a third more "
        "work.",
    )
    init_from: Literal["ema", "raw"] = Field(
        default="ema", description="Which weights of the stage before it begins with."
    )
    optimizer_state: Literal["reset", "keep"] = Field(
        default="reset", description="Whether AdamW's state of the stage before is carried on."
    )
    steps_per_second: Positive | None = Field(
        default=None,
        description="Optimizer steps a second, measured on this very stage; prices the run.",
    )


class ChannelSection(Section):
    """A further input of the job, for code of your own."""

    uri: S3Uri = Field(description="S3 prefix.")
    mode: Literal["File", "FastFile"] = Field(
        default="FastFile", description="Copied before the start, or streamed when it is read."
    )
    sharded: bool = Field(
        default=False, description="Deal the objects out to the instances; each has all otherwise."
    )
    local: str | None = Field(
        default=None, description="The same on this machine, for `submit --local`."
    )


class TrainingSection(Section):
    """The optimization, the same in every stage."""

    precision: Literal["bf16", "fp32"] = "bf16"
    compile: bool = Field(
        default=False, description="Compile the network block by block (torch.compile)."
    )
    seed: Annotated[int, BeforeValidator(no_bool), Field(ge=0, lt=2**31)] = 0
    warmup_steps: Annotated[int, BeforeValidator(no_bool), Field(ge=0)] = Field(
        default=1000, description="Steps in which the learning rate rises from 0."
    )
    weight_decay: NotNegative = 0.01
    max_grad_norm: Positive = Field(default=1.0, description="Largest norm of the gradient.")
    caption_dropout: Share = Field(
        default=0.1, description="Share of captions left out, so that guidance works."
    )
    ema_decay: Share = Field(default=0.9999, description="0 keeps no average of the weights.")
    ema_start: Annotated[int, BeforeValidator(no_bool), Field(ge=0)] = Field(
        default=0, description="Steps before the average begins; until then it is the weights."
    )
    max_nonfinite_steps: Count = Field(
        default=10,
        description="So many steps in a row without a finite gradient: back to the checkpoint.",
    )
    max_rollbacks: Annotated[int, BeforeValidator(no_bool), Field(ge=0)] = Field(
        default=1, description="So often, and the job stops and names the samples."
    )
    decode_workers: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=64)] = Field(
        default=8, description="Loader processes for each GPU."
    )
    log_every: Count = Field(default=50, description="Steps between two `step` events.")


class EvaluationSection(Section):
    """What is looked at while the model trains, by its averaged weights."""

    every_steps: Count = Field(
        default=5000, description="Steps between two evaluations; the last step has one."
    )
    prompts: Annotated[list[PromptText], Field(max_length=64)] = Field(
        default_factory=list, description="Images of these are drawn in each evaluation."
    )
    num_inference_steps: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=1000)] = Field(
        default=30, description="Sampling steps of an image."
    )
    guidance_scale: NotNegative = Field(
        default=5.0, description="Classifier-free guidance; 1 is none."
    )


class CheckpointSection(Section):
    """What a restart costs."""

    every_steps: Count = Field(default=1000, description="Steps between two checkpoints.")
    keep_last: Count = Field(default=3, description="Newest complete checkpoints that stay.")


class HeartbeatSection(Section):
    """How soon silence is noticed, and what is done then.

    The limits of steps, data, checkpoints and evaluations are learned, each its own, as five
    times what they ever took; the others come once and have the longest limit.
    """

    interval: Annotated[Duration, Field(ge=1, le=3600)] = Field(
        default=30, description="Between two `heartbeat` events of a machine."
    )
    min_timeout: Annotated[Duration, Field(ge=1)] = Field(
        default=120, description="No limit is learned below this: storage may hesitate as long."
    )
    max_timeout: Annotated[Duration, Field(ge=1)] = Field(
        default=1200, description="No limit is above this; it holds until one is learned."
    )
    on_stall: Literal["kill", "warn"] = Field(
        default="kill",
        description="kill: keep the evidence and end the job, which can then be resumed; "
        "warn: only report the stall.",
    )
    metrics_interval: Annotated[Duration, Field(ge=10)] = Field(
        default=60, description="Between two `node` events: network, GPUs, stragglers."
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> HeartbeatSection:
        if self.max_timeout < self.min_timeout:
            raise ValueError(
                f"max_timeout: {self.max_timeout} s is less than min_timeout {self.min_timeout} s"
            )
        return self


class RecoverySection(Section):
    """What `watch` may do by itself when a job ends before its stage."""

    max_attempts: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=100)] = Field(
        default=5,
        description="Jobs in a row that leave no newer checkpoint before it gives up; 0 starts "
        "none.",
    )
    backoff: Annotated[Duration, Field(ge=1, le=3600)] = Field(
        default=60, description="Before the next job; doubles each time, an hour at most."
    )
    fallbacks: Annotated[list[FallbackSection], Field(max_length=MOST_FALLBACKS)] = Field(
        default_factory=list,
        description="Where to go, in this order, when machines cannot be had or are taken away; "
        "after the last one the run's own place is next again.",
    )


class DoctorSection(Section):
    """Whether the cluster is examined before training: GPUs, network, files."""

    mode: Annotated[
        Literal["auto", "fail", "warn", "off"],
        BeforeValidator(lambda value: "off" if value is False else value),  # YAML's word for it
    ] = Field(
        default="auto",
        description="fail does not train on an unfit cluster, warn says so; auto warns on several "
        "instances and is off on one, and in local runs.",
    )
    timeout: Annotated[Duration, Field(ge=30, le=900)] = Field(
        default=120, description="The examination ends after this, with what is known by then."
    )
    max_slowdown: Annotated[float, BeforeValidator(no_bool), Field(gt=1, le=100)] = Field(
        default=1.5, description="Predicted to be so many times slower, the cluster is unfit."
    )


class AlertsSection(Section):
    """Who is told by the job itself. Addresses are secrets: here stand only their names."""

    slack_secret: SecretName | None = Field(
        default=None,
        description="Slack's incoming webhook: a secret's name in Secrets Manager, or ssm: and a "
        "parameter's name. The job's role must be allowed to read it.",
    )
    webhook_secret: SecretName | None = Field(
        default=None, description="Any webhook, named alike: gets every field as JSON."
    )
    sns_topic: Topic | None = Field(
        default=None, description="ARN of an SNS topic to which the job's role may publish."
    )
    level: Literal["info", "warning", "critical"] = Field(
        default="warning", description="The least that is sent."
    )


class BudgetSection(Section):
    """The most that the whole run may cost."""

    usd: Positive
    on_exceed: Literal["stop", "warn"] = Field(
        default="stop", description="stop refuses to submit above it; warn says so and goes on."
    )


class RunConfig(Section):
    """A whole run file."""

    name: Name = Field(
        description="Letters, digits and single inner hyphens; begins every job's name."
    )
    region: Region | None = Field(
        default=None, description="AWS region; the profile's own otherwise."
    )
    role: Role | None = Field(
        default=None, description="ARN of the job's IAM role; submit needs it."
    )
    bucket: Bucket | None = Field(
        default=None,
        description="Bucket for code, checkpoints and results; sagemaker-REGION-ACCOUNT otherwise.",
    )
    output_kms_key: KmsKey | None = Field(
        default=None, description="KMS key of the model that a job leaves (model.tar.gz)."
    )
    tags: dict[TagKey, TagValue] = Field(
        default_factory=dict, max_length=TAG_LIMIT - OWN_TAGS, description="Tags of every job."
    )
    code: str | None = Field(
        default=None,
        description="Folder of your own Python files, relative to the run file, that goes into the "
        "bundle beside the training code. A .smtrainignore in it leaves files out.",
    )
    entry: EntryScript | None = Field(
        default=None, description="File in code that is started in place of ours, with --stage."
    )
    channels: dict[ChannelName, ChannelSection] = Field(
        default_factory=dict,
        max_length=CHANNEL_LIMIT - len(OWN_CHANNELS),
        description="Further inputs, each a folder /opt/ml/input/data/NAME in the job.",
    )
    data: DataSection
    model: ModelSection
    stages: Annotated[list[StageSection], Field(min_length=1, max_length=20)]
    training: TrainingSection = TrainingSection()
    cluster: ClusterSection
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    heartbeat: HeartbeatSection = HeartbeatSection()
    recovery: RecoverySection = RecoverySection()
    doctor: DoctorSection = DoctorSection()
    alerts: AlertsSection = AlertsSection()
    budget: BudgetSection | None = None

    @field_validator("entry")
    @classmethod
    def _lies_in_code(cls, entry: str | None, info: ValidationInfo) -> str | None:
        if entry is not None and info.data.get("code") is None:
            raise ValueError("needs code: the folder that it lies in")
        return entry

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        gpus = instance_type(self.cluster.instance_type).accelerators
        stages = list(enumerate(self.stages))
        problems = cross_field_problems(self.name, stages, gpus, self.cluster)
        if problems:
            raise ValueError("; ".join(problem.message for problem in problems))
        return self

    def regions(self, home: str) -> tuple[str, ...]:
        """Return the regions that may hold jobs of the run, ``home`` first."""
        others = {one.region for one in self.recovery.fallbacks} - {None, home}
        return home, *sorted(filter(None, others))


@dataclass(frozen=True)
class Problem:
    """One mistake: where, the value (None where the place says it all) and the mend."""

    path: tuple[str | int, ...]
    value: Any
    message: str

    def __hash__(self) -> int:
        return hash((self.path, self.message))


def cross_field_problems(
    name: str,
    stages: list[tuple[int, StageSection]],
    gpus_per_instance: int | None,
    cluster: ClusterSection | None,
) -> list[Problem]:
    """Mistakes between parts that are good by themselves.

    ``stages`` are those (with their place in the file) that validate alone, and so is ``cluster``;
    without a known instance type ``gpus_per_instance`` is None.
    """
    problems: list[Problem] = []
    taken: set[str] = set()
    for index, stage in stages:
        where: tuple[str | int, ...] = ("stages", index)
        if stage.name in taken:
            problems.append(
                Problem((*where, "name"), stage.name, "is the name of an earlier stage too")
            )
        taken.add(stage.name)
        problems += _job_name_problem(name, stage, where)
        if index == 0:
            problems += _first_stage_problems(stage, where)
        if cluster is not None:
            problems += _sharding_problem(stage, cluster, where)
            problems += _alternatives_problem(stage, cluster, where)
        if gpus_per_instance is not None:
            problems += _batch_problem(stage, stage.instances * gpus_per_instance, where)
    return problems


def _job_name_problem(
    name: str, stage: StageSection, where: tuple[str | int, ...]
) -> list[Problem]:
    length = len(name) + len(stage.name) + JOB_NAME_ADDS
    if length <= JOB_NAME_LIMIT:
        return []
    message = (
        f"the job name {name}--{stage.name}-0001 has {length} characters and SageMaker allows "
        f"{JOB_NAME_LIMIT}; shorten the run's or the stage's name by {length - JOB_NAME_LIMIT}"
    )
    return [Problem((*where, "name"), stage.name, message)]


def _first_stage_problems(stage: StageSection, where: tuple[str | int, ...]) -> list[Problem]:
    return [
        Problem((*where, key), getattr(stage, key), "is the first stage's: nothing is before it")
        for key in ("init_from", "optimizer_state")
        if getattr(stage, key) != StageSection.model_fields[key].default
    ]


def _sharding_problem(
    stage: StageSection, cluster: ClusterSection, where: tuple[str | int, ...]
) -> list[Problem]:
    version = cluster.framework_version
    if stage.sharding == "none":
        return []
    if cluster.backend == "smddp":
        reason = "FSDP2 needs a newer PyTorch than SMDDP's; write backend: nccl"
    elif version and release(version) < SHARDING_FRAMEWORK:
        reason = f"FSDP2 needs PyTorch 2.6, and framework_version is {version}"
    else:
        return []
    return [Problem((*where, "sharding"), stage.sharding, reason)]


def _alternatives_problem(
    stage: StageSection, cluster: ClusterSection, where: tuple[str | int, ...]
) -> list[Problem]:
    """Every alternative must have as many GPUs: another world size is another effective batch."""
    gpus = stage.instances * instance_type(cluster.instance_type).accelerators
    return [
        Problem(
            (*where, "instances"),
            stage.instances,
            f"{stage.instances} × {cluster.instance_type} have {gpus} GPUs, which no number of "
            f"{name} has ({own} each); leave it out of cluster.alternatives",
        )
        for name in cluster.alternatives
        if gpus % (own := instance_type(name).accelerators)
    ]


def _batch_problem(stage: StageSection, gpus: int, where: tuple[str | int, ...]) -> list[Problem]:
    product = stage.per_device_batch_size * stage.gradient_accumulation_steps * gpus
    wanted = stage.effective_batch_size
    if wanted is None or wanted == product:
        return []
    gradient_accumulation_steps, rest = divmod(wanted, stage.per_device_batch_size * gpus)
    mend = (
        f"write gradient_accumulation_steps: {gradient_accumulation_steps}"
        if gradient_accumulation_steps and not rest
        else f"no accumulation makes {wanted} of {stage.per_device_batch_size} × {gpus} GPUs"
    )
    message = (
        f"does not multiply out: {stage.per_device_batch_size} per GPU × "
        f"{stage.gradient_accumulation_steps} accumulation steps × {gpus} GPUs = {product}; {mend}"
    )
    return [Problem((*where, "effective_batch_size"), wanted, message)]
