"""The run file's typed models: every key, its unit, its bounds and its default.

A validated :class:`RunConfig` is the one description of a run. What can be derived from it
(world size, effective batch, dollars) is derived in :mod:`sm_train.cost`, never stored here.
Sizes are pixels or images, times are seconds, money is US dollars.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from sm_train.cost.durations import duration_seconds
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type, instance_types
from sm_train.estimators.model_presets import preset_names, preset_prediction

JOB_NAME_ADDS = len("--") + len("-0001")
"""Characters of a job's name beside the run's and the stage's (estimators.request.job_name)."""
JOB_NAME_LIMIT = 63  # botocore's service model, TrainingJobName
ENVIRONMENT_LIMIT = 100
OWN_ENVIRONMENT = 4
"""Variables that a request adds to the user's own (estimators.request), at most."""

SMDDP_FRAMEWORK = "2.3.0"
"""PyTorch of the last AWS image that carries SMDDP (AWS Deep Learning Containers, 2024)."""

SHARDING_FRAMEWORK = (2, 6)
"""The first PyTorch with FSDP2 (torch.distributed.fsdp.fully_shard)."""

_MiB_LIMIT = 16384


def _seconds(value: Any) -> Any:
    """Read ``90s``, ``30m``, ``36h`` or ``5d`` as seconds; a number is seconds already."""
    if not isinstance(value, str):
        return value
    found = duration_seconds(value)
    if found is None:
        raise ValueError("write a duration such as 90s, 30m, 36h or 5d")
    return round(found)


def _no_bool(value: Any) -> Any:
    """YAML's ``yes`` and ``true`` are no numbers, though Python would count with them."""
    if isinstance(value, bool):
        raise ValueError("write a number")
    return value


Duration = Annotated[
    int,
    BeforeValidator(_seconds, json_schema_input_type=int | str),
    Field(description="Seconds, or a number with s, m, h or d behind it."),
]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Positive = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=1, allow_inf_nan=False)]

# A quote breaks the container's start-up script, a line end breaks its environment file.
_PLAIN = r"^[^'\"\r\n\\]*$"
_NAME = r"^[a-zA-Z0-9](-?[a-zA-Z0-9])*$"
_S3_URI = r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^'\"\r\n\\]*)?$"
_VARIABLE = r"^[a-zA-Z_][a-zA-Z0-9_]*$"
_VERSION = r"^\d+\.\d+(\.\d+)?$"
_REGION = r"^[a-z]{2}(-[a-z]+)+-\d$"
_ROLE = r"^arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+$"
_BUCKET = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"

_PATTERN_WORDS = {
    _PLAIN: "must be without quotes, backslashes and line ends",
    _NAME: "must be letters and digits with single hyphens between them",
    _S3_URI: "must be an address such as s3://bucket/prefix/, without quotes",
    _VARIABLE: "must be letters, digits and underscores, not beginning with a digit",
    _VERSION: "must be a version such as 2.3.0",
    _REGION: "must be a region such as us-east-1",
    _ROLE: "must be a role's ARN such as arn:aws:iam::111122223333:role/sm-train",
    _BUCKET: "must be a bucket's name, without s3://",
}


def words_for_pattern(pattern: str) -> str:
    """What a pattern of this module's types asks for, in words."""
    return _PATTERN_WORDS[pattern]


PlainText = Annotated[str, Field(pattern=_PLAIN, max_length=256)]
Name = Annotated[str, Field(pattern=_NAME, max_length=JOB_NAME_LIMIT)]
PromptText = Annotated[str, Field(min_length=1, max_length=1000)]
S3Uri = Annotated[str, Field(pattern=_S3_URI, max_length=1024)]


class Section(BaseModel):
    """A mapping of the run file: unknown keys are errors, values do not change."""

    # Built at the first use: a section is built once, inside the run that holds it.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


INDEX_NAME = "index.parquet"
"""The index's name beside the folder of shards (entrypoints/shard_index.py)."""


