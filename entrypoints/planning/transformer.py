"""What one image costs in diffusers' transformers: PixArt's (a DiT) and Stable Diffusion 3's.

Counted from their configurations alone, without PyTorch (``pixart_transformer_2d.py``,
``transformer_sd3.py`` and ``attention.py`` of diffusers 0.35). Attention runs in a fused kernel.
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
    shared_linear,
)

_FREQUENCIES = 256
"""Width of a timestep's sinusoids."""


@dataclass(frozen=True)
class _Stream:
    """Tokens that pass through a block; ``width`` of each."""

    tokens: int
    width: int


def walk_dit(config: Mapping[str, Any], side: int, caption_tokens: int) -> Iterator[Block]:
    """A ``PixArtTransformer2DModel`` on ``side`` × ``side`` latent pixels.

    Raises:
        UnplannedModelError: it has parts that are not counted here.
    """
    if config.get("use_additional_conditions", True):
        raise UnplannedModelError("no plan for a DiT with use_additional_conditions")
    image = _image(config, side)
    width, caption = image.width, config["caption_channels"]
    head = [
        *_patches(config, image),
        *_two_linears(1, _FREQUENCIES, width),
        *linear(1, width, 6 * width),
        *_two_linears(caption_tokens, caption, width),
    ]
    yield Block.of(head)
    for _ in range(config["num_layers"]):
        yield Block.of(_dit_block(image, caption_tokens), image.tokens * width)
    yield Block.of(
        [Layer(0, 2 * width), _modulated(image), *linear(image.tokens, width, _patch_out(config))]
    )


def _dit_block(image: _Stream, caption_tokens: int) -> Iterator[Layer]:
    tokens, width = image.tokens, image.width
    yield Layer(0, 6 * width)
    yield _modulated(image)
    yield from _projections(image, 3)
    yield attention_core(tokens, tokens, width)
    yield from _out(image, gated=True)
    # The caption is projected and kept once for all blocks.
    yield from _projections(image, 1)
    for _ in range(2):
        yield from shared_linear(caption_tokens, width, width)
    yield attention_core(tokens, caption_tokens, width)
    yield from _out(image, gated=False)
    yield _modulated(image)
    yield from _feed_forward(image)


def walk_mmdit(config: Mapping[str, Any], side: int, caption_tokens: int) -> Iterator[Block]:
    """An ``SD3Transformer2DModel`` on ``side`` × ``side`` latent pixels.

    Raises:
        UnplannedModelError: it has parts that are not counted here.
    """
    if config.get("dual_attention_layers"):
        raise UnplannedModelError("no plan for an MMDiT with dual_attention_layers")
    image = _image(config, side)
    width, depth = image.width, config["num_layers"]
    text = _Stream(caption_tokens, width)
    head = [
        *_patches(config, image),
        *_two_linears(1, _FREQUENCIES, width),
        *_two_linears(1, config["pooled_projection_dim"], width),
        *linear(caption_tokens, config["joint_attention_dim"], width),
    ]
    yield Block.of(head)
    for number in range(depth):
        layers = _joint_block(config, image, text, last=number == depth - 1)
        yield Block.of(layers, (image.tokens + text.tokens) * width)
    tail = [*linear(1, width, 2 * width), _modulated(image)]
    yield Block.of([*tail, *linear(image.tokens, width, _patch_out(config))])


def _joint_block(
    config: Mapping[str, Any], image: _Stream, text: _Stream, *, last: bool
) -> Iterator[Layer]:
    """The last block has no more use for the text's own stream."""
    width, both = image.width, image.tokens + text.tokens
    yield from linear(1, width, 6 * width)
    yield from shared_linear(1, width, (2 if last else 6) * width)
    for stream in (image, text):
        yield _modulated(stream)
        yield from _projections(stream, 3)
    if config.get("qk_norm"):
        # Queries and keys of both streams, before and after; a weight for each channel of a head.
        yield Layer(0, 4 * config["attention_head_dim"], 2 * both * width, 2 * both * width)
    yield attention_core(both, both, width)
    yield from _out(image, gated=True)
    yield _modulated(image)
    yield from _feed_forward(image)
    if not last:
        yield from _out(text, gated=True)
        yield _modulated(text)
        yield from _feed_forward(text)


def _image(config: Mapping[str, Any], side: int) -> _Stream:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return _Stream((side // config["patch_size"]) ** 2, width)


def _patches(config: Mapping[str, Any], image: _Stream) -> Iterator[Layer]:
    """A convolution as large as its stride: each patch through one linear layer."""
    inputs = config["in_channels"] * config["patch_size"] ** 2
    yield from linear(image.tokens, inputs, image.width)


def _patch_out(config: Mapping[str, Any]) -> int:
    return int(config["out_channels"] * config["patch_size"] ** 2)


def _two_linears(tokens: int, width: int, out: int) -> Iterator[Layer]:
    """With an activation between them, whose input is kept."""
    yield from linear(tokens, width, out)
    yield Layer(kept=tokens * out)
    yield from linear(tokens, out, out)


def _modulated(stream: _Stream) -> Layer:
    """A norm without weights, scaled and shifted: it keeps its input, the scaling its output."""
    return Layer(kept_by_norms=2 * stream.tokens * stream.width)


def _projections(stream: _Stream, count: int) -> Iterator[Layer]:
    """Of one input, which is kept once."""
    yield from linear(stream.tokens, stream.width, stream.width)
    for _ in range(count - 1):
        yield from shared_linear(stream.tokens, stream.width, stream.width)


def _out(stream: _Stream, *, gated: bool) -> Iterator[Layer]:
    """Attention's last projection; a gate keeps what it multiplies."""
    yield from linear(stream.tokens, stream.width, stream.width)
    if gated:
        yield Layer(kept=stream.tokens * stream.width)


def _feed_forward(stream: _Stream) -> Iterator[Layer]:
    """Four times as wide inside; gated."""
    tokens, width = stream.tokens, stream.width
    yield from linear(tokens, width, 4 * width)
    yield Layer(kept=4 * tokens * width)
    yield from linear(tokens, 4 * width, width)
    yield Layer(kept=tokens * width)
