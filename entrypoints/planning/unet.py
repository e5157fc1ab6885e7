"""What one image costs in a U-Net of diffusers: multiply-adds, saved activations, parameters.

Counted from the configuration of a ``UNet2DConditionModel`` alone, without PyTorch, so that a
laptop can plan with it. One forward pass of one image is walked layer by layer, as diffusers 0.35
builds it (``unet_2d_condition.py``, ``unet_2d_blocks.py``, ``transformer_2d.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.planning.layers import (
    Block,
    Layer,
    UnplannedModelError,
    attention_core,
    linear,
    norm,
    shared_linear,
)

_CROSS_DOWN, _CROSS_UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
_DOWN, _UP = (_CROSS_DOWN, "DownBlock2D"), (_CROSS_UP, "UpBlock2D")


def walk(config: Mapping[str, Any], side: int, caption_tokens: int) -> Iterator[Block]:
    """The blocks of ``config`` for an input of ``side`` × ``side`` latent pixels.

    Raises:
        UnplannedModelError: the configuration has blocks that are not counted here.
    """
    yield from _walk(_Shape.read(config, caption_tokens), side)


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
    caption_tokens: int
    embedding: int
    transformers: tuple[int, ...]
    added: int

    @classmethod
    def read(cls, config: Mapping[str, Any], caption_tokens: int) -> _Shape:
        channels = tuple(config.get("block_out_channels", (320, 640, 1280, 1280)))
        transformers = config.get("transformer_layers_per_block", 1)
        if isinstance(transformers, int):
            transformers = [transformers] * len(channels)
        with_sizes = config.get("addition_embed_type") == "text_time"
        shape = cls(
            channels_in=config.get("in_channels", 4),
            channels_out=config.get("out_channels", 4),
            channels=channels,
            down=tuple(config.get("down_block_types", (*[_CROSS_DOWN] * 3, "DownBlock2D"))),
            up=tuple(config.get("up_block_types", ("UpBlock2D", *[_CROSS_UP] * 3))),
            layers=config.get("layers_per_block", 2),
            caption=config.get("cross_attention_dim", 1280),
            caption_tokens=caption_tokens,
            embedding=4 * channels[0],
            transformers=tuple(transformers),
            added=config["projection_class_embeddings_input_dim"] if with_sizes else 0,
        )
        unknown = [name for name in shape.down if name not in _DOWN]
        unknown += [name for name in shape.up if name not in _UP]
        unknown += [
            f"{key}: {config[key]}"
            for key in ("addition_embed_type", "class_embed_type", "encoder_hid_dim")
            if config.get(key) is not None and not (key == "addition_embed_type" and with_sizes)
        ]
        if not isinstance(shape.layers, int):
            unknown.append("layers that differ between blocks")
        if unknown:
            raise UnplannedModelError(f"no plan for a U-Net with {unknown[0]}")
        return shape


def _walk(shape: _Shape, side: int) -> Iterator[Block]:
    channels, skips = shape.channels, [(shape.channels[0], side)]
    yield Block.of(_head(shape, side))
    width = channels[0]
    for index, (kind, out) in enumerate(zip(shape.down, channels, strict=True)):
        for _ in range(shape.layers):
            yield _resnet(shape, width, out, side)
            if kind == _CROSS_DOWN:
                yield from _transformer(shape, out, side, shape.transformers[index])
            width = out
            skips.append((width, side))
        if index < len(channels) - 1:
            side //= 2
            yield Block.of(_conv(width, width, side, stride=2))
            skips.append((width, side))
    # The first of the middle is not computed again (diffusers' UNetMidBlock2DCrossAttn).
    yield Block(_resnet(shape, width, width, side).total)
    yield from _transformer(shape, width, side, shape.transformers[-1])
    yield _resnet(shape, width, width, side)
    upwards = zip(shape.up, reversed(channels), reversed(shape.transformers), strict=True)
    for index, (kind, out, transformers) in enumerate(upwards):
        for _ in range(shape.layers + 1):
            skip, _ = skips.pop()
            yield _resnet(shape, width + skip, out, side)
            if kind == _CROSS_UP:
                yield from _transformer(shape, out, side, transformers)
            width = out
        if index < len(channels) - 1:
            side *= 2
            yield Block.of(_conv(width, width, side))
    tail = [norm(width, side * side, activation=True), *_conv(width, shape.channels_out, side)]
    yield Block.of(tail)


def _head(shape: _Shape, side: int) -> Iterator[Layer]:
    """The embeddings of the timestep and, in SDXL, of sizes and pooled text; the first layer."""
    yield from linear(1, shape.channels[0], shape.embedding)
    yield from linear(1, shape.embedding, shape.embedding)
    if shape.added:
        yield from linear(1, shape.added, shape.embedding)
        yield from linear(1, shape.embedding, shape.embedding)
    yield from _conv(shape.channels_in, shape.channels[0], side)


def _resnet(shape: _Shape, width: int, out: int, side: int) -> Block:
    area = side * side
    layers = [
        norm(width, area, activation=True),
        *_conv(width, out, side),
        *linear(1, shape.embedding, out),
        norm(out, area, activation=True),
        *_conv(out, out, side),
    ]
    if width != out:
        # The shortcut's input is the first norm's, which keeps it already.
        layers.append(Layer(width * out * area, width * out + out))
    return Block.of(layers, entering=width * area)


def _transformer(shape: _Shape, width: int, side: int, depth: int) -> Iterator[Block]:
    """Group norm, projection, transformer blocks, projection."""
    tokens = side * side
    yield Block.of([norm(width, tokens), *linear(tokens, width, width)])
    for _ in range(depth):
        yield Block.of(_transformer_block(shape, width, tokens), entering=width * tokens)
    yield Block.of(linear(tokens, width, width))


def _transformer_block(shape: _Shape, width: int, tokens: int) -> Iterator[Layer]:
    yield norm(width, tokens)
    yield from _attention(tokens, tokens, width, width)
    yield norm(width, tokens)
    yield from _attention(tokens, shape.caption_tokens, width, shape.caption)
    yield norm(width, tokens)
    yield from linear(tokens, width, 8 * width)
    # The gated unit keeps both halves and the gate's activation.
    yield Layer(kept=12 * width * tokens)
    yield from linear(tokens, 4 * width, width)


def _attention(tokens: int, others: int, width: int, others_width: int) -> Iterator[Layer]:
    """Queries of ``tokens``, keys and values of ``others``."""
    yield from linear(tokens, width, width, bias=False)
    for _ in range(2):
        # Self-attention's three projections share one input; a caption is kept once for all.
        yield from shared_linear(others, others_width, width, bias=False)
    yield attention_core(tokens, others, width)
    yield from linear(tokens, width, width)


def _conv(width: int, out: int, side: int, *, stride: int = 1) -> Iterator[Layer]:
    """A 3 × 3 convolution whose output is ``side`` × ``side``; it keeps its input."""
    area = side * side
    yield Layer(9 * width * out * area, 9 * width * out + out, width * area * stride * stride)
