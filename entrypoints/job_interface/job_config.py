"""The configuration of a training job: one stage of a run, as plain dataclasses.

The pydantic sections of ``estimators/config`` validate the run file on the laptop and produce these
classes; the bundle holds their :func:`dataclasses.asdict`, by stage name, as :data:`JOB_FILE`.
Sizes are in pixels or images, times in seconds.

``entry_args``, the arguments of a run's own training script, may have placeholders:
``{checkpoints}`` is replaced by the folder of the job's checkpoints, ``{channel.train}`` by that of
an input channel, and so on: the same run file works in a job and on a laptop. ``{{name}}`` stands
for ``{name}``; braces around anything but a name, as in JSON, are left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from sm_train.cost.speed_model import BF16_PRECISIONS, ActivationCheckpointing

RESUME = "resume"
"""The newest complete checkpoint; without one, the argument and its option are left out."""

PLACEHOLDERS = (
    "stage",
    "checkpoints",
    "model",
    "output",
    RESUME,
    "resolution",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "learning_rate",
    "seed",
)
"""Names that every script can use, in addition to ``channel.NAME``."""

CHANNEL = "channel."

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")


def placeholders(argument: str) -> list[str]:
    """Return the names of the placeholders in ``argument``, in order."""
    return [match[2] for match in _PLACEHOLDER.finditer(argument) if match[2]]


def is_known(name: str) -> bool:
    """Return whether a placeholder has a meaning."""
    return name in PLACEHOLDERS or (name.startswith(CHANNEL) and len(name) > len(CHANNEL))


def resolve(arguments: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replace the placeholders of ``arguments`` by ``values``.

    Without a value for ``resume``, an argument that contains it is left out. So is the option
    before it (``--resume_from_checkpoint {resume}``).
    """
    resolved: list[str] = []
    previous = ""
    for argument in arguments:
        if RESUME in placeholders(argument) and RESUME not in values:
            if resolved and _is_option(previous) and not argument.startswith("-"):
                resolved.pop()
        else:
            resolved.append(_PLACEHOLDER.sub(lambda match: _value(match, values), argument))
        previous = argument
    return resolved


def _is_option(argument: str) -> bool:
    return argument.startswith("-") and "=" not in argument and not placeholders(argument)


def _value(match: re.Match[str], values: Mapping[str, str]) -> str:
    return f"{{{match[1]}}}" if match[1] else values[match[2]]


T = TypeVar("T")

JOB_FILE = "job.json"
"""Name of the file in the bundle that holds the configuration of every stage."""

RUN_FILE = "run.json"
"""Name of the file in the bundle that holds the whole run file, for those who resume the run or
look at it; the training does not read it."""

BUNDLE_VARIABLE, COMMIT_VARIABLE = "SM_TRAIN_BUNDLE", "SM_TRAIN_COMMIT"
"""Environment variables of a job with the SHA-256 of its source bundle, which cannot contain its
own digest, and with the commit of the run file's repository."""

# The run file's sections annotate their fields with the same types.
Crop = Literal["center", "random"]
DecodeMode = Literal["exact", "fast"]
IccProfile = Literal["ignore", "srgb"]
Hdr = Literal["reject", "keep"]
ExtraKind = Literal["image", "mask", "map", "array"]
ReaderName = Literal["indexed", "webdataset"]
PredictionType = Literal["v_prediction", "epsilon", "flow"]
Sharding = Literal["none", "shard_grad_op", "full_shard", "hybrid_shard"]
TextEncoders = Literal["auto", "replicated", "sharded", "cpu"]
Modulation = Literal["gathered", "exchanged"]
InitFrom = Literal["ema", "raw"]
OptimizerState = Literal["reset", "keep"]
Precision = Literal["bf16", "fp8", "tf32", "fp32"]
ReduceDtype = Literal["fp32", "bf16"]
VaePrecision = Literal["auto", "fp32", "bf16"]
Compile = Literal["auto", True, False]
CollectiveBackend = Literal["auto", "nccl", "smddp"]
StallAction = Literal["kill", "warn"]
AlertLevel = Literal["info", "warning", "critical"]
DoctorMode = Literal["auto", "fail", "warn", "off"]
TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class JobConfigError(ValueError):
    """The job configuration cannot be used; the message is one line."""


