"""Describes a shard that sm-train did not pack, for an index; tolerant of damage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.base.digests import file_digest
from sm_train.entrypoints.data_prep.packing.unusable_samples import (
    COMPRESSED,
    IMAGE_AND_TEXT,
    UNREADABLE,
    SampleFiles,
    Unusable,
    UnusableSamples,
    find_unusable,
)
from sm_train.entrypoints.images.image_header import is_png
from sm_train.entrypoints.images.stored_color import (
    UNKNOWN_FACTS,
    ImageFacts,
    has_whole_profile,
    image_facts,
)
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_index import RejectedInput
from sm_train.entrypoints.shards.tar_reader import (
    FileBytes,
    TarBytes,
    TarScan,
    printable_name,
    scan_bytes,
)

_ABSENT = (0, 0)
"""Place of an image that a sample lacks."""

DAMAGED = "shard-damaged"
"""Reason of a rejected part of a shard."""

_HEAD_BYTES = 1 << 16
"""Usually contains the image's dimensions; large EXIF data ahead of them need a longer read."""


@dataclass(frozen=True)
class ShardDescription:
    """A shard's entry in an index, the damage and the unusable samples that were found in it."""

    shard: Shard
    rejected: tuple[RejectedInput, ...]
    unusable: Unusable


def describe_shard(
    path: Path, name: str, files: SampleFiles = IMAGE_AND_TEXT, *, find_missing: bool = True
) -> ShardDescription:
    """Describe the shard in a file and compute its digest.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        tar = FileBytes(file.fileno())
        return describe_tar(tar, name, file_digest(file), files, find_missing=find_missing)


def describe_tar(
    tar: TarBytes,
    name: str,
    digest: str,
    files: SampleFiles = IMAGE_AND_TEXT,
    *,
    find_missing: bool = True,
) -> ShardDescription:
    """Find a tar's samples and the dimensions of their images.

    Damage costs only the samples that it touches: each damaged region is one rejected input. An
    image with an unreadable header is listed as 0 × 0, and the data loader skips it. With
    ``find_missing``, such samples and those without one of ``files`` count as unusable.

    Raises:
        OSError: the tar cannot be read.
    """
    found: list[ImageFacts] = []
    scan = scan_bytes(
        tar, files.image, lambda start, stop: found.append(_image_facts(tar, start, stop))
    )
    of_images = iter(found)
    facts = [UNKNOWN_FACTS if place == _ABSENT else next(of_images) for place in scan.wanted]
    sizes = [size for size, _ in facts]
    shard = Shard(
        name=name,
        bytes=scan.bytes,
        blake3=digest,
        keys=scan.keys,
        offsets=_offsets(scan),
        widths=tuple(width for _, width in sizes),
        heights=tuple(height for height, _ in sizes),
        colors=tuple(color for _, color in facts),
    )
    unusable = find_unusable(tar, name, scan, files if find_missing else None)
    unreadable = [
        f"{name} {printable_name(key)}"
        for key, place, size in zip(scan.keys, scan.wanted, sizes, strict=True)
        if find_missing and place != _ABSENT and size == UNKNOWN_FACTS[0]
    ]
    if unreadable:
        unusable[UNREADABLE] = UnusableSamples()
        unusable[UNREADABLE].add(len(unreadable), unreadable)
    damage = (
        () if COMPRESSED in unusable else scan.damage
    )  # a compressed shard has no header at all
    rejected = tuple(RejectedInput(name, DAMAGED, line) for line in damage)
    return ShardDescription(shard, rejected, unusable)


def _offsets(scan: TarScan) -> tuple[int, ...]:
    """Return the samples' start offsets and the end of the last one.

    A sample extends to the start of the next one, so damage in between belongs to it.
    """
    starts: list[int] = scan.starts.tolist()
    return (*starts, int(scan.stops[-1]) if starts else 0)


def _image_facts(tar: TarBytes, start: int, stop: int) -> ImageFacts:
    head = tar.pread(min(_HEAD_BYTES, stop - start), start)
    # A PNG may carry its orientation after the pixels.
    is_enough = len(head) == stop - start or (not is_png(head) and has_whole_profile(head))
    facts = image_facts(head) if is_enough else UNKNOWN_FACTS
    return image_facts(tar.pread(stop - start, start)) if facts == UNKNOWN_FACTS else facts