class Data(Section):
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
    max_bad_share: float = Field(
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
    def _is_a_prefix(self) -> Data:
        last = self.uri.rsplit("/", 1)[-1]
        if re.search(r"\.(tar|tar\.gz|tgz|zip|parquet|csv|jsonl?)$", last):
            raise ValueError(
                f"uri: {self.uri} is a single object; FastFile with ShardedByS3Key needs the "
                f"prefix above it: {self.uri.removesuffix(last)}"
            )
        return self


class Model(Section):
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
    prediction: Literal["v_prediction", "epsilon", "flow"] | None = Field(
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
    def _known_preset(self) -> Model:
        if self.preset not in preset_names():
            raise ValueError(f"preset: {self.preset!r} is not one of {', '.join(preset_names())}")
        own = preset_prediction(self.preset)
        flow = own == "flow"
        prediction = self.prediction or own
        if flow != (prediction == "flow"):
            learns = "a flow" if flow else "v_prediction or epsilon"
            raise ValueError(
                f"prediction: {self.preset} learns {learns}, not {prediction}; leave it out"
            )
        if self.zero_terminal_snr and prediction != "v_prediction":
            raise ValueError(
                f"zero_terminal_snr: needs prediction: v_prediction, and {self.preset} has "
                f"{prediction}"
            )
        for key, fits in (("min_snr_gamma", not flow), ("timestep_shift", flow)):
            if getattr(self, key) is not None and not fits:
                raise ValueError(f"{key}: means nothing to {prediction}; leave it out")
        return self


class Stage(Section):
    """One resolution on one cluster size: one training job."""

    name: Name
    resolution: Annotated[int, BeforeValidator(_no_bool), Field(ge=8, le=4096)] = Field(
        description="Side of the square training image, in pixels."
    )
    instances: Count = Field(description="Machines of the cluster's instance type.")
    per_gpu_batch: Count = Field(description="Images of one forward and backward pass on one GPU.")
    accumulation: Count = Field(default=1, description="Passes before one optimizer step.")
    effective_batch_size: Count | None = Field(
        default=None,
        description="Checked if given: per_gpu_batch × accumulation × instances × GPUs.",
    )
    iterations: Count = Field(description="Optimizer steps.")
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
    start: Literal["ema", "raw"] = Field(
        default="ema", description="Which weights of the stage before it begins with."
    )
    optimizer: Literal["fresh", "carried"] = Field(
        default="fresh", description="Whether AdamW's state of the stage before is carried on."
    )
    iterations_per_second: Positive | None = Field(
        default=None,
        description="Optimizer steps a second, measured on this very stage; prices the run.",
    )


class Training(Section):
    """The optimization, the same in every stage."""

    precision: Literal["bf16", "fp32"] = "bf16"
    compile: bool = Field(
        default=False, description="Compile the network block by block (torch.compile)."
    )
    seed: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, lt=2**31)] = 0
    warmup_iterations: Annotated[int, BeforeValidator(_no_bool), Field(ge=0)] = Field(
        default=1000, description="Steps in which the learning rate rises from 0."
    )
    weight_decay: NotNegative = 0.01
    gradient_clip: Positive = Field(default=1.0, description="Largest norm of the gradient.")
    caption_dropout: Share = Field(
        default=0.1, description="Share of captions left out, so that guidance works."
    )
    ema_decay: Share = Field(default=0.9999, description="0 keeps no average of the weights.")
    ema_start: Annotated[int, BeforeValidator(_no_bool), Field(ge=0)] = Field(
        default=0, description="Steps before the average begins; until then it is the weights."
    )
    max_skipped_steps: Count = Field(
        default=10,
        description="So many steps in a row without a finite gradient: back to the checkpoint.",
    )
    max_rollbacks: Annotated[int, BeforeValidator(_no_bool), Field(ge=0)] = Field(
        default=1, description="So often, and the job stops and names the samples."
    )
    workers: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=64)] = Field(
        default=8, description="Loader processes for each GPU."
    )
    log_every: Count = Field(default=50, description="Steps between two `step` events.")


class Vpc(Section):
    """The private network of the job."""

    subnets: Annotated[list[PlainText], Field(min_length=1, max_length=16)]
    security_groups: Annotated[list[PlainText], Field(min_length=1, max_length=5)]


