"""The shard format: WebDataset tars of images, captions and facts; read and checked.

A sample is three neighbouring members, always in this order::

    000000042.jpg    the image's original bytes (.jpg, .png or .webp, by content)
    000000042.txt    the caption, UTF-8
    000000042.json   {"width", "height", "format", "sha256", "source"}

A shard is a plain USTAR archive whose bytes depend on its samples alone: no clock, no user, no
machine. What reads shards here takes any other WebDataset tar too. Sizes and offsets are bytes.
:mod:`sm_train.entrypoints.packing.shard_writer` writes them;
:mod:`sm_train.entrypoints.data.shard_index` defines where their index lies.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from sm_train.entrypoints.common.file_digest import file_digest

END_MARK = bytes(2 * tarfile.BLOCKSIZE)
"""Closes every tar; an archive without it was cut short."""


SUFFIX = ".tar"

MOMENTS, TEXT, POOLED = "moments.npy", "text.npy", "pooled.npy"
"""Member extensions of a sample's precomputed arrays."""


class ShardError(ValueError):
    """A shard or an index cannot be used; the message is one line that names the file."""


def find_shards(folder: Path) -> dict[str, Path]:
    """The tars in a folder, or in the channel of an instance: name (path below it) → path."""
    return {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob(f"*{SUFFIX}"))
    }


@dataclass(frozen=True)
class Shard:
    """What an index knows of a finished shard.

    ``name`` is its path below the shards folder. Sample ``i`` is called ``keys[i]`` and its
    members, headers and padding fill the bytes ``offsets[i]`` to ``offsets[i + 1]``; the last
    offset is where the end mark begins. ``blake3`` is the whole file's
    digest, which SHA-256 would take four times as long for. ``widths`` and
    ``heights`` are the images' in pixels, upright; both are empty where nobody looked.
    """

    name: str
    bytes: int
    blake3: str
    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    widths: tuple[int, ...] = ()
    heights: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        return len(self.keys)


def scan_shard(path: Path, name: str | None = None) -> Shard:
    """Read a tar from end to end and describe it, called ``name`` (its file name by default).

    Raises:
        ShardError: the file is no tar, is damaged or cut short, or holds a member twice in one
            sample.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        keys, offsets = _samples(path, file)
        file.seek(0)
        digest = file_digest(file)
        return Shard(name or path.name, file.tell(), digest, keys, offsets)


def verify_shard(path: Path, expected: Shard | None = None) -> None:
    """Walk a tar's headers to its end; with ``expected``, compare every byte with the index, too.

    Raises:
        ShardError: the tar is damaged or cut short, or is not the one that the index describes.
        OSError: the file cannot be read.
    """
    if expected is None:
        with path.open("rb") as file:
            _samples(path, file)
        return
    found = scan_shard(path, expected.name)
    if found != replace(expected, widths=(), heights=()):
        raise ShardError(
            f"{path}: not the shard in the index: it has {found.samples} samples, "
            f"{found.bytes} bytes and digest {found.blake3[:12]}…, the index says "
            f"{expected.samples}, {expected.bytes} and {expected.blake3[:12]}…"
        )


def _samples(path: Path, file: IO[bytes]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The samples' keys and offsets, as :class:`Shard` holds them."""
    keys: list[str] = []
    offsets: list[int] = []
    extensions: set[str] = set()
    end = 0
    try:
        for member, behind in _members(file):
            end = behind
            if not member.isfile():
                continue
            key, extension = _split_name(member.name)
            if not keys or key != keys[-1]:
                keys.append(key)
                offsets.append(member.offset)
                extensions.clear()
            if extension in extensions:
                raise tarfile.ReadError(f"offset {member.offset}: {_shown(member)} comes twice")
            extensions.add(extension)
    except tarfile.TarError as error:
        raise ShardError(f"{path}: {error}") from None
    return tuple(keys), (*offsets, end)


def _split_name(name: str) -> tuple[str, str]:
    """WebDataset's rule: a key ends at the first dot of the file name and keeps the folder."""
    folder, slash, file_name = name.rpartition("/")
    stem, _, extension = file_name.partition(".")
    return folder + slash + stem, extension.lower()


def _shown(member: tarfile.TarInfo) -> str:
    """The member's name on one line of bearable length; a damaged header holds anything."""
    name = repr(member.name)[1:-1]
    return name if len(name) <= 80 else f"…{name[-79:]}"


def _members(file: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Every member with the offset behind it, up to the end mark.

    Raises:
        tarfile.TarError: with the place and the kind of the damage.
    """
    size = os.fstat(file.fileno()).st_size
    end, last = 0, "at the start"
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                if not end < tar.offset <= size:
                    raise tarfile.ReadError(f"{_shown(member)} is cut short")
                end, last = tar.offset, f"after {_shown(member)}"
                yield member, end
                tar.members.clear()  # type: ignore[attr-defined]  # it keeps them all otherwise
    except (tarfile.TarError, ValueError, OverflowError) as error:  # the last two: absurd sizes
        raise tarfile.ReadError(f"offset {end}: {last}: {error}") from None
    # tarfile takes any header that it cannot read for the end of the archive.
    file.seek(end)
    mark = file.read(len(END_MARK))
    if len(mark) < len(END_MARK):
        raise tarfile.ReadError(f"offset {end}: {last}: cut short, the end mark is missing")
    if mark != END_MARK:
        raise tarfile.ReadError(f"offset {end}: {last}: the next header is damaged")
