"""Generates shards of real JPEG images in a job that measures a speed without data.

The loader reads, decodes and crops them like packed photographs. Their content is random, so a
model that trains on them learns nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import simplejpeg
from sm_train.entrypoints.shards.shard_writer import ShardWriter, sample_parts
from sm_train.entrypoints.storage.storage import LocalFolder

_SHARDS = 4
"""Shards on each node: enough that a rank reads several."""

_DISTINCT_IMAGES = 16
"""Images that are encoded; samples repeat them, so that a start is not spent on encoding."""

_CAPTION = "a photograph of a quiet harbor with small boats at sunrise, number {}"

_QUALITY = 90
_SCALE = 1.25
"""Side of an image ÷ the training resolution: a photograph is larger than its crop."""

_BLOCK, _NOISE = 8, 10
"""Pixels of a side of equal color, and levels of the noise on it: about 1.7 bits for each pixel,
as a photograph of this quality has."""


def write_synthetic_shards(folder: Path, node_rank: int, samples: int, resolution: int) -> None:
    """Write ``samples`` samples (jpg, txt, json) to shards in ``folder``.

    Shards of different nodes have different names, as if the platform had distributed them.
    """
    rng = np.random.default_rng(node_rank)
    side = round(resolution * _SCALE)
    images = [synthetic_jpeg(rng, side) for _ in range(min(samples, _DISTINCT_IMAGES))]
    storage = LocalFolder(folder)
    for shard in range(min(samples, _SHARDS)):
        name = f"synthetic-{node_rank:04d}-{shard:02d}.tar"
        with storage.atomic_writer(name) as sink, ShardWriter(sink, name) as writer:
            for number in range(shard, samples, _SHARDS):
                key, image = f"{number:08d}", images[number % len(images)]
                caption = _CAPTION.format(number)
                writer.append(key, *sample_parts(key, image, caption, "jpeg", b"{}"))
            writer.finish()


def synthetic_jpeg(rng: np.random.Generator, side: int) -> bytes:
    """Return a JPEG of ``side`` × ``side`` pixels with about the entropy of a photograph."""
    blocks = -(-side // _BLOCK)
    coarse = rng.integers(0, 200, (blocks, blocks, 3), dtype=np.uint8)
    pixels = coarse.repeat(_BLOCK, 0).repeat(_BLOCK, 1)[:side, :side]
    noise = rng.integers(0, _NOISE, pixels.shape, dtype=np.uint8)
    encoded: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels + noise), quality=_QUALITY, colorspace="RGB"
    )
    return encoded
