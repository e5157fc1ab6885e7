"""What a preset needs of a GPU: FLOP an image, and bytes of states and activations.

Without PyTorch, so that a laptop can plan with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sm_train.entrypoints.models.components import UNLIMITED_TOKENS, downsampling, read_preset
from sm_train.entrypoints.planning import autoencoder, transformer, unet
from sm_train.entrypoints.planning.layers import NetworkPlan, UnplannedModelError
from sm_train.entrypoints.planning.text_encoder import text_parameters

_FP32, _BF16 = 4, 2


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one GPU between and during steps; ``gathered`` are weights of others."""

    weights: int
    gradients: int
    adamw: int
    ema: int
    gathered: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.adamw + self.ema + self.gathered


@dataclass(frozen=True)
class ModelPlan:
    """A preset's network at one resolution.

    ``frozen_bytes`` are the weights of the autoencoder and of text encoders that do not learn. The
    autoencoder takes ``encoding_bytes`` for each image of ``encoded_at_once``.
    """

    network: NetworkPlan
    precision: str
    frozen_bytes: int
    encoding_bytes: int
    encoded_at_once: int

    @property
    def parameters(self) -> int:
        return self.network.total.parameters

    @property
    def training_flops_per_image(self) -> int:
        return self.network.training_flops

    def activation_bytes(self, images: int, *, checkpointing: bool = False) -> int:
        """Of a pass of so many images: what autograd keeps of the network's, or what encoding them
        takes just before, if that is more (precomputed latents take none)."""
        each = self.network.activation_bytes(self.precision, checkpointing=checkpointing)
        return max(images * each, min(images, self.encoded_at_once) * self.encoding_bytes)

    def state_bytes(
        self, *, ema: bool, strategy: str = "none", world_size: int = 1, per_node: int = 1
    ) -> StateBytes:
        """Of one GPU among ``world_size``, ``per_node`` in a machine.

        Weights, gradients, both moments of AdamW and, with ``ema``, the average are fp32; FSDP2
        splits all five. It computes with gathered copies: of all weights (``shard_grad_op``), or of
        a block and the next one; a block's gradients are whole until they are summed, in fp32.
        Under DDP autocast keeps a bf16 copy of the weights.
        """
        count, bf16 = self.parameters, self.precision == "bf16"
        split = 1 if strategy == "none" else world_size
        if strategy == "hybrid_shard":
            split = min(per_node, world_size)
        # torch.chunk rounds up, parameter by parameter; less than a row of each.
        own = -(-count // split)
        width = _BF16 if bf16 else _FP32
        block = self.network.largest_block_parameters
        if strategy == "none":
            gathered = _BF16 * count * bf16
        else:
            weights = count if strategy == "shard_grad_op" else 2 * block
            gathered = width * weights + (width + _FP32) * block
        return StateBytes(_FP32 * own, _FP32 * own, 2 * _FP32 * own, _FP32 * own * ema, gathered)

    def fixed_bytes(self, *, ema: bool, strategy: str, world_size: int, per_node: int) -> int:
        """Of one GPU before the first image: states, autoencoder and frozen text encoders.

        One process has nobody to split with.
        """
        states = self.state_bytes(
            ema=ema,
            strategy=strategy if world_size > 1 else "none",
            world_size=world_size,
            per_node=per_node,
        )
        return states.total + self.frozen_bytes


@cache
def plan_preset(name: str, resolution: int, *, precision: str) -> ModelPlan:
    """The plan of the preset called ``name`` for images of ``resolution`` pixels.

    Raises:
        UnplannedModelError: the preset's network is not one that is counted.
    """
    preset = read_preset(name)
    vae = preset["vae"]
    side = resolution // downsampling(vae)
    frozen = 0
    if not preset["train_text_encoder"]:
        text = sum(map(text_parameters, preset["text_encoders"]))
        frozen = text * (_BF16 if precision == "bf16" else _FP32)
    return ModelPlan(
        plan_network(preset["network"], side, _caption_tokens(preset)),
        precision,
        frozen + (_FP32 * autoencoder.parameters(vae) if vae else 0),
        autoencoder.encoding_bytes(vae, resolution, precision) if vae else 0,
        autoencoder.images_at_once(resolution**2),
    )


def plan_network(config: Mapping[str, Any], side: int, caption_tokens: int) -> NetworkPlan:
    """The plan of a network's configuration for an input of ``side`` × ``side``.

    Raises:
        UnplannedModelError: it is not one that is counted.
    """
    kind = config["class"]
    if kind == "UNet2DConditionModel":
        return NetworkPlan(tuple(unet.walk(config, side, caption_tokens)))
    if kind == "PixArtTransformer2DModel":
        return NetworkPlan(tuple(transformer.walk_dit(config, side, caption_tokens)))
    if kind == "SD3Transformer2DModel":
        return NetworkPlan(tuple(transformer.walk_mmdit(config, side, caption_tokens)))
    raise UnplannedModelError(f"no plan for a {kind}")


def _caption_tokens(preset: Mapping[str, Any]) -> int:
    """CLIP's encoders are joined along the width, a T5's tokens come behind theirs."""
    clip = {
        one["max_position_embeddings"]
        for one in preset["text_encoders"]
        if "max_position_embeddings" in one
    }
    t5 = sum("max_position_embeddings" not in one for one in preset["text_encoders"])
    return max(clip, default=0) + t5 * UNLIMITED_TOKENS
