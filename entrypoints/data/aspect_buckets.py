"""Aspect-ratio buckets: batch shapes for portraits, landscapes and squares of about equal area.

After NovelAI's "Aspect Ratio Bucketing" (https://github.com/NovelAI/novelai-aspect-ratio-bucketing),
which SDXL was trained with, too. Sides are pixels, shapes are (height, width).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_ASPECT_RATIO = 2.0
"""Longer side over shorter side, at most; images beyond that are cropped."""

Shape = tuple[int, int]


def aspect_shapes(resolution: int) -> tuple[Shape, ...]:
    """Return the shapes of at most ``resolution``² pixels: the square, then from tall to wide.

    Sides are multiples of 64, which an 8 × autoencoder and a U-Net of four levels divide, or of a
    quarter of ``resolution`` if that is less.
    """
    step = min(64, max(1, resolution // 4))
    shapes = set()
    for short in range(step, resolution + 1, step):
        long = resolution * resolution // short // step * step
        if long <= short * MAX_ASPECT_RATIO:
            shapes |= {(short, long), (long, short)}
    square = (resolution, resolution)
    return (square, *sorted(shapes - {square}, key=lambda shape: shape[1] / shape[0]))


def nearest_shape(
    shapes: Sequence[Shape], heights: ArrayLike, widths: ArrayLike
) -> NDArray[np.int16]:
    """Return for each image the number of the shape that crops least of it, int16 (num_images,).

    An image of unknown size (0) counts as a square.
    """
    heights, widths = np.maximum(heights, 1), np.maximum(widths, 1)
    image_ratios = np.log(widths / heights)[..., None]  # (num_images, 1)
    shape_ratios = np.log([width / height for height, width in shapes])  # (num_shapes,)
    distances = np.abs(image_ratios - shape_ratios)  # (num_images, num_shapes)
    nearest: NDArray[np.int16] = distances.argmin(axis=-1).astype(np.int16)
    return nearest
