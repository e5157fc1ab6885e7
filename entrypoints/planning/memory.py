"""Plan what a preset needs of a GPU: FLOPs per image, and bytes of states and activations.

Reads figures that :mod:`sm_train.entrypoints.planning.measure` measured with PyTorch and wrote to
``plans/PRESET.json``, so that a laptop plans without PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from sm_train.cost.instances import USABLE_MEMORY
from sm_train.cost.speed_model import (
    BF16_PRECISIONS,
    ActivationCheckpointing,
    Fp8Work,
    TextEncoderPlacement,
)
from sm_train.entrypoints.job_interface.job_config import (
    FSDP2_PYTORCH,
    JobConfig,
    LoraConfig,
    ModelConfig,
    Modulation,
    TextEncoders,
    choose_modulation,
    major_minor,
)
from sm_train.entrypoints.job_interface.lora_layers import (
    DEFAULT_TARGETS,
    adapter_shapes,
    targets_of,
)
from sm_train.entrypoints.job_interface.optimizer_rules import OPTIMIZERS, state_bytes
from sm_train.entrypoints.models.components import encodes_in_fp32, read_preset

_FP32, _BF16 = 4, 2
"""Bytes of a number."""

_ENCODED_PIXELS = 2**21

_BF16_FLOPS = {"bf16": 1, "tf32": 2, "fp32": 16}
"""Time of a FLOP in bf16 FLOPs: the peaks of an A100 are 312, 156 and 19.5 TFLOP/s (data sheet)."""

_PLANS = Path(__file__).parent / "plans"
MEASURE_MODULE = "sm_train.entrypoints.planning.measure"
UNMEASURED = 3
"""Its exit code for a network that can be built, and whose figures cannot be measured."""


@dataclass(frozen=True)
class _AdapterActivations:
    """What autograd keeps of a pass with an adapter, as a factor of what it keeps without one.

    ``per_rank`` is added once for a rank as large as the mean number of a layer's inputs.
    """

    plain: float
    with_dropout: float
    per_rank: float


_ADAPTER_ACTIVATIONS = {
    "UNet2DConditionModel": (
        _AdapterActivations(0.90, 1.20, 0.25),
        _AdapterActivations(1.20, 1.90, 1.5),
    ),
    "PixArtTransformer2DModel": (
        _AdapterActivations(0.73, 1.12, 0.25),
        _AdapterActivations(1.10, 1.88, 0.55),
    ),
    "SD3Transformer2DModel": (
        _AdapterActivations(0.62, 0.90, 0.25),
        _AdapterActivations(1.02, 1.70, 0.5),
    ),
}
"""Network class → for targets among the default ones, and for any others: upper bounds of what
:func:`~sm_train.entrypoints.planning.measure.measure_pass` measures with PEFT 0.21. Frozen layers
keep no input; PEFT keeps a copy of each extended layer's, and with dropout a mask and another copy.
"""


_MIN_CHECKPOINTED = 0.9
"""Lower limit of the factor with activation checkpointing: a block's arguments are kept as without
an adapter."""


class UnplannedModelError(ValueError):
    """A preset has no plan, or has changed since it was measured."""


@dataclass(frozen=True)
class StageLayout:
    """What the memory of a stage depends on apart from its model.

    ``per_node`` of the ``world_size`` processes share a node, and each trains on ``images`` at
    once.
    """

    ema: bool
    optimizer: str
    strategy: str
    world_size: int
    per_node: int
    images: int
    checkpointing: ActivationCheckpointing


@dataclass(frozen=True)
class MemoryFit:
    """Bytes on one GPU: ``states`` for any batch, ``activations`` for ``images`` per pass."""

    states: int
    activations: int
    images: int
    text_encoders: TextEncoderPlacement

    @property
    def bytes(self) -> int:
        return self.states + self.activations

    @property
    def gib(self) -> float:
        return self.bytes / 2**30


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one GPU between and during steps; ``gathered`` are copies of sharded weights and of
    their gradients."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    gathered: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.ema + self.gathered


@dataclass(frozen=True)
class ModelPlan:
    """A preset's network at one resolution and in one precision.

    ``trained_parameters`` of the ``parameters`` have gradients: all of them, or an adapter's.
    ``kept_bytes`` and ``checkpointed_bytes`` are the activations of one image, without and with
    activation checkpointing. ``fsdp_block_parameters`` are the parameters of each block that FSDP2
    gathers, in order; it leaves out ``exchanged_parameters``, of modulation layers. ``ddp_buckets``
    are the buckets in which DDP reduces the gradients.
    ``vae_bytes`` are the weights of the autoencoder, ``text_bytes`` those of frozen text encoders,
    of which FSDP2 gathers ``text_unit_bytes`` at once. The autoencoder takes ``encoding_bytes`` for
    each image of ``encoded_at_once``. ``encoder_flops_per_image`` is the forward pass of all frozen
    encoders on an image and its caption; those of an autoencoder in another precision count by the
    time they take. ``fp8`` is the part of the network that can compute in fp8.
    """

    parameters: int
    trained_parameters: int
    optimizer_bytes: Mapping[str, int]
    training_flops_per_image: int
    precision: str
    kept_bytes: int
    checkpointed_bytes: int
    fsdp_block_parameters: tuple[int, ...]
    exchanged_parameters: int
    ddp_buckets: int
    vae_bytes: int
    text_bytes: int
    text_unit_bytes: int
    encoding_bytes: int
    encoded_at_once: int
    encoder_flops_per_image: int
    fp8: Fp8Work

    def activation_bytes(
        self,
        images: int,
        *,
        checkpointing: ActivationCheckpointing = False,
        text_encoders: TextEncoderPlacement = "replicated",
    ) -> int:
        """Return the activation memory of a forward and backward pass on ``images`` images.

        The larger of what autograd keeps and of what encoding takes before it, text encoders on the
        CPU included. Precomputed latents need no encoding. ``selective`` checkpoints every second
        layer: half of the difference.
        """
        per_image = {
            False: self.kept_bytes,
            "selective": (self.kept_bytes + self.checkpointed_bytes) // 2,
            True: self.checkpointed_bytes,
        }[checkpointing]
        copied = self.text_bytes if text_encoders == "cpu" else 0
        encoding = min(images, self.encoded_at_once) * self.encoding_bytes
        return max(images * per_image, encoding, copied)

    def checkpoint_bytes(self, *, ema: bool, optimizer: str) -> int:
        """Return the size of a checkpoint: trained weights, optimizer state and EMA."""
        return _FP32 * self.trained_parameters * (1 + ema) + self._optimizer_bytes(optimizer)

    def _optimizer_bytes(self, optimizer: str) -> int:
        """Return the bytes of an optimizer's state; a user's function counts as AdamW."""
        return self.optimizer_bytes.get(optimizer, self.optimizer_bytes["adamw"])

    def state_bytes(
        self,
        *,
        ema: bool,
        optimizer: str = "adamw",
        strategy: str = "none",
        world_size: int = 1,
        per_node: int = 1,
    ) -> StateBytes:
        """Return the states of one GPU among ``world_size``, ``per_node`` on each node.

        Weights, gradients and, with ``ema``, the average are fp32; FSDP2 shards them and the
        optimizer's state. Frozen weights have none of these; unsharded, they are stored in the
        precision of the arithmetic. FSDP2 computes with gathered weights: all of them
        (``shard_grad_op``), or those of a block and the next one, which it prefetches. A block's
        gradients are unsharded in fp32 until they are reduced. Under DDP autocast keeps a bf16 copy
        of the trained weights.
        """
        count, bf16 = self.parameters, self.precision == "bf16"
        trained = self.trained_parameters
        ranks = 1 if strategy == "none" else world_size
        if strategy == "hybrid_shard":
            ranks = min(per_node, world_size)
        # torch.chunk rounds up for each parameter, by less than one row.
        sharded = -(-trained // ranks)
        width = _BF16 if bf16 else _FP32
        if strategy == "none":
            frozen = width * (count - trained)
            gathered = _BF16 * trained * bf16
        else:
            frozen = _FP32 * -(-(count - trained) // ranks)
            blocks = self.fsdp_block_parameters
            two_blocks = max(map(sum, pairwise(blocks)), default=sum(blocks))
            gathered_once = count - self.exchanged_parameters
            weights = gathered_once if strategy == "shard_grad_op" else two_blocks
            trained_in_block = max(blocks) * trained // count
            gathered = width * weights + (width + _FP32) * trained_in_block
        return StateBytes(
            weights=_FP32 * sharded + frozen,
            gradients=_FP32 * sharded,
            optimizer=-(-self._optimizer_bytes(optimizer) * sharded // trained),
            ema=_FP32 * sharded * ema,
            gathered=gathered,
        )

    def communication_units(self, strategy: str) -> int:
        """Return in how many collectives gradients are reduced: DDP's buckets, or FSDP2's units.

        FSDP2's units are the blocks, and the weights outside of them.
        """
        return self.ddp_buckets if strategy == "none" else len(self.fsdp_block_parameters) + 1

    def frozen_bytes(self, text_encoders: TextEncoderPlacement, per_node: int) -> int:
        """Return the weights of frozen components that one GPU holds."""
        text = {
            "replicated": self.text_bytes,
            "sharded": -(-self.text_bytes // per_node) + self.text_unit_bytes,
            "cpu": 0,
        }[text_encoders]
        return self.vae_bytes + text

    def fixed_bytes(
        self,
        *,
        ema: bool,
        optimizer: str,
        strategy: str,
        world_size: int,
        per_node: int,
        text_encoders: TextEncoderPlacement = "replicated",
    ) -> int:
        """Return what one GPU holds before the first image: states and frozen components."""
        states = self.state_bytes(
            ema=ema,
            optimizer=optimizer,
            # A single process cannot shard.
            strategy=strategy if world_size > 1 else "none",
            world_size=world_size,
            per_node=per_node,
        )
        return states.total + self.frozen_bytes(text_encoders, min(per_node, world_size))

    def memory(self, layout: StageLayout, text_encoders: TextEncoderPlacement) -> MemoryFit:
        """Return the memory that one GPU needs for a stage."""
        return MemoryFit(
            self.fixed_bytes(
                ema=layout.ema,
                optimizer=layout.optimizer,
                strategy=layout.strategy,
                world_size=layout.world_size,
                per_node=layout.per_node,
                text_encoders=text_encoders,
            ),
            self.activation_bytes(
                layout.images, checkpointing=layout.checkpointing, text_encoders=text_encoders
            ),
            layout.images,
            text_encoders,
        )


def images_at_once(pixels: int) -> int:
    """Return how many images of ``pixels`` are encoded together: 2 million pixels, or one image.

    Encoding whole batches would need more memory than the training step, and is no faster.
    """
    return max(1, _ENCODED_PIXELS // pixels)


def plan_path(preset: str, content: str | None = None) -> Path:
    """Return where the plan of a preset is stored.

    That of a custom preset, whose JSON is ``content``, is in the user's cache.
    """
    if content is None:
        return _PLANS / f"{preset}.json"
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = preset_digest(read_preset(preset, content))
    return Path(cache_folder) / "sm-train" / "plans" / f"{digest}.json"


def plan_model(
    model: ModelConfig,
    resolution: int,
    *,
    precision: str,
    vae_precision: str = "auto",
    plan: str | None = None,
    modulation: Modulation = "gathered",
) -> ModelPlan:
    """Return the plan of the model for images of ``resolution`` pixels a side.

    ``plan`` is the JSON of a custom preset's plan, None to read it where it is stored.

    Raises:
        UnplannedModelError: the model is unknown, was not measured, or has changed since.
    """
    if model.preset is None:
        raise UnplannedModelError("model.preset is not set: the script's model is unknown")
    return plan_preset(
        model.preset,
        resolution,
        precision=precision,
        vae_precision=vae_precision,
        content=model.preset_content,
        stored=plan,
        lora=model.lora,
        modulation=modulation,
    )


def preset_digest(preset: Mapping[str, Any]) -> str:
    """Return a digest of a preset's configuration, by which a plan of an older one is refused."""
    return hashlib.sha256(json.dumps(preset, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Trained:
    """The weights that have gradients; ``added`` of them are not the preset's.

    ``activations`` is a factor of the activations of a training of all weights.
    """

    parameters: int
    added: int
    optimizer_bytes: Mapping[str, int]
    ddp_buckets: int
    activations: float = 1.0


def _all_weights(plan: Mapping[str, Any]) -> _Trained:
    return _Trained(plan["parameters"], 0, plan["optimizer_bytes"], plan["ddp_buckets"])


def _adapter(lora: LoraConfig, preset: Mapping[str, Any], plan: Mapping[str, Any]) -> _Trained:
    shapes = adapter_shapes(lora, preset["network"]["class"], plan["lora_layers"])
    count = sum(number * prod(shape) for shape, number in shapes)
    optimizers = {
        # The names only matter to optimizers that adapters are refused with.
        name: sum(number * state_bytes(name, {"": shape}) for shape, number in shapes)
        for name in OPTIMIZERS
    }
    # DDP's first bucket has 1 MiB, the others 25.
    buckets = 1 + max(0, -(-(_FP32 * count - 2**20) // (25 * 2**20)))
    activations = _adapter_activations(lora, preset["network"]["class"], shapes)
    return _Trained(count, count, optimizers, buckets, activations)


def _adapter_activations(
    lora: LoraConfig, class_name: str, shapes: Sequence[tuple[tuple[int, int], int]]
) -> float:
    """Return the factor of :data:`_ADAPTER_ACTIVATIONS`; ``shapes`` are the adapter's weights."""
    standard, others = _ADAPTER_ACTIVATIONS[class_name]
    only_standard = set(targets_of(lora, class_name)) <= set(DEFAULT_TARGETS[class_name])
    factors = standard if only_standard else others
    # Each layer has a weight (rank, inputs) and one (outputs, rank).
    layers = sum(number for _, number in shapes[::2])
    mean_inputs = sum(number * inputs for (_, inputs), number in shapes[::2]) / layers
    base = factors.with_dropout if lora.dropout else factors.plain
    return base + factors.per_rank * lora.rank / mean_inputs


@cache
def plan_preset(
    name: str,
    resolution: int,
    *,
    precision: str,
    vae_precision: str = "auto",
    content: str | None = None,
    stored: str | None = None,
    lora: LoraConfig | None = None,
    modulation: Modulation = "gathered",
) -> ModelPlan:
    """Return the plan of the preset ``name`` for images of ``resolution`` pixels a side.

    ``content`` is the JSON of a custom preset, ``stored`` that of its plan. With ``lora`` only an
    adapter is trained. ``modulation`` is how its layers compute if the weights are sharded.

    Raises:
        JobConfigError: there is no such preset, or a target of the adapter is no layer of it.
        UnplannedModelError: it was not measured, or has changed since.
    """
    preset = read_preset(name, content)
    if precision in BF16_PRECISIONS:
        # Layers in fp8 keep their inputs and weights in bf16, and cast them for each product.
        precision = "bf16"
    try:
        plan = json.loads(stored or plan_path(name, content).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnplannedModelError(
            f"preset {name}: not planned; run python -m {MEASURE_MODULE} {name}"
        ) from None
    # Plans of custom presets in a cache may be of an earlier version.
    if plan["preset_digest"] != preset_digest(preset) or "modulation_parameters" not in plan:
        raise UnplannedModelError(
            f"preset {name}: changed since it was planned; run python -m {MEASURE_MODULE} {name}"
        )
    # TF32 changes the arithmetic, not what is stored.
    figures = plan["precisions"]["bf16" if precision == "bf16" else "fp32"]
    vae_fp32 = encodes_in_fp32(preset["vae"] or {}, precision, vae_precision)
    encoding = plan["precisions"]["fp32"] if vae_fp32 else figures
    area = Fraction(resolution, plan["resolution_step"]) ** 2

    def at_resolution(coefficients: Sequence[int]) -> int:
        constant, linear, square = coefficients
        return round(constant + linear * area + square * area * area)

    text_width = _BF16 if precision == "bf16" else _FP32
    text, caption_flops = plan["text_encoder_parameters"], plan["caption_flops"]
    units = plan["text_encoder_units"]
    if preset["train_text_encoder"]:
        text, caption_flops, units = 0, 0, []
    arithmetic = "bf16" if not vae_fp32 else "fp32" if precision == "fp32" else "tf32"
    vae_time = Fraction(_BF16_FLOPS[arithmetic], _BF16_FLOPS[precision])
    trained = _all_weights(plan) if lora is None else _adapter(lora, preset, plan)
    exchanged = plan["modulation_parameters"]
    if modulation == "gathered":
        exchanged = [0] * len(exchanged)
    # Checkpointing recomputes one block at a time.
    checkpointed = at_resolution(figures["checkpointed_bytes"])
    checkpointed += max(map(at_resolution, figures["block_bytes"]), default=0)
    return ModelPlan(
        parameters=plan["parameters"] + trained.added,
        trained_parameters=trained.parameters,
        optimizer_bytes=trained.optimizer_bytes,
        # The backward pass takes twice the forward pass: a product for the gradient of each factor.
        # Frozen weights need no gradient; the adapter's own products are left out.
        training_flops_per_image=(2 if lora else 3) * at_resolution(figures["forward_flops"]),
        precision=precision,
        kept_bytes=round(trained.activations * at_resolution(figures["kept_bytes"])),
        checkpointed_bytes=round(max(trained.activations, _MIN_CHECKPOINTED) * checkpointed),
        fsdp_block_parameters=tuple(
            block - layers
            for block, layers in zip(plan["fsdp_block_parameters"], exchanged, strict=True)
        ),
        exchanged_parameters=sum(exchanged),
        ddp_buckets=trained.ddp_buckets,
        vae_bytes=_FP32 * plan["vae_parameters"],
        text_bytes=text_width * text,
        text_unit_bytes=text_width * max(map(sum, pairwise(units)), default=0),
        encoding_bytes=at_resolution(encoding["encoding_bytes"]),
        encoded_at_once=images_at_once(resolution**2),
        encoder_flops_per_image=round(vae_time * at_resolution(encoding["encoding_flops"]))
        + caption_flops,
        fp8=Fp8Work(
            at_resolution(figures["fp8_flops"]),
            at_resolution(figures["fp8_numbers"]),
            plan["fp8_parameters"],
        ),
    )


@dataclass(frozen=True)
class TextEncoderChoice:
    """Where frozen text encoders are, and why."""

    placement: TextEncoderPlacement
    reason: str


def choose_text_encoders(
    setting: TextEncoders,
    plan: ModelPlan | None,
    layout: StageLayout,
    *,
    gpu_memory: float | None,
    pytorch: str | None,
) -> TextEncoderChoice:
    """Return the placement for ``training.text_encoders``, on the laptop and in the job.

    ``auto`` replicates them if the stage then fits ``gpu_memory`` bytes; None is no GPU.
    ``pytorch`` is the version, None if unknown: sharding needs FSDP2.
    """
    if setting != "auto":
        return TextEncoderChoice(setting, "training.text_encoders")
    if gpu_memory is None or plan is None:
        return TextEncoderChoice("replicated", f"auto: no {'plan' if plan is None else 'GPU'}")
    if not plan.text_bytes:
        return TextEncoderChoice("replicated", "auto: no text encoder is frozen")
    need = plan.memory(layout, "replicated")
    text = f"{need.gib:.0f} GiB of {gpu_memory / 2**30:.0f} with replicas"
    if need.bytes <= USABLE_MEMORY * gpu_memory:
        return TextEncoderChoice("replicated", f"auto: {text}")
    has_fsdp2 = pytorch is not None and major_minor(pytorch) >= FSDP2_PYTORCH
    if min(layout.per_node, layout.world_size) > 1 and has_fsdp2:
        return TextEncoderChoice("sharded", f"auto: {text}")
    return TextEncoderChoice("cpu", f"auto: {text}, and no GPUs to shard over")


@dataclass(frozen=True)
class JobMemory:
    """What the plan of a job's model says of each process's memory."""

    text_encoders: TextEncoderChoice
    modulation: Modulation
    unsharded_gradients: bool
    """Whether each process keeps unsharded gradients while micro-batches accumulate: they are then
    reduced once a step and not with every micro-batch. DDP always keeps them; FSDP2 does where they
    fit."""


def plan_job(
    settings: JobConfig,
    world_size: int,
    per_node: int,
    gpu_memory: int | None,
    pytorch: str | None,
) -> JobMemory:
    """Plan the memory of a job's processes, of which ``per_node`` share a node.

    ``gpu_memory`` is in bytes, None without a GPU. ``pytorch`` is the version.
    """
    stage, training = settings.stage, settings.training
    layout = StageLayout(
        ema=training.ema_decay > 0,
        optimizer=training.optimizer.name,
        strategy=stage.sharding,
        world_size=world_size,
        per_node=per_node,
        images=stage.per_device_batch_size,
        checkpointing=stage.activation_checkpointing,
    )
    plan: ModelPlan | None = None
    modulation = choose_modulation(
        training.modulation, stage.sharding, pytorch, settings.model.lora
    )
    with suppress(UnplannedModelError):
        plan = plan_model(
            settings.model,
            stage.resolution,
            precision=training.precision,
            vae_precision=training.vae_precision,
            plan=settings.expected.model_plan,
            modulation=modulation,
        )
    chosen = choose_text_encoders(
        training.text_encoders, plan, layout, gpu_memory=gpu_memory, pytorch=pytorch
    )
    if world_size == 1 or (plan is not None and not plan.exchanged_parameters):
        modulation = "gathered"
    if stage.sharding == "none" or world_size == 1 or gpu_memory is None:
        return JobMemory(chosen, modulation, unsharded_gradients=True)
    if plan is None:
        return JobMemory(chosen, modulation, unsharded_gradients=False)
    # FSDP2 accumulates in the precision in which it reduces.
    width = _BF16 if training.reduce_dtype == "bf16" else _FP32
    needed = plan.memory(layout, chosen.placement).bytes + width * plan.trained_parameters
    fits = needed <= USABLE_MEMORY * gpu_memory
    return JobMemory(chosen, modulation, unsharded_gradients=fits)
