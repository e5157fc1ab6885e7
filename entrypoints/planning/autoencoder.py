"""What an autoencoder takes of a GPU while training encodes images with it: weights and memory.

Counted from the configuration of diffusers' ``AutoencoderKL`` alone, without PyTorch, as diffusers
0.35 builds it (``vae.py``, ``unet_2d_blocks.py``, ``resnet.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

_ENCODED_PIXELS = 2**21

_PEAK_BYTES = {"bf16": 12, "fp32": 20}
"""Of each element at the highest resolution, where the most is alive: in a block's second
residual layer. In fp32 when it ends: the block's input, the layer's, the branch, their sum and the
scaled sum. In bf16 between its norm and its activation, both of which autocast computes in fp32,
beside the two inputs."""


def images_at_once(pixels: int) -> int:
    """How many images of so many pixels are encoded together: 2 million pixels, or one image.

    Whole batches would need more memory than the training step itself, and are no quicker.
    """
    return max(1, _ENCODED_PIXELS // pixels)


def encoding_bytes(config: Mapping[str, Any], resolution: int, precision: str) -> int:
    """Bytes alive at the peak of encoding one image of ``resolution`` pixels a side.

    Attention runs in a fused kernel, which keeps no scores.
    """
    widths = config["block_out_channels"]
    elements = max(width * (resolution >> level) ** 2 for level, width in enumerate(widths))
    return int(_PEAK_BYTES[precision] * elements)


def parameters(config: Mapping[str, Any]) -> int:
    """Weights of encoder and decoder."""
    latent, widths = config["latent_channels"], list(config["block_out_channels"])
    layers, last = config["layers_per_block"], widths[-1]
    total: int = _conv(config["in_channels"], widths[0]) + _conv(last, 2 * latent)
    total += _conv(latent, last) + _conv(widths[0], config["out_channels"])
    total += 2 * last + 2 * widths[0]
    total += 2 * _middle(last)
    total += sum(_blocks([widths[0], *widths], layers))
    total += sum(_blocks([last, *reversed(widths)], layers + 1))
    if config.get("use_quant_conv", True):
        total += _conv(2 * latent, 2 * latent, kernel=1)
    if config.get("use_post_quant_conv", True):
        total += _conv(latent, latent, kernel=1)
    return total


def _blocks(widths: list[int], layers: int) -> Iterator[int]:
    """Residual layers, and between two blocks one that halves or doubles the side."""
    for number, (width, out) in enumerate(pairwise(widths), start=2):
        yield _resnet(width, out) + (layers - 1) * _resnet(out, out)
        if number < len(widths):
            yield _conv(out, out)


def _middle(width: int) -> int:
    return 2 * _resnet(width, width) + 2 * width + 4 * (width * width + width)


def _resnet(width: int, out: int) -> int:
    shortcut = _conv(width, out, kernel=1) if width != out else 0
    return 2 * width + _conv(width, out) + 2 * out + _conv(out, out) + shortcut


def _conv(width: int, out: int, *, kernel: int = 3) -> int:
    return kernel * kernel * width * out + out
