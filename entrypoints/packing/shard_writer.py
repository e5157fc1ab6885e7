"""Writes a shard: samples in, a tar out. Sizes are bytes."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from blake3 import blake3
from sm_train.entrypoints.data.shard_format import END_MARK, Shard
from sm_train.entrypoints.packing.storage import BytesLike, ShardSink

EXTENSIONS = {"jpeg": "jpg", "png": "png", "webp": "webp"}
"""Image format, as a sample's facts name it → extension of the image's member."""


def encode_sample(*sample: Any) -> bytes:
    """:func:`sample_parts`, joined."""
    return b"".join(sample_parts(*sample))


def sample_parts(
    key: str,
    image: BytesLike,
    caption: str,
    kind: str,
    facts: bytes,
    more: Mapping[str, bytes] | None = None,
) -> list[BytesLike]:
    """The sample's members as they stand in a tar; ``more`` are others by their extensions.

    In parts, so that an image is not copied to stand beside its header.
    """
    members = {"txt": caption.encode(), "json": facts, **(more or {})}
    behind = [_padding(image)]
    for name, content in members.items():
        behind += [_header(f"{key}.{name}", len(content)), content, _padding(content)]
    return [_header(f"{key}.{EXTENSIONS[kind]}", len(image)), image, b"".join(behind)]


def _padding(content: BytesLike) -> bytes:
    return bytes(-len(content) % tarfile.BLOCKSIZE)


_TEMPLATE = tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)
_SIZE, _CHECKSUM = slice(124, 135), slice(148, 156)
_SUM = sum(_TEMPLATE[:148]) + sum(_TEMPLATE[156:]) + 8 * ord(" ") - 11 * ord("0")
"""Of the bytes of a header without a name and a size."""


def _header(name: str, size: int) -> bytes:
    """As tarfile writes it, at a tenth of the time: nothing but the name and the size differ.

    Owner and time are constants.
    """
    encoded = name.encode()
    if len(encoded) > 100 or size >= 8**11:
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.USTAR_FORMAT)
    digits = b"%011o" % size
    block = bytearray(_TEMPLATE)
    block[: len(encoded)] = encoded
    block[_SIZE] = digits
    block[_CHECKSUM] = b"%06o\0 " % (_SUM + sum(encoded) + sum(digits))
    return bytes(block)


_HELD_BYTES = 1 << 20
"""Written at once: every hand-over to the thread that digests costs some microseconds."""


class ShardFile:
    """One shard on its way into ``sink``; holds its digest and offsets, never its content.

    The digest is taken in a thread beside the writer. Use as a context.
    """

    def __init__(self, sink: ShardSink, name: str) -> None:
        self._sink, self._name = sink, name
        self._digest = blake3()
        self._keys: list[str] = []
        self._offsets: list[int] = []
        self._size = 0
        self._held: list[BytesLike] = []
        self._held_size = 0
        self._hashing = ThreadPoolExecutor(1)
        self._hashed: Future[None] | None = None

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hashing.shutdown()

    def append(self, key: str, *parts: BytesLike) -> None:
        """The next sample, in the parts that :func:`sample_parts` made, or joined."""
        self._keys.append(key)
        self._offsets.append(self._size)
        for part in parts:
            self._hold(part)
        if self._held_size >= _HELD_BYTES:
            self._flush()

    def finish(self, widths: Sequence[int] = (), heights: Sequence[int] = ()) -> Shard:
        """Close the tar and describe it; the sides are the images' in pixels."""
        end = self._size
        self._hold(END_MARK)
        self._flush()
        if self._hashed is not None:
            self._hashed.result()
        return Shard(
            name=self._name,
            bytes=self._size,
            blake3=self._digest.hexdigest(),
            keys=tuple(self._keys),
            offsets=(*self._offsets, end),
            widths=tuple(widths),
            heights=tuple(heights),
        )

    def _hold(self, content: BytesLike) -> None:
        self._held.append(content)
        self._held_size += len(content)
        self._size += len(content)

    def _flush(self) -> None:
        parts, self._held, self._held_size = self._held, [], 0
        previous = self._hashed
        self._hashed = self._hashing.submit(self._hash, parts)
        self._sink.writelines(parts)
        if previous is not None:
            previous.result()  # no more than two pieces wait for their digest

    def _hash(self, parts: list[BytesLike]) -> None:
        for part in parts:
            self._digest.update(part)
