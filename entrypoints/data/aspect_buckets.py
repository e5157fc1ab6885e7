"""Aspect-ratio buckets: batches of portraits and landscapes beside squares, of about one area.

After NovelAI's "Aspect Ratio Bucketing" (https://github.com/NovelAI/novelai-aspect-ratio-bucketing),
which SDXL was trained with, too. Sides are pixels, shapes are (height, width).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST_ASPECT = 2.0
"""The longer side over the shorter one, at most: beyond that an image is cut."""

Shape = tuple[int, int]


def aspect_shapes(resolution: int) -> tuple[Shape, ...]:
    """Shapes of at most ``resolution``² pixels, the square first, then from tall to wide.

    Sides are multiples of 64, which an 8 × autoencoder and a U-Net of four levels divide; of a
    quarter of ``resolution`` where that is less.
    """
    step = min(64, max(1, resolution // 4))
    shapes = set()
    for short in range(step, resolution + 1, step):
        long = resolution * resolution // short // step * step
        if long <= short * LARGEST_ASPECT:
            shapes |= {(short, long), (long, short)}
    square = (resolution, resolution)
    return (square, *sorted(shapes - {square}, key=lambda shape: shape[1] / shape[0]))


def nearest_shape(
    shapes: Sequence[Shape], heights: ArrayLike, widths: ArrayLike
) -> NDArray[np.int16]:
    """For each image the number of the shape that cuts least of it off.

    An image whose sides are not known (0) counts as a square.
    """
    heights, widths = np.maximum(heights, 1), np.maximum(widths, 1)
    own = np.log(widths / heights)[..., None]
    offered = np.log([width / height for height, width in shapes])
    nearest: NDArray[np.int16] = np.abs(own - offered).argmin(axis=-1).astype(np.int16)
    return nearest