@dataclass(frozen=True)
class ColorPolicy:
    """How stored colors become the RGB that training sees.

    ``icc_profile`` "srgb" converts colors with a profile to sRGB, "ignore" takes levels as stored.
    ``hdr`` "reject" leaves out images in PQ and HLG, "keep" takes their levels as stored.
    """

    icc_profile: IccProfile = "srgb"
    hdr: Hdr = "reject"

    def __str__(self) -> str:
        """The policy as the run file states it."""
        return f"icc_profile: {self.icc_profile}, hdr: {self.hdr}"


DEFAULT_COLOR = ColorPolicy()

UNRECORDED_COLOR = ColorPolicy("ignore", "keep")
"""The policy of a record that does not name one."""


@dataclass(frozen=True)
class CaptionSource:
    """One of several captions of a sample: the file with the extension ``member``, or its JSON
    ``field`` (captions.py).
    """

    member: str
    field: str | None
    weight: float


@dataclass(frozen=True)
class DataSource:
    """A channel of shards with its weight in a mixture.

    ``pipe`` is the command that prints one of its shards, and ``where`` the condition of the
    samples to read, as in :class:`DataConfig`.
    """

    channel: str
    weight: float
    pipe: str | None = None
    where: str | None = None


@dataclass(frozen=True)
class ExtraConfig:
    """A further file of each sample, with the extension ``member``, as a tensor.

    ``shape`` is that of an array, without the batch.
    """

    name: str
    member: str
    kind: ExtraKind
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DataConfig:
    """How samples are read: ``image_key`` and ``caption_key`` are file extensions in a shard.

    ``caption`` are the sources of a sample's captions; empty for ``caption_key``.
    ``transform`` is the ``module:function`` that changes a sample's files, None if there is none.
    With ``synthetic_samples`` each node generates so many samples instead of reading a channel.

    ``sources`` are the channels that the stage mixes; none reads the channel ``train`` alone.

    ``extras`` are further files of a sample, for the user's own loop. ``where`` is the SQL
    condition, on columns of the index, of the samples to read; None reads all.

    With the ``webdataset`` reader, ``epoch_samples`` are an epoch, ``shuffle_buffer`` the samples
    that a GPU shuffles, and ``pipe`` the command that prints a shard: ``{path}`` is its path,
    ``{name}`` its name below the channel; None opens the path.
    """

    image_key: str
    caption_key: str
    crop: Crop
    decode: DecodeMode
    icc_profile: IccProfile
    hdr: Hdr
    aspect_buckets: bool
    max_bad_fraction: float
    caption: tuple[CaptionSource, ...] = ()
    sources: tuple[DataSource, ...] = ()
    extras: tuple[ExtraConfig, ...] = ()
    flip: bool = False
    synthetic_samples: int = 0
    transform: str | None = None
    reader: ReaderName = "indexed"
    epoch_samples: int | None = None
    shuffle_buffer: int = 0
    pipe: str | None = None
    where: str | None = None

    @property
    def color(self) -> ColorPolicy:
        """How stored colors become the RGB that training sees."""
        return ColorPolicy(self.icc_profile, self.hdr)

    @property
    def conditions(self) -> list[str | None]:
        """The condition of the samples to read of each source."""
        return [source.where for source in self.sources] or [self.where]


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter (LoRA, arXiv 2106.09685); all other weights are frozen.

    A layer's output grows by ``alpha / rank`` · B A x; A has ``rank`` rows. ``targets`` are names
    of layers within their blocks, such as ``to_q``; None takes the attention's projections.
    ``dropout`` applies to x.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None
    dropout: float


@dataclass(frozen=True)
class ModelConfig:
    """The network; None takes the pretrained model's value, or else the preset's.

    ``preset`` may be None for a script of the user's own: then the model is unknown.
    ``preset_content`` is the JSON of a preset that does not ship with sm-train. ``lora`` is None
    if all weights are trained. ``accept_components`` is whether a job may continue with other
    frozen components than those that its weights were trained with.
    """

    preset: str | None
    prediction_type: PredictionType | None
    zero_terminal_snr: bool | None
    min_snr_gamma: float | None
    timestep_shift: float | None
    preset_content: str | None = None
    lora: LoraConfig | None = None
    accept_components: bool = False


@dataclass(frozen=True)
class StageConfig:
    """One resolution and batch size: what one training job runs.

    ``prediction_type`` and ``objective`` are what the run file states for this stage; None takes
    those of all stages. ``sharding_reason`` is the key that states the strategy, or why it was
    chosen.
    """

    name: str
    resolution: int
    per_device_batch_size: int
    gradient_accumulation_steps: int
    max_steps: int
    learning_rate: float
    sharding: Sharding
    activation_checkpointing: ActivationCheckpointing
    init_from: InitFrom
    optimizer_state: OptimizerState
    prediction_type: PredictionType | None = None
    objective: str | None = None
    sharding_reason: str = "stages[].sharding"


