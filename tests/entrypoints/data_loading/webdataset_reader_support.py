"""Helpers of the tests of webdataset reader, which other tests use as well."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.cluster.training_jobs import write_shard

SHARDS, EACH = 3, 20


def png(shade: int) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(shade).integers(0, 255, (12, 16, 3), np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def write_channel(folder: Path, shards: int = SHARDS) -> Path:
    """Write shards of images with distinct captions."""
    for shard in range(shards):
        samples = {
            f"{shard}-{number}": {
                "png": png(shard * EACH + number),
                "txt": f"{shard}-{number}".encode(),
            }
            for number in range(EACH)
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_shard(folder / f"{shard}.tar", samples)
    return folder
