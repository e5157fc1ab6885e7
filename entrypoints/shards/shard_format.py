"""The shard format: WebDataset tars of images, captions and metadata.

A sample is three consecutive members, always in this order::

    000000042.jpg    the image's original bytes (.jpg, .png or .webp, by content)
    000000042.txt    the caption, UTF-8
    000000042.json   {"width", "height", "format", "sha256", "source", "columns"}

A shard is a plain USTAR archive whose bytes depend on its samples alone, not on the time, the user
or the computer. The reader also accepts any other WebDataset tar. Sizes and offsets are bytes.

:mod:`sm_train.entrypoints.shards.shard_writer` writes shards,
:mod:`sm_train.entrypoints.shards.shard_verification` verifies them, and
:mod:`sm_train.entrypoints.shards.shard_index` indexes them.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

END_MARK = bytes(2 * tarfile.BLOCKSIZE)
"""Ends every tar; an archive without it was cut short."""

SUFFIX = ".tar"

MOMENTS, TEXT, POOLED, SIZES = "moments.npy", "text.npy", "pooled.npy", "sizes.npy"
"""Member extensions of a sample's precomputed arrays."""


class ShardError(ValueError):
    """A shard or an index cannot be used; the message is one line that names the file."""


class DataError(RuntimeError):
    """The shards cannot be trained on; the message is one line."""


def find_shards(folder: Path) -> dict[str, Path]:
    """Return the tars below a folder or a channel, sorted: name (relative path) → path."""
    return {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob(f"*{SUFFIX}"))
    }


@dataclass(frozen=True)
class Shard:
    """A complete shard, as an index describes it.

    ``name`` is its path relative to the shards folder. Sample ``i`` has the key ``keys[i]``; its
    members with their headers and padding fill the bytes ``offsets[i]`` to ``offsets[i + 1]``.
    The last offset is that of the end mark. ``blake3`` is the digest of the whole file; SHA-256
    would take four times as long. ``widths`` and ``heights`` are the images' in pixels, after
    EXIF rotation; both are empty if they are unknown. ``colors`` say what each image states about
    its colors (:attr:`StoredColor.code`); None of one that cannot be read, and empty if all are
    unknown. ``columns`` are the values of all samples in the columns that the index keeps.
    """

    name: str
    bytes: int
    blake3: str
    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    widths: tuple[int, ...] = ()
    heights: tuple[int, ...] = ()
    colors: tuple[str | None, ...] = ()
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.keys)

    def with_columns(self, names: Iterable[str]) -> Shard:
        """Return the shard with these columns; the values of those that it lacks are unknown."""
        unknown = (None,) * self.samples
        return replace(self, columns={name: self.columns.get(name, unknown) for name in names})


@dataclass(frozen=True)
class ListedShard:
    """A shard: its path below the data set's folder or prefix, and its size in bytes.

    ``version`` changes with its content: the time of its modification in a folder, the ETag in S3.
    """

    name: str
    bytes: int
    version: str = ""
