"""``sm_train.pack``: packs images and captions into shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.job_interface.job_config import ColorPolicy, Hdr, IccProfile
from sm_train.toolkit.data_prep.packing.pack import PackResult
from sm_train.toolkit.data_prep.packing.pack import pack as pack_images
from sm_train.toolkit.data_prep.packing.pack_arguments import PackArguments

if TYPE_CHECKING:
    from sm_train.entrypoints.data_prep.work.worker_pool import WorkProgress


def pack(
    source: str | Path,
    destination: str | Path,
    *,
    captions: str | Path | None = None,
    shard_size: str | int = "4GB",
    instances: int = 1,
    image_column: str = "image",
    caption_column: str | Sequence[str] = "caption",
    keep: str | Sequence[str] = (),
    index_column: str | Sequence[str] = (),
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
    icc_profile: IccProfile = ColorPolicy.icc_profile,
    hdr: Hdr = ColorPolicy.hdr,
    headers_only: bool = False,
    append: bool = False,
    removed: str | Path | Sequence[str | Path] = (),
    workers: int | None = None,
    region: str | None = None,
    profile: str | None = None,
    progress: Callable[[WorkProgress], None] = lambda done: None,
) -> PackResult:
    """Pack images and captions into WebDataset shards with an index.

    The same call resumes an interrupted pack; a finished one is left unchanged, or extended with
    ``append``.

    Args:
        source: A folder of images with ``.txt`` captions, a pattern such as ``"photos/**/*.jpg"``,
            an S3 prefix, the ``manifest.json`` of an S3 Inventory, or a table of images and
            captions: a file, a folder of Parquet parts or a Hugging Face image folder.
        destination: The folder or S3 prefix that receives ``shards/``, ``index.parquet`` and
            ``inputs/``, the list of images.
        captions: A CSV, JSONL or Parquet table with captions, instead of ``.txt`` files. Its column
            ``bytes``, if it has one, gives the sizes of images in S3.
        shard_size: The largest shard, in bytes or as ``"500MB"``.
        instances: Make the number of shards a multiple of this number of instances.
        image_column: The table's column of images.
        caption_column: The table's column of captions, or several: an image's caption is the first
            that is not blank, and its sample has them all.
        keep: Columns of the table to store with each sample.
        index_column: Those that the index has, too: ``data.where`` selects samples by them.
            ``"source"`` is each image's path or address.
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
        icc_profile: ``"srgb"`` converts the colors of images with a profile to sRGB where pixels
            are encoded or compared; ``"ignore"`` takes them as stored.
        hdr: ``"reject"`` rejects HDR images (PQ and HLG); ``"keep"`` packs them.
        headers_only: Skip decoding: faster, but corrupt images are not detected.
        append: Add the images that the pack in ``destination`` does not have, in new shards.
        removed: Packs, of which images that `sm-train remove` removed are left out, as are those
            removed from ``destination``.
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
    arguments = PackArguments(
        source=str(source),
        destination=str(destination),
        captions=None if captions is None else str(captions),
        shard_size=shard_size,
        instances=instances,
        image_column=image_column,
        caption_columns=_names(caption_column),
        keep=_names(keep),
        index_columns=_names(index_column),
        where=where,
        min_side=min_side,
        max_aspect=max_aspect,
        drop_duplicates=drop_duplicates,
        near_duplicates=near_duplicates,
        max_side=max_side,
        quality=quality,
        convert=convert,
        latents=None if latents is None else Path(latents),
        resolution=resolution,
        icc_profile=icc_profile,
        hdr=hdr,
        headers_only=headers_only,
        append=append,
        removed=[str(removed)] if isinstance(removed, str | Path) else [*map(str, removed)],
        workers=workers,
        region=region,
        profile=profile,
    )
    return pack_images(arguments.job(), progress)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
