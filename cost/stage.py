"""One stage of a run as numbers, and every figure derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from sm_train.cost.accelerators import accelerator
from sm_train.cost.instances import InstanceType, instance_type
from sm_train.cost.network import GpuNetwork
from sm_train.cost.quantity import Quantity
from sm_train.cost.speed import Speed
from sm_train.cost.speed_model import (
    ActivationCheckpointing,
    Fp8Work,
    GpuFigures,
    StepShares,
    StepWork,
    TextEncoderPlacement,
    images_per_second,
    step_seconds,
)

_MOST = 10**12
"""Larger than any real count, and exact as a float."""
_LONGEST_SECONDS = 100 * 365 * 86400
"""A century: a longer run is a typing error."""

_POSITIVE = (
    "resolution samples instances per_device_batch_size gradient_accumulation_steps max_steps "
    "checkpoint_every flops_per_image parameters trained_parameters checkpoint_bytes "
    "activation_bytes_per_image".split()
)


@dataclass(frozen=True)
class StageProgram:
    """What decides the time of an image besides resolution, batch and cluster; None is unknown.

    A speed belongs to one program; for another one it is converted by the speed model.

    ``sharding`` is "none" on one GPU. Frozen encoders do not run if the job reads latents.
    """

    precision: str | None = None
    reduce_dtype: str | None = None
    compiled: bool | None = None
    sharding: str | None = None
    activation_checkpointing: bool | Literal["selective"] | None = None
    holds_latents: bool | None = None
    text_encoders: TextEncoderPlacement | None = None

    def __post_init__(self) -> None:
        if self.holds_latents:
            object.__setattr__(self, "text_encoders", None)

    def agrees_with(self, other: StageProgram) -> bool:
        """Return whether all settings are equal that are known of both."""
        return not self.differences(other)

    def differences(self, other: StageProgram) -> dict[str, Any]:
        """Return the settings that are known of both and not equal, by name, as they are here."""
        mine, theirs = self.known(), other.known()
        shared = sorted(mine.keys() & theirs.keys())
        return {name: mine[name] for name in shared if mine[name] != theirs[name]}

    def known(self) -> dict[str, Any]:
        """Return the known settings by their names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


UNKNOWN_PROGRAM = StageProgram()

PRECOMPUTED_LATENTS = "precomputed latents"
"""``input_kind`` of a start event whose job reads latents from the shards."""


def program_that_ran(start: Mapping[str, Any]) -> StageProgram:
    """Return the program of a job by its ``start`` event; nothing is known of a user's script."""
    if start.get("entry") is not None:
        return UNKNOWN_PROGRAM
    kind = start.get("input_kind")
    return StageProgram(
        precision=start.get("precision"),
        reduce_dtype=start.get("reduce_dtype"),
        compiled=start.get("compile"),
        sharding=start.get("sharding"),
        activation_checkpointing=start.get("activation_checkpointing"),
        holds_latents=None if kind is None else kind == PRECOMPUTED_LATENTS,
        text_encoders=start.get("text_encoders"),
    )


