"""Writes shards: samples in, tars of a target size out. Sizes are bytes."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sm_train.entrypoints.shards import END_MARK, Shard

EXTENSIONS = {"jpeg": "jpg", "png": "png", "webp": "webp"}
"""Image format, as ``Sample.format`` names it → extension of the image's member."""

_WRITE_BUFFER = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One accepted image with its caption.

    ``width`` and ``height`` are pixels as stored, before any EXIF rotation. ``sha256`` is of the
    image's bytes. ``source`` is the image's path in the packed folder, with forward slashes.
    """

    image: bytes
    caption: str
    width: int
    height: int
    format: str
    sha256: str
    source: str


def sample_key(number: int) -> str:
    """The key of the ``number``-th accepted sample, from 0; without dots, which end a key."""
    return f"{number:09d}"


def encode_sample(key: str, sample: Sample) -> bytes:
    """The sample's three members as they stand in a tar."""
    facts = {
        "width": sample.width,
        "height": sample.height,
        "format": sample.format,
        "sha256": sample.sha256,
        "source": sample.source,
    }
    return b"".join(
        (
            *_member(f"{key}.{EXTENSIONS[sample.format]}", sample.image),
            *_member(f"{key}.txt", sample.caption.encode()),
            *_member(f"{key}.json", json.dumps(facts).encode()),
        )
    )


def _member(name: str, content: bytes) -> tuple[bytes, bytes, bytes]:
    """Header, content and padding; a fresh TarInfo's owner and time are constants."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf(tarfile.USTAR_FORMAT), content, bytes(-len(content) % tarfile.BLOCKSIZE)


class ShardWriter:
    """Fills ``shard-000000.tar``, ``shard-000001.tar`` … in ``folder``, one after another.

    A shard is closed when the next sample would carry it past ``target_bytes``, end mark
    included; a sample larger than that gets a shard of its own. A shard is streamed to a
    ``.part`` file, which gets its final name when every byte is on the disk. Used as a context
    manager: leaving it closes the last shard, leaving it by an exception removes the unfinished
    one.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """

    def __init__(self, folder: Path, target_bytes: int) -> None:
        self.shards: list[Shard] = []
        """The finished shards."""
        self._folder, self._target = folder, target_bytes
        self._open: _OpenShard | None = None

    def write(self, key: str, encoded: bytes) -> None:
        """Append one sample, as :func:`encode_sample` made it."""
        if self._open and self._open.size + len(encoded) + len(END_MARK) > self._target:
            self._close()
        if self._open is None:
            self._open = _OpenShard(self._folder / f"shard-{len(self.shards):06d}.tar")
        self._open.append(key, encoded)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._open:
                self._close()
        finally:
            if self._open:
                self._open.discard()
                self._open = None

    def _close(self) -> None:
        if self._open:
            self.shards.append(self._open.finish())
            self._open = None


class _OpenShard:
    """The shard being written; holds its digest and offsets, never its content."""

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._file = self._part.open("wb", buffering=_WRITE_BUFFER)
        self._digest = hashlib.sha256()
        self._keys: list[str] = []
        self._offsets: list[int] = []

    def append(self, key: str, encoded: bytes) -> None:
        self._keys.append(key)
        self._offsets.append(self.size)
        self._write(encoded)

    def finish(self) -> Shard:
        end = self.size
        self._write(END_MARK)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self._path)
        return Shard(
            name=self._path.name,
            bytes=self.size,
            sha256=self._digest.hexdigest(),
            keys=tuple(self._keys),
            offsets=(*self._offsets, end),
        )

    def discard(self) -> None:
        # Closing flushes once more, which fails again where the disk is full.
        with suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self.size += len(content)
