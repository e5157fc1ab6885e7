"""Aspect-ratio buckets: batch shapes for portraits, landscapes and squares of about equal area.

After NovelAI's "Aspect Ratio Bucketing" (https://github.com/NovelAI/novelai-aspect-ratio-bucketing),
which SDXL was trained with, too. Sides are pixels, shapes are (height, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.sample_ranges import SampleRanges

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
    image_ratios = np.maximum(widths, 1) / np.maximum(heights, 1)
    shape_ratios = np.array([width / height for height, width in shapes])
    order = np.argsort(shape_ratios, kind="stable").astype(np.int16)
    ascending = shape_ratios[order]
    # The nearest is that with the least difference of logarithms, so the limit between neighbors is
    # their geometric mean. Billions of images are compared with it, so no logarithm of each.
    limits = np.sqrt(ascending[1:] * ascending[:-1])
    nearest: NDArray[np.int16] = order[np.searchsorted(limits, image_ratios)]
    return nearest


@dataclass(frozen=True, eq=False)
class SampleShapes:
    """The numbers of the batch shapes of samples, by shard.

    Sample ``i`` of shard ``s`` has the shape ``numbers[first[s] + i]``, less than ``num_shapes``.
    ``first`` is int64 (num_shards,), negative for shards whose shapes were not asked for;
    ``numbers`` is int16 (num_samples,).
    """

    first: Ints
    numbers: NDArray[np.int16]
    num_shapes: int

    def of(self, ranges: SampleRanges) -> NDArray[np.int16]:
        """Return the number of the shape at each position of ``ranges``, int16 (num_samples,)."""
        # The entry of a range's first sample, less the position of that sample.
        offsets = self.first[ranges.shard] + ranges.stop - ranges.ends
        lengths = ranges.stop - ranges.start
        numbers: NDArray[np.int16] = self.numbers[
            np.arange(ranges.num_samples) + np.repeat(offsets, lengths)
        ]
        return numbers