@dataclass(frozen=True)
class CostStage:
    """A stage on a cluster; None is unknown.

    ``max_steps`` counts optimizer steps. ``flops_per_image`` counts the forward and backward pass
    of the trained network for one image, and ``activation_bytes_per_image`` what autograd keeps of
    it, both without activation checkpointing; ``parameters`` counts the network's,
    ``trained_parameters`` those with gradients (None: all of them), and ``checkpoint_bytes`` the
    trained weights, optimizer state and EMA.
    ``samples`` are those of the training data, an epoch.
    ``encoder_flops_per_image`` is the forward pass of frozen encoders that run in the job; they do
    not if the shards hold the stage's latents (``holds_latents``).
    ``text_encoder_bytes`` are the weights of frozen text encoders. ``fp8`` is what computes in fp8.
    ``exchanged_parameters`` are those that sharding does not gather.
    A job is stopped after ``max_runtime_seconds``, and at most ``max_jobs`` in a row are started
    without progress.
    ``communication_units`` are the buckets or units in which gradients are reduced. ``assumed``
    names the settings of its :attr:`program` that are not known before a job runs.

    Raises:
        ValueError: a figure is not positive and finite, the training would take more than a
            century, or its speed is more than the hardware's peak; the message names it.
    """

    name: str
    resolution: int | None
    instance_type: str
    instances: int
    per_device_batch_size: int | None
    gradient_accumulation_steps: int
    max_steps: int
    samples: int | None = None
    checkpoint_every: int | None = None
    checkpoints_kept: int = 3
    flops_per_image: float | None = None
    parameters: int | None = None
    trained_parameters: int | None = None
    checkpoint_bytes: int | None = None
    keep_alive_seconds: float = 0.0
    max_runtime_seconds: float | None = None
    max_jobs: int = 1
    activation_bytes_per_image: float | None = None
    encoder_flops_per_image: float = 0.0
    text_encoders: TextEncoderPlacement = "replicated"
    text_encoder_bytes: int = 0
    fp8: Fp8Work | None = None
    exchanged_parameters: int = 0
    holds_latents: bool = False
    precision: str = "bf16"
    reduce_dtype: str = "fp32"
    sharding: str = "none"
    communication_units: int | None = None
    activation_checkpointing: ActivationCheckpointing = False
    compiled: bool = False
    assumed: frozenset[str] = frozenset()
    speed: Speed | None = None

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            value = getattr(self, field)
            most = 1e18 if field.endswith("_per_image") else _MOST
            if value is not None and not 0 < value <= most:
                raise ValueError(f"{field}: {value} must be a positive number, at most {most:.0e}")
        if self.speed is None:
            return
        seconds = self.max_steps / self.speed.steps_per_second
        if seconds > _LONGEST_SECONDS:
            raise ValueError(
                f"steps_per_second: at {self.speed.steps_per_second} the "
                f"{self.max_steps} iterations of {self.name} take over 100 years; give optimizer "
                "steps a second"
            )
        self._within_the_peak(self.speed)

    def _within_the_peak(self, stated: Speed) -> None:
        use, peak = self.flops_utilization, self.peak_tflops
        if use is None or not peak or not stated.on_this_hardware:
            return
        use *= (self.instance.bf16_tflops or peak) / peak
        if use <= 1:
            return
        speed = stated.steps_per_second
        per_image = (self.flops_per_image or 0) / 1e12
        raise ValueError(
            f"steps_per_second: {speed:g} for {self.name} is {use:.0%} of the hardware's "
            f"peak: {speed:g} it/s × {self.effective_batch_size} images × {per_image:.3g} TFLOP = "
            f"{use * self.world_size * peak:,.0f} TFLOP/s, and {self.world_size} "
            f"{self.instance.accelerator} give at most {self.world_size * peak:,.0f}; "
            "measure it again, in optimizer steps per second"
        )

    def at(self, speed: Speed | None) -> CostStage:
        """Return the same stage at another speed."""
        return replace(self, speed=speed)

    @property
    def peak_tflops(self) -> float | None:
        """The most that a GPU computes in the stage's precision, in TFLOP/s; None if unknown."""
        if self.precision == "fp8":
            return accelerator(self.instance.accelerator).fp8_tflops
        return self.instance.bf16_tflops

    @cached_property
    def instance(self) -> InstanceType:
        return instance_type(self.instance_type)

    @cached_property
    def steps(self) -> Quantity:
        """Optimizer steps as a term of the estimate."""
        return Quantity(self.max_steps, "steps", "{:,}")

    @cached_property
    def _gpus(self) -> Quantity:
        instances = Quantity(self.instances, "instances")
        per_instance = Quantity(self.instance.accelerators, "GPUs per instance")
        return (instances * per_instance).named("GPUs", "{}", source=self.instance_type)

    @cached_property
    def _batch(self) -> Quantity:
        per_gpu = Quantity(self.per_device_batch_size, "per_device_batch_size")
        passes = Quantity(self.gradient_accumulation_steps, "gradient_accumulation_steps")
        return (per_gpu * passes * self._gpus).named("batch", "{:,}", " images", "run file")

    @property
    def world_size(self) -> int:
        """GPUs of the stage: one rank each."""
        gpus: int = self._gpus.value
        return gpus

    @property
    def program(self) -> StageProgram:
        """The program of the stage, as far as it is known."""
        settings = {field.name: getattr(self, field.name) for field in fields(StageProgram)}
        if self.world_size == 1:
            settings["sharding"] = "none"
        return StageProgram(**settings | dict.fromkeys(self.assumed))

    def running(self, program: StageProgram) -> CostStage:
        """Return the same stage with the known settings of another program."""
        known = program.known()
        return replace(self, assumed=self.assumed - known.keys(), **known)

    @property
    def effective_batch_size(self) -> int | None:
        """Images per optimizer step over all GPUs."""
        batch: int | None = self._batch.value
        return batch

    @cached_property
    def network(self) -> GpuNetwork:
        """The network of the stage's cluster."""
        return self.instance.network(self.instances)

    @cached_property
    def gpu(self) -> GpuFigures | None:
        """The GPU's figures in the stage's precision; None if one is unknown."""
        return self.instance.gpu(self.precision)

    @property
    def work(self) -> StepWork | None:
        """The work of one GPU in a step, for the speed model; None if a figure is unknown."""
        if (
            self.flops_per_image is None
            or self.activation_bytes_per_image is None
            or self.parameters is None
            or self.per_device_batch_size is None
        ):
            return None
        return StepWork(
            images=self.per_device_batch_size,
            passes=self.gradient_accumulation_steps,
            flops=self.flops_per_image,
            activation_bytes=self.activation_bytes_per_image,
            parameters=self.parameters,
            trained_parameters=self.trained_parameters or self.parameters,
            precision=self.precision,
            reduce_dtype=self.reduce_dtype,
            sharding=self.sharding,
            communication_units=self.communication_units,
            activation_checkpointing=self.activation_checkpointing,
            compiled=self.compiled,
            encoder_flops=self.encoder_flops_per_image,
            fp8=self.fp8,
            exchanged_parameters=self.exchanged_parameters,
            text_encoders=self.text_encoders,
            text_encoder_bytes=0 if self.holds_latents else self.text_encoder_bytes,
        )

    @property
    def predicted_images_per_second(self) -> float | None:
        """Throughput of the whole cluster by the speed model; None if a figure is unknown."""
        if self.work is None or self.gpu is None:
            return None
        return images_per_second(self.work, self.gpu, self.network)

    @property
    def step_shares(self) -> StepShares | None:
        """What limits a step by the speed model; None if a figure is unknown."""
        if self.work is None or self.gpu is None:
            return None
        return step_seconds(self.work, self.gpu, self.network).shares

    @property
    def images(self) -> int | None:
        """Images that the stage trains on, repeats included."""
        batch = self.effective_batch_size
        return None if batch is None else self.max_steps * batch

    @property
    def epochs(self) -> float | None:
        """How often the stage trains on each sample; None if a figure is unknown."""
        return None if self.images is None or not self.samples else self.images / self.samples

    @cached_property
    def terms(self) -> dict[str, Quantity]:
        """The figures that follow from the stage alone, by name, in the order of derivation.

        MFU: model FLOP/s ÷ the GPUs' peak (PaLM, Chowdhery et al. 2022, appendix B).
        """
        speed, peak = self.speed, self.instance.bf16_tflops
        rate = Quantity(
            speed and speed.steps_per_second,
            "it/s",
            "{:.6g}",
            source=speed.why if speed else "unknown",
            parts=(f"{speed.basis}; P10 {speed.low:.4g}, P90 {speed.high:.4g}",) if speed else (),
        )
        images = (rate * self._batch).named("images/s", "{:,.1f}")
        flops = None if self.flops_per_image is None else self.flops_per_image / 1e12
        per_image = Quantity(flops, "FLOPs per image", "{:.4g} TFLOP")
        most = self._gpus * Quantity(peak, "peak", "{:g} TFLOP/s")
        use = (images * per_image / most).named(
            "MFU", "{:.1%}", source="counted from the preset; dense bf16 peak"
        )
        training = (self.steps / rate).named("training", "{:,.1f}", " s", "run file")
        return {term.name: term for term in (self._gpus, self._batch, rate, images, use, training)}

    @property
    def images_per_second(self) -> float | None:
        """Throughput of the whole cluster."""
        return self.terms["images/s"].number

    @property
    def flops_utilization(self) -> float | None:
        """MFU; None if the speed, the peak or the FLOPs of an image are unknown."""
        return self.terms["MFU"].number
