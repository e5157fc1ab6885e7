"""What an index says of a shard that sm-train did not pack: one pass, whatever its damage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.common.file_digest import file_digest
from sm_train.entrypoints.data.image_header import DecodeError, image_size
from sm_train.entrypoints.data.shard_format import Shard, find_shards
from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.data.tar_reader import TarScan, scan_tar

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp"})

_HEAD = 1 << 16
"""Holds an image's sides, unless larger EXIF data stand before them."""


@dataclass(frozen=True)
class DescribedShard:
    """A shard's entry in an index, and what of it cannot be read."""

    shard: Shard
    rejected: tuple[RejectedInput, ...]


def describe_shard(path: Path, name: str) -> DescribedShard:
    """Find a tar's samples and the sides of their images, and digest it.

    Damage costs the samples that it touches: each place becomes a rejection. An image whose sides
    cannot be read counts as 0 × 0 and is left to the reader.

    Raises:
        OSError: the file cannot be read.
    """
    found = scan_tar(path, IMAGE_EXTENSIONS)
    with path.open("rb") as file:
        sides = [_sides(file.fileno(), *place) for place in found.wanted]
        digest = file_digest(file)
    shard = Shard(
        name=name,
        bytes=found.bytes,
        blake3=digest,
        keys=found.keys,
        offsets=_offsets(found),
        widths=tuple(width for _, width in sides),
        heights=tuple(height for height, _ in sides),
    )
    rejected = tuple(RejectedInput(name, "shard-damaged", line) for line in found.damage)
    return DescribedShard(shard, rejected)


def describe_folder(folder: Path) -> Iterator[DescribedShard]:
    """Every ``*.tar`` below ``folder``, by its path below it, in sorted order."""
    for name, path in find_shards(folder).items():
        yield describe_shard(path, name)


def _offsets(found: TarScan) -> tuple[int, ...]:
    """A sample goes on to the next one's start: damage between them is its own matter."""
    starts: list[int] = found.starts.tolist()
    return (*starts, int(found.stops[-1]) if starts else 0)


def _sides(descriptor: int, start: int, stop: int) -> tuple[int, int]:
    for size in (min(_HEAD, stop - start), stop - start):
        try:
            return image_size(os.pread(descriptor, size, start))
        except DecodeError:
            continue
    return 0, 0