@dataclass(frozen=True)
class OptimizerConfig:
    """A shipped optimizer or ``module:function``; None leaves its default.

    ``options`` are further arguments of the user's function.
    """

    name: str
    betas: tuple[float, float] | None
    eps: float | None
    weight_decay: float | None
    momentum: float | None
    options: dict[str, Any]


@dataclass(frozen=True)
class LrScheduleConfig:
    """A shipped schedule or ``module:function``, which gets ``options``.

    The rate ends at ``final_factor`` of the stage's; ``decay_fraction`` of the stage's steps are
    the decay of ``wsd``; None leaves 0 and 0.1.
    """

    name: str
    final_factor: float | None
    decay_fraction: float | None
    options: dict[str, Any]


@dataclass(frozen=True)
class TrainingConfig:
    """The optimization settings that all stages share.

    ``objective`` is the ``module:function`` of a custom loss, None for the preset's.
    """

    precision: Precision
    reduce_dtype: ReduceDtype
    vae_precision: VaePrecision
    compile: Compile
    seed: int
    optimizer: OptimizerConfig
    lr_schedule: LrScheduleConfig
    objective: str | None
    warmup_steps: int
    max_grad_norm: float
    caption_dropout: float
    ema_decay: float
    ema_start: int
    max_nonfinite_steps: int
    max_rollbacks: int
    decode_workers: int
    log_every: int
    offset_noise: float = 0.0
    max_nonfinite_share: float = 0.5
    text_encoders: TextEncoders = "auto"
    modulation: Modulation = "exchanged"

    @property
    def bf16(self) -> bool:
        """Whether passes run under bf16 autocast."""
        return self.precision in BF16_PRECISIONS


@dataclass(frozen=True)
class EvaluationConfig:
    """Every ``every_steps`` optimizer steps, one image is sampled for each of ``prompts``."""

    every_steps: int
    prompts: tuple[str, ...]
    num_inference_steps: int
    guidance_scale: float


@dataclass(frozen=True)
class CheckpointConfig:
    """How often checkpoints are written and how many complete ones are kept.

    With ``save`` false the job writes neither checkpoints nor a final model.
    """

    every_steps: int
    keep_last: int
    save: bool = True


@dataclass(frozen=True)
class HeartbeatConfig:
    """``min_timeout`` and ``max_timeout`` bound the learned stall timeouts."""

    interval: float
    min_timeout: float
    max_timeout: float
    on_stall: StallAction


@dataclass(frozen=True)
class AlertsConfig:
    """Names of secrets, never their values; ``level`` is the lowest severity that is sent."""

    slack_secret: str | None
    webhook_secret: str | None
    sns_topic: str | None
    level: AlertLevel


def tracker_requirements(name: TrackerName) -> str:
    """Return the name of the file of the bundle with the packages of a tracker."""
    return f"requirements-{name}.txt"


@dataclass(frozen=True)
class TrackerConfig:
    """One experiment tracker; None leaves its default.

    ``secret`` is the name of the secret with its key, never the key. ``project`` is MLflow's
    experiment. ``uri`` is the server; MLflow without one, and W&B without a secret, write files.
    """

    name: TrackerName
    project: str | None = None
    entity: str | None = None
    uri: str | None = None
    secret: str | None = None


@dataclass(frozen=True)
class DoctorConfig:
    """The cluster check before training; it takes at most ``timeout`` seconds."""

    mode: DoctorMode
    timeout: int
    max_slowdown: float


@dataclass(frozen=True)
class ExpectedPerformance:
    """The stage's instance type, and the speed and price that were estimated; None is unknown.

    ``model_plan`` is the JSON of the plan of a preset that does not ship with sm-train.
    """

    instance_type: str
    steps_per_second: float | None
    speed_source: str | None
    usd_per_instance_hour: float | None
    model_plan: str | None = None


