"""What one image costs in a U-Net of diffusers: multiply-adds, saved activations, parameters.

Counted from the configuration of a ``UNet2DConditionModel`` alone, without PyTorch, so that a
laptop can plan with it. One forward pass of one image is walked layer by layer, as diffusers 0.35
builds it (``unet_2d_condition.py``, ``unet_2d_blocks.py``, ``transformer_2d.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CAPTION_TOKENS = 77
"""Tokens of a caption in CLIP's text encoders."""

_CROSS_DOWN, _CROSS_UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
_DOWN, _UP = (_CROSS_DOWN, "DownBlock2D"), (_CROSS_UP, "UpBlock2D")


class UnplannedModelError(ValueError):
    """A configuration has parts that this module does not count."""


@dataclass(frozen=True)
class Layer:
    """One layer's work on one image: multiply-adds of the forward pass, parameters, and elements
    that autograd keeps for the backward pass (of matrix products and of norms apart: under bf16
    autocast the first are 2 bytes each, the second 4)."""

    multiply_adds: int = 0
    parameters: int = 0
    kept: int = 0
    kept_by_norms: int = 0


@dataclass(frozen=True)
class UNetPlan:
    """Totals for one image."""

    multiply_adds: int
    parameters: int
    kept: int
    kept_by_norms: int

    @property
    def training_flops(self) -> int:
        """FLOP of forward and backward pass: 2 for a multiply-add, and the backward pass is twice
        the forward pass (a product for the gradient of each of its two factors)."""
        return 6 * self.multiply_adds

    def activation_bytes(self, precision: str) -> int:
        """Bytes that autograd keeps for one image between the passes, in bf16 or fp32."""
        width = 2 if precision == "bf16" else 4
        return width * self.kept + 4 * self.kept_by_norms


def plan_unet(config: Mapping[str, Any], side: int) -> UNetPlan:
    """The plan of ``config`` for an input of ``side`` × ``side`` latent pixels.

    Raises:
        UnplannedModelError: the configuration has blocks that are not counted here.
    """
    layers = list(_walk(_Shape.read(config), side))
    return UNetPlan(
        sum(layer.multiply_adds for layer in layers),
        sum(layer.parameters for layer in layers),
        sum(layer.kept for layer in layers),
        sum(layer.kept_by_norms for layer in layers),
    )


@dataclass(frozen=True)
class _Shape:
    """The parts of a configuration that decide shapes, with diffusers' defaults."""

    channels_in: int
    channels_out: int
    channels: tuple[int, ...]
    down: tuple[str, ...]
    up: tuple[str, ...]
    layers: int
    caption: int
    linear_projection: bool
    embedding: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> _Shape:
        channels = tuple(config.get("block_out_channels", (320, 640, 1280, 1280)))
        shape = cls(
            channels_in=config.get("in_channels", 4),
            channels_out=config.get("out_channels", 4),
            channels=channels,
            down=tuple(config.get("down_block_types", (*[_CROSS_DOWN] * 3, "DownBlock2D"))),
            up=tuple(config.get("up_block_types", ("UpBlock2D", *[_CROSS_UP] * 3))),
            layers=config.get("layers_per_block", 2),
            caption=config.get("cross_attention_dim", 1280),
            linear_projection=config.get("use_linear_projection", False),
            embedding=4 * channels[0],
        )
        unknown = [name for name in shape.down if name not in _DOWN]
        unknown += [name for name in shape.up if name not in _UP]
        unknown += [
            f"{key}: {config[key]}"
            for key in ("addition_embed_type", "class_embed_type", "encoder_hid_dim")
            if config.get(key) is not None
        ]
        if not isinstance(shape.layers, int) or config.get("transformer_layers_per_block", 1) != 1:
            unknown.append("layers that differ between blocks")
        if unknown:
            raise UnplannedModelError(f"no plan for a U-Net with {unknown[0]}")
        return shape