class Cluster(Section):
    """The machines and how they are had."""

    instance_type: str = Field(
        description="SageMaker's name of the machine, such as ml.p4de.24xlarge.",
        json_schema_extra=lambda schema: schema.update(
            enum=[machine.name for machine in instance_types()]
        ),
    )
    capacity: Literal["on-demand", "spot", "warm-pool", "training-plan"] = "on-demand"
    keep_alive: Annotated[Duration, Field(ge=60, le=21600)] | None = Field(
        default=None, description="capacity: warm-pool. How long machines are kept (and billed)."
    )
    training_plan: PlainText | None = Field(
        default=None, description="capacity: training-plan. The plan's ARN."
    )
    max_wait: Annotated[Duration, Field(ge=1)] | None = Field(
        default=None, description="capacity: spot. Longest wait and run together."
    )
    collective: Literal["auto", "nccl", "smddp"] = Field(
        default="auto", description="Gradient all-reduce: auto takes SMDDP on p4d and p4de."
    )
    image: PlainText | None = Field(
        default=None, description="Container image (ECR address); AWS's PyTorch image otherwise."
    )
    framework_version: Annotated[str, Field(pattern=_VERSION)] | None = Field(
        default=None, description="PyTorch version of AWS's image; chosen by collective otherwise."
    )
    retries: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=30)] = Field(
        default=3, description="Restarts by SageMaker after an internal error of its own."
    )
    max_runtime: Annotated[Duration, Field(ge=1, le=28 * 86400)] = Field(
        default=5 * 86400, description="The job is ended after this, retries included."
    )
    volume_gb: Annotated[int, Field(ge=1, le=_MiB_LIMIT)] = Field(
        default=30, description="EBS volume; unused on types with local NVMe."
    )
    vpc: Vpc | None = None
    environment: dict[
        Annotated[str, Field(pattern=_VARIABLE, max_length=512)],
        Annotated[str, Field(pattern=_PLAIN, max_length=512)],
    ] = Field(
        default_factory=dict,
        max_length=ENVIRONMENT_LIMIT - OWN_ENVIRONMENT,
        description="Environment variables for the job. Nothing secret: they show in the console.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        try:
            machine = instance_type(self.instance_type)
        except UnknownInstanceTypeError as error:
            raise ValueError(f"instance_type: {error}") from None
        if self.collective == "smddp" and not machine.supports_smddp:
            raise ValueError(
                f"collective: smddp does not run on {self.instance_type} (SMDDP supports p4d and "
                "p4de only); write nccl, which uses EFA there"
            )
        version = self.framework_version
        if self.collective == "smddp" and version and not version.startswith("2.3"):
            raise ValueError(
                f"framework_version: {version} has no SMDDP; the last AWS image that carries it "
                f"is {SMDDP_FRAMEWORK}"
            )
        for key, kind in _CAPACITY_KEYS.items():
            if getattr(self, key) is not None and self.capacity != kind:
                raise ValueError(f"{key}: needs capacity: {kind}, not {self.capacity}")
        if self.capacity == "training-plan" and self.training_plan is None:
            raise ValueError("training_plan: capacity training-plan needs the plan's ARN")
        if self.capacity == "warm-pool" and self.keep_alive is None:
            raise ValueError("keep_alive: capacity warm-pool needs how long, such as 30m")
        if self.max_wait is not None and self.max_wait < self.max_runtime:
            raise ValueError(
                f"max_wait: {self.max_wait} s is less than max_runtime {self.max_runtime} s"
            )
        return self


_CAPACITY_KEYS = {
    "keep_alive": "warm-pool",
    "training_plan": "training-plan",
    "max_wait": "spot",
}


class Evaluation(Section):
    """What is looked at while the model trains, by its averaged weights."""

    every: Count = Field(
        default=5000, description="Steps between two evaluations; the last step has one."
    )
    prompts: Annotated[list[PromptText], Field(max_length=64)] = Field(
        default_factory=list, description="Images of these are drawn in each evaluation."
    )
    steps: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1000)] = Field(
        default=30, description="Sampling steps of an image."
    )
    guidance: NotNegative = Field(default=5.0, description="Classifier-free guidance; 1 is none.")


class Checkpoint(Section):
    """What a restart costs."""

    every: Count = Field(default=1000, description="Steps between two checkpoints.")
    keep: Count = Field(default=3, description="Newest complete checkpoints that stay.")


class Heartbeat(Section):
    """How soon silence is noticed."""

    interval: Annotated[Duration, Field(ge=1)] = 30
    stall_after: Annotated[Duration, Field(ge=1)] = Field(
        default=900, description="Without a step for this long, every rank prints its stacks."
    )

    @model_validator(mode="after")
    def _longer_than_a_beat(self) -> Heartbeat:
        if self.stall_after <= self.interval:
            raise ValueError(
                f"stall_after: {self.stall_after} s must be longer than interval {self.interval} s"
            )
        return self


