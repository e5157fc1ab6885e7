"""What a job is told: the run document in the bundle, one stage of it, as plain data.

The laptop validates the run file and writes the document with every default in it; here it is
only read. Sizes are pixels or images, times are seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class JobConfigError(ValueError):
    """The run document cannot be used; the message is one line."""


@dataclass(frozen=True)
class DataConfig:
    image_key: str
    caption_key: str
    crop: Literal["center", "random"]
    interpolation: Literal["bicubic", "bilinear"]
    aspect_buckets: bool
    max_bad_fraction: float


@dataclass(frozen=True)
class ModelConfig:
    """``prediction`` is None for the preset's own."""

    preset: str
    prediction_type: str | None
    zero_terminal_snr: bool
    min_snr_gamma: float | None
    timestep_shift: float | None


@dataclass(frozen=True)
class StageConfig:
    name: str
    resolution: int
    per_device_batch_size: int
    gradient_accumulation_steps: int
    max_steps: int
    learning_rate: float
    sharding: str
    activation_checkpointing: bool
    init_from: str
    optimizer_state: str


@dataclass(frozen=True)
class TrainingConfig:
    precision: str
    compile: bool
    seed: int
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    caption_dropout: float
    ema_decay: float
    ema_start: int
    max_nonfinite_steps: int
    max_rollbacks: int
    decode_workers: int
    log_every: int


@dataclass(frozen=True)
class EvaluationConfig:
    """Every so many steps; ``prompts`` are drawn in ``steps`` with ``guidance``."""

    every_steps: int
    prompts: tuple[str, ...]
    num_inference_steps: int
    guidance_scale: float


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int
    keep_last: int


@dataclass(frozen=True)
class HeartbeatConfig:
    """``min`` and ``max`` bound the learned limits; ``on_stall`` is end or report."""

    interval: float
    min_timeout: float
    max_timeout: float
    on_stall: str
    metrics_interval: float


@dataclass(frozen=True)
class AlertsConfig:
    """Names of secrets, never what they hold; ``level`` is the least that is sent."""

    slack_secret: str | None
    webhook_secret: str | None
    sns_topic: str | None
    level: str


@dataclass(frozen=True)
class DoctorConfig:
    """The examination of the cluster before training, in ``limit`` seconds."""

    mode: Literal["auto", "fail", "warn", "off"]
    timeout: int
    max_slowdown: float


@dataclass(frozen=True)
class ExpectedPerformance:
    """What the laptop knows of the stage's machines and of its speed; None is unknown.

    ``nvlink_gbytes`` is GB/s of one GPU in one direction.
    """

    instance_type: str
    accelerators: int
    efa: bool
    network_gbps: float | None
    nvlink_gbytes: float | None
    bf16_tflops: float | None
    steps_per_second: float | None
    speed_source: str | None
    usd_per_instance_hour: float | None


@dataclass(frozen=True)
class JobConfig:
    """One stage of a run; ``collective`` is auto, nccl or smddp."""

    run: str
    backend: str
    data: DataConfig
    model: ModelConfig
    stage: StageConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    heartbeat: HeartbeatConfig
    alerts: AlertsConfig
    doctor: DoctorConfig
    expected: ExpectedPerformance | None = None


def read_job_config(path: Path, stage: str) -> JobConfig:
    """Read the run document and choose the stage called ``stage``.

    Raises:
        JobConfigError: no such document or stage, or something is missing in it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobConfigError(f"{path}: no run document; it comes with the bundle") from None
    except json.JSONDecodeError as error:
        raise JobConfigError(f"{path}: not JSON: {error}") from None
    try:
        stages = {one["name"]: one for one in document["stages"]}
        if stage not in stages:
            raise JobConfigError(f"--stage: {stage!r} is not in {path}; it has {', '.join(stages)}")
        expected = document.get("expected", {}).get(stage)
        return JobConfig(
            run=document["name"],
            backend=document["cluster"]["backend"],
            data=_section(DataConfig, document["data"]),
            model=_section(ModelConfig, document["model"]),
            stage=_section(StageConfig, stages[stage]),
            training=_section(TrainingConfig, document["training"]),
            evaluation=_section(EvaluationConfig, document["evaluation"]),
            checkpoint=_section(CheckpointConfig, document["checkpoint"]),
            heartbeat=_section(HeartbeatConfig, document["heartbeat"]),
            alerts=_section(AlertsConfig, document["alerts"]),
            doctor=_section(DoctorConfig, document["doctor"]),
            expected=_section(ExpectedPerformance, expected) if expected else None,
        )
    except KeyError as error:
        raise JobConfigError(f"{path}: {error.args[0]} is missing") from None


def _section(kind: type[T], document: dict[str, Any]) -> T:
    """The keys that ``kind`` has; the document may hold more."""
    return kind(**{field.name: document[field.name] for field in fields(kind)})  # type: ignore[arg-type]