def _walk(shape: _Shape, side: int) -> Iterator[Layer]:
    channels, skips = shape.channels, [(shape.channels[0], side)]
    yield from _linear(1, channels[0], shape.embedding)
    yield from _linear(1, shape.embedding, shape.embedding)
    yield from _conv(shape.channels_in, channels[0], side)
    width = channels[0]
    for index, (kind, out) in enumerate(zip(shape.down, channels, strict=True)):
        for _ in range(shape.layers):
            yield from _block(shape, width, out, side, attention=kind == _CROSS_DOWN)
            width = out
            skips.append((width, side))
        if index < len(channels) - 1:
            side //= 2
            yield from _conv(width, width, side, stride=2)
            skips.append((width, side))
    yield from _block(shape, width, width, side, attention=True)
    yield from _resnet(shape, width, width, side)
    for index, (kind, out) in enumerate(zip(shape.up, reversed(channels), strict=True)):
        for _ in range(shape.layers + 1):
            skip, _ = skips.pop()
            yield from _block(shape, width + skip, out, side, attention=kind == _CROSS_UP)
            width = out
        if index < len(channels) - 1:
            side *= 2
            yield from _conv(width, width, side)
    yield _norm(width, side * side, activation=True)
    yield from _conv(width, shape.channels_out, side)


def _block(shape: _Shape, width: int, out: int, side: int, *, attention: bool) -> Iterator[Layer]:
    yield from _resnet(shape, width, out, side)
    if attention:
        yield from _transformer(shape, out, side)


def _resnet(shape: _Shape, width: int, out: int, side: int) -> Iterator[Layer]:
    area = side * side
    yield _norm(width, area, activation=True)
    yield from _conv(width, out, side)
    yield from _linear(1, shape.embedding, out)
    yield _norm(out, area, activation=True)
    yield from _conv(out, out, side)
    if width != out:
        # The shortcut's input is the first norm's, which keeps it already.
        yield Layer(width * out * area, width * out + out)


def _transformer(shape: _Shape, width: int, side: int) -> Iterator[Layer]:
    """Group norm, projection, one transformer block, projection."""
    tokens = side * side
    yield _norm(width, tokens)
    yield from _linear(tokens, width, width)
    yield _norm(width, tokens)
    yield from _attention(tokens, tokens, width, width)
    yield _norm(width, tokens)
    yield from _attention(tokens, CAPTION_TOKENS, width, shape.caption)
    yield _norm(width, tokens)
    yield from _linear(tokens, width, 8 * width)
    # The gated unit keeps both halves and the gate's activation.
    yield Layer(kept=12 * width * tokens)
    yield from _linear(tokens, 4 * width, width)
    yield from _linear(tokens, width, width)


def _attention(tokens: int, others: int, width: int, others_width: int) -> Iterator[Layer]:
    """Queries of ``tokens``, keys and values of ``others``; scores are not kept (fused kernel)."""
    yield Layer(tokens * width * width, width * width, tokens * width)
    for _ in range(2):
        # Self-attention's three projections share one input; a caption is kept once for all.
        yield Layer(others * others_width * width, others_width * width)
    yield Layer(2 * tokens * others * width, 0, tokens * width + 2 * others * width)
    yield from _linear(tokens, width, width)


def _norm(width: int, tokens: int, *, activation: bool = False) -> Layer:
    """A norm keeps its input; an activation behind it keeps the norm's output."""
    return Layer(0, 2 * width, width * tokens if activation else 0, width * tokens)


def _conv(width: int, out: int, side: int, *, stride: int = 1) -> Iterator[Layer]:
    """A 3 × 3 convolution whose output is ``side`` × ``side``; it keeps its input."""
    area = side * side
    yield Layer(9 * width * out * area, 9 * width * out + out, width * area * stride * stride)


def _linear(tokens: int, width: int, out: int) -> Iterator[Layer]:
    """Keeps its input."""
    yield Layer(tokens * width * out, width * out + out, tokens * width)
