"""Decodes samples with the loader of training: the pixels and the captions that a model gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm_train.entrypoints.job_interface.index_location import index_path, removal_list
from sm_train.entrypoints.job_interface.job_config import DataConfig
from sm_train.toolkit.base.extras import require_extra


@dataclass(frozen=True)
class LoadedCrop:
    """A sample as training gets it: uint8 ``pixels`` (H, W, 3) and its caption.

    ``height`` and ``width`` are of the upright original, ``top`` and ``left`` of the crop in the
    image that is scaled for it.
    """

    shard: str
    key: str
    pixels: Any
    caption: str
    height: int
    width: int
    top: int
    left: int


@dataclass(frozen=True)
class UnusableSample:
    """A sample that training leaves out."""

    shard: str
    key: str
    reason: str
    detail: str


def load_crops(
    folder: Path, config: DataConfig, resolution: int, seed: int, count: int
) -> Iterator[LoadedCrop | UnusableSample]:
    """Yield the ``count`` samples of the shards in ``folder`` in the order of an epoch.

    Raises:
        UserError: PyTorch is not installed.
        DataError: no sample can be used.
    """
    require_extra("train", "torch", purpose="the loader of training")
    from sm_train.entrypoints.data_loading.loader import open_loader
    from sm_train.entrypoints.data_loading.shard_catalog import DataRank
    from sm_train.entrypoints.data_loading.shard_channels import ShardChannel, list_channels

    # A sample is drawn already, and bad ones are shown.
    config = replace(
        config,
        where=None,
        sources=(),
        reader="indexed",
        pipe=None,
        max_bad_fraction=1.0,
        synthetic_samples=0,
    )
    rank = DataRank(("localhost",), 0, 0, 1)
    index = index_path(folder)
    scans = folder.parent / ".scans"
    channel = ShardChannel("train", folder, index, None, scans, removal_list(str(index)))
    shards = list_channels([channel], config, rank, lambda value: [value])
    loader = open_loader(
        shards, rank, config, resolution=resolution, batch_size=1, seed=seed, decode_workers=0
    )
    batches = iter(loader)
    for _ in range(count):
        batch = next(batches)
        for bad in batch.bad_samples:
            yield UnusableSample(bad.shard, bad.key, bad.reason, bad.detail)
        if not batch.is_new[0]:
            continue
        shard = loader.reader.shard_name(batch.origins[0][0])
        key = batch.names[0].removeprefix(f"{shard} ")
        height, width, top, left = batch.sizes[0].tolist()
        pixels = batch.pixels[0].numpy().copy()
        yield LoadedCrop(shard, key, pixels, batch.captions[0], height, width, top, left)