class Recovery(Section):
    """What `watch` may do by itself when a job ends before its stage."""

    attempts: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=100)] = Field(
        default=5,
        description="Jobs in a row that leave no newer checkpoint before it gives up; 0 starts "
        "none.",
    )
    delay: Annotated[Duration, Field(ge=1, le=3600)] = Field(
        default=60, description="Before the next job; doubles each time, an hour at most."
    )


class Budget(Section):
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
    region: Annotated[str, Field(pattern=_REGION)] | None = Field(
        default=None, description="AWS region; the profile's own otherwise."
    )
    role: Annotated[str, Field(pattern=_ROLE)] | None = Field(
        default=None, description="ARN of the job's IAM role; submit needs it."
    )
    bucket: Annotated[str, Field(pattern=_BUCKET)] | None = Field(
        default=None,
        description="Bucket for code, checkpoints and results; sagemaker-REGION-ACCOUNT otherwise.",
    )
    tags: dict[Annotated[str, Field(pattern=_PLAIN, min_length=1, max_length=128)], PlainText] = (
        Field(default_factory=dict, max_length=45)
    )
    data: Data
    model: Model
    stages: Annotated[list[Stage], Field(min_length=1, max_length=20)]
    training: Training = Training()
    cluster: Cluster
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    heartbeat: Heartbeat = Heartbeat()
    recovery: Recovery = Recovery()
    budget: Budget | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        gpus = instance_type(self.cluster.instance_type).accelerators
        stages = list(enumerate(self.stages))
        problems = cross_field_problems(self.name, stages, gpus, self.cluster)
        if problems:
            raise ValueError("; ".join(problem.message for problem in problems))
        return self


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
    stages: list[tuple[int, Stage]],
    gpus_per_instance: int | None,
    cluster: Cluster | None,
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
        if gpus_per_instance is not None:
            problems += _batch_problem(stage, stage.instances * gpus_per_instance, where)
    return problems


def _job_name_problem(name: str, stage: Stage, where: tuple[str | int, ...]) -> list[Problem]:
    length = len(name) + len(stage.name) + JOB_NAME_ADDS
    if length <= JOB_NAME_LIMIT:
        return []
    message = (
        f"the job name {name}--{stage.name}-0001 has {length} characters and SageMaker allows "
        f"{JOB_NAME_LIMIT}; shorten the run's or the stage's name by {length - JOB_NAME_LIMIT}"
    )
    return [Problem((*where, "name"), stage.name, message)]


def _first_stage_problems(stage: Stage, where: tuple[str | int, ...]) -> list[Problem]:
    return [
        Problem((*where, key), getattr(stage, key), "is the first stage's: nothing is before it")
        for key in ("start", "optimizer")
        if getattr(stage, key) != Stage.model_fields[key].default
    ]


def _sharding_problem(
    stage: Stage, cluster: Cluster, where: tuple[str | int, ...]
) -> list[Problem]:
    version = cluster.framework_version
    if stage.sharding == "none":
        return []
    if cluster.collective == "smddp":
        reason = "FSDP2 needs a newer PyTorch than SMDDP's; write collective: nccl"
    elif version and tuple(map(int, version.split(".")[:2])) < SHARDING_FRAMEWORK:
        reason = f"FSDP2 needs PyTorch 2.6, and framework_version is {version}"
    else:
        return []
    return [Problem((*where, "sharding"), stage.sharding, reason)]


def _batch_problem(stage: Stage, gpus: int, where: tuple[str | int, ...]) -> list[Problem]:
    product = stage.per_gpu_batch * stage.accumulation * gpus
    wanted = stage.effective_batch_size
    if wanted is None or wanted == product:
        return []
    accumulation, rest = divmod(wanted, stage.per_gpu_batch * gpus)
    mend = (
        f"write accumulation: {accumulation}"
        if accumulation and not rest
        else f"no accumulation makes {wanted} of {stage.per_gpu_batch} × {gpus} GPUs"
    )
    message = (
        f"does not multiply out: {stage.per_gpu_batch} per GPU × {stage.accumulation} "
        f"accumulation × {gpus} GPUs = {product}; {mend}"
    )
    return [Problem((*where, "effective_batch_size"), wanted, message)]
