"""``sm_train.pack``: packs images and captions into shards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.packing.plan import PackOptions
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.extras import require_extra
from sm_train.toolkit.packing.pack import PackJob, PackResult, parse_size
from sm_train.toolkit.packing.pack import pack as pack_images
from sm_train.toolkit.packing.tables import TableOptions

if TYPE_CHECKING:
    from sm_train.entrypoints.packing.worker_pool import PackProgress

_TABLES = (".csv", ".jsonl", ".parquet")


def pack(
    source: str | Path,
    destination: str | Path,
    *,
    captions: str | Path | None = None,
    shard_size: str | int = "4GB",
    instances: int = 1,
    image_column: str = "image",
    caption_column: str = "caption",
    size_column: str | None = None,
    where: str | None = None,
    min_side: int | None = None,
    max_aspect: float | None = None,
    drop_duplicates: bool = False,
    near_duplicates: int | None = None,
    max_side: int | None = None,
    quality: int | None = None,
    convert: bool = False,
    latents: str | Path | None = None,
    resolution: int | None = None,
    headers_only: bool = False,
    append: bool = False,
    workers: int | None = None,
    region: str | None = None,
    profile: str | None = None,
    progress: Callable[[PackProgress], None] = lambda done: None,
) -> PackResult:
    """Pack images and captions into WebDataset shards with an index.

    The same call resumes an interrupted pack; a finished one is left unchanged, or extended with
    ``append``.

    Args:
        source: A folder of images with ``.txt`` captions, a pattern such as ``"photos/**/*.jpg"``,
            an S3 prefix, the ``manifest.json`` of an S3 Inventory, or a table of images and
            captions.
        destination: The folder or S3 prefix that receives ``shards/``, ``index.parquet`` and
            ``inputs/``, the list of images.
        captions: A CSV, JSONL or Parquet table with captions, instead of ``.txt`` files.
        shard_size: The largest shard, in bytes or as ``"500MB"``.
        instances: Make the number of shards a multiple of this number of instances.
        image_column: The table's column of images.
        caption_column: The table's column of captions.
        size_column: The table's column of sizes in bytes, of images in S3; default: ``"bytes"``, if
            the table has it.
        where: An SQL condition on the columns of the table: only its rows are packed.
        min_side: Reject images whose shorter side has fewer pixels.
        max_aspect: Reject images whose longer side is more than this many times the shorter.
        drop_duplicates: Reject images with the same bytes.
        near_duplicates: Reject images whose perceptual hashes differ in at most this many of 64
            bits.
        max_side: Scale down images whose longer side has more pixels.
        quality: Encode all images as JPEG of this quality, from 1 to 100.
        convert: Also pack HEIC, AVIF, TIFF, GIF, BMP and JPEG 2000 files, encoded as JPEG.
        latents: Add latents and text states encoded by this diffusers model.
        resolution: The resolution of the latents, in pixels.
        headers_only: Skip decoding: faster, but corrupt images are not detected.
        append: Add the images that the pack in ``destination`` does not have, in new shards.
        workers: Worker processes; default: one per CPU.
        region: The AWS region of S3 addresses.
        profile: The AWS profile for credentials.
        progress: Called with the number of images and bytes done so far.

    Returns:
        ``samples``, ``shards``, ``bytes``, ``shards_path``, ``index_path``,
        ``rejected_by_reason`` and, with ``append``, ``appended``.

    Raises:
        UsageError: there is nothing to pack, the destination holds another pack, or options
            contradict each other.
        AccessError: an address is in S3 and there are no credentials.
    """
    job = pack_job(
        str(source),
        str(destination),
        captions=None if captions is None else Path(captions),
        shard_bytes=shard_size if isinstance(shard_size, int) else parse_size(shard_size),
        table=TableOptions(image_column, caption_column, size_column, where),
        workers=workers,
        instances=instances,
        min_side=min_side,
        max_aspect=max_aspect,
        max_side=max_side,
        quality=quality,
        convert=convert,
        drop_duplicates=drop_duplicates,
        near_duplicates=near_duplicates,
        headers_only=headers_only,
        append=append,
        latents=None if latents is None else Path(latents),
        resolution=resolution,
        region=region,
        profile=profile,
    )
    return pack_images(job, progress)


def pack_job(
    source: str,
    destination: str,
    *,
    captions: Path | None,
    shard_bytes: int,
    table: TableOptions,
    workers: int | None,
    instances: int,
    min_side: int | None,
    max_aspect: float | None,
    max_side: int | None,
    quality: int | None,
    convert: bool,
    drop_duplicates: bool,
    near_duplicates: int | None,
    headers_only: bool,
    append: bool,
    latents: Path | None,
    resolution: int | None,
    region: str | None,
    profile: str | None,
    on_sagemaker: bool = False,
) -> PackJob:
    """Return the job of :func:`pack`'s arguments.

    Raises:
        UserError: options contradict each other, or credentials for S3 are missing.
    """
    if headers_only and near_duplicates is not None:
        raise UserError("--headers-only: excludes --near-duplicates, which compares pixels")
    if (latents is None) != (resolution is None):
        raise UserError("--latents: requires --resolution, and the reverse")
    if latents is not None and resolution is not None:
        _require_latents_model(latents, resolution, packs_locally=not on_sagemaker)
    return PackJob(
        source=source,
        destination=destination,
        captions=captions,
        shard_bytes=shard_bytes,
        table=table,
        workers=workers or os.cpu_count() or 1,
        instances=instances,
        append=append,
        options=PackOptions(
            pixels=not headers_only,
            min_side=min_side,
            max_aspect=max_aspect,
            max_side=max_side,
            quality=quality,
            convert=convert,
            duplicates=drop_duplicates or near_duplicates is not None,
            near_bits=near_duplicates,
            latents=None if latents is None else str(latents),
            latents_resolution=resolution,
        ),
        access=_access((source, destination), str(captions or source), region, profile),
    )


def _require_latents_model(model: Path, resolution: int, *, packs_locally: bool) -> None:
    from sm_train.entrypoints.models.components import ComponentsError, describe_latents

    try:
        describe_latents(model, resolution)
    except ComponentsError as error:
        raise UserError(f"--latents: {error}") from None
    if packs_locally:
        require_extra("train", "torch", "diffusers", purpose="encoding latents")


def _access(
    addresses: tuple[str, str], table: str, region: str | None, profile: str | None
) -> S3Access:
    """Return how to reach S3; require credentials and a region only if an address is in S3."""
    if not any(address.startswith("s3://") for address in addresses):
        if not table.endswith(_TABLES):
            return S3Access()
        return S3Access(profile, region)  # the table may name s3:// URIs
    from sm_train.toolkit.aws.session import open_session, resolve_region

    region = resolve_region(region, None, profile)
    open_session(profile, region)
    return S3Access(profile, region)