@dataclass(frozen=True)
class JobConfig:
    """Everything that the job of one stage reads.

    ``run`` is the run's name, ``license`` that of its models (None if it is not stated). ``entry``
    is the user's own training script in the bundle, None for the built-in training; ``entry_args``
    are its arguments with their placeholders.
    """

    run: str
    license: str | None
    entry: str | None
    entry_args: tuple[str, ...]
    backend: CollectiveBackend
    data: DataConfig
    model: ModelConfig
    stage: StageConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    heartbeat: HeartbeatConfig
    alerts: AlertsConfig
    doctor: DoctorConfig
    expected: ExpectedPerformance
    trackers: tuple[TrackerConfig, ...] = ()


def read_job_config(path: Path, stage: str) -> JobConfig:
    """Read the configuration of ``stage`` from a bundle's :data:`JOB_FILE`.

    Raises:
        JobConfigError: the file or the stage does not exist, or the stage lacks a field.
    """
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobConfigError(f"{path}: no job configuration; the bundle contains it") from None
    except json.JSONDecodeError as error:
        raise JobConfigError(f"{path}: not JSON: {error}") from None
    if stage not in stages:
        raise JobConfigError(f"--stage: {stage!r} is not in {path}; it has {', '.join(stages)}")
    try:
        return _parse(JobConfig, stages[stage])
    except KeyError as error:
        raise JobConfigError(f"{path}: {error.args[0]} is missing") from None


def _parse(kind: type[T], document: dict[str, Any]) -> T:
    """Build the dataclass ``kind`` and those inside it from parsed JSON.

    Other keys are ignored: ``submit --clone`` ships an earlier bundle's code with a configuration
    that a newer version wrote.
    """
    values: dict[str, Any] = {}
    for name, field_type in get_type_hints(kind).items():
        value = document[name]
        # Either a dataclass, or one of a union with None.
        options = (field_type, *get_args(field_type))
        classes = [
            option for option in options if isinstance(option, type) and is_dataclass(option)
        ]
        if classes and isinstance(value, dict):
            value = _parse(classes[0], value)
        elif isinstance(value, list):
            item = next(iter(get_args(field_type)), None)
            if isinstance(item, type) and is_dataclass(item):
                value = [_parse(item, member) for member in value]
            value = tuple(value)
        values[name] = value
    return kind(**values)


FSDP2_PYTORCH = (2, 6)
"""The first PyTorch with FSDP2 (torch.distributed.fsdp.fully_shard)."""

FP8_PYTORCH = (2, 11)
"""The oldest PyTorch for ``precision: fp8``: torchao 0.18 needs it (its ``__init__.py``)."""

IGNORED_PARAMETERS_PYTORCH = (2, 7)
"""The first PyTorch whose fully_shard takes ``ignored_params``."""

COMPILED_SINCE = (2, 11)
"""The PyTorch with which compiled training was measured on a GPU: 1.1 to 1.4 × as fast on an H200
(benchmarks/gpu.py, 2026-11)."""


@dataclass(frozen=True)
class CompileChoice:
    """Whether layers are compiled, and why."""

    compiled: bool
    reason: str


def choose_compile(
    setting: Compile, *, gpu: bool, pytorch: str | None, shapes_vary: bool, adapter: bool
) -> CompileChoice:
    """Return the choice for ``training.compile``.

    ``auto`` compiles what was measured: a whole network on a GPU, in batches of one shape.
    ``pytorch`` is the version, such as 2.13.0+cu130; None is unknown.
    """
    if setting != "auto":
        return CompileChoice(bool(setting), "training.compile")
    reasons = {
        "no GPU": not gpu,
        "the image's PyTorch is unknown": pytorch is None,
        "not measured with this PyTorch": pytorch is not None
        and major_minor(pytorch) < COMPILED_SINCE,
        "data.aspect_buckets: each shape would be compiled": shapes_vary,
        "model.lora: not measured with adapters": adapter,
    }
    against = next((reason for reason, applies in reasons.items() if applies), None)
    return CompileChoice(against is None, f"auto: {against or 'a GPU, and batches of one shape'}")


def choose_modulation(
    setting: Modulation, sharding: str, pytorch: str | None, lora: LoraConfig | None
) -> Modulation:
    """Return how modulation layers compute, on the laptop and in the job.

    They exchange vectors where weights are sharded, by a PyTorch whose FSDP2 can leave them out.
    Those below an adapter are gathered: they are frozen.
    """
    known = pytorch is not None and major_minor(pytorch) >= IGNORED_PARAMETERS_PYTORCH
    possible = sharding != "none" and known and lora is None
    return setting if possible else "gathered"


def major_minor(version: str) -> tuple[int, int]:
    """Return PyTorch's version ``2.10.0`` or ``2.10.0+cu128`` as (2, 10)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
