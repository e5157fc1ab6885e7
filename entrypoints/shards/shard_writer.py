"""Writes samples to a shard, a WebDataset tar. Sizes are in bytes."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from blake3 import blake3
from sm_train.entrypoints.shards.shard_format import END_MARK, Shard
from sm_train.entrypoints.storage.stream_upload import BytesLike, ShardSink

EXTENSIONS = {"jpeg": "jpg", "png": "png", "webp": "webp"}
"""Image format → file extension of the image in a sample."""


def sample_parts(
    key: str,
    image: BytesLike,
    caption: str,
    image_format: str,
    metadata: bytes,
    extra_members: Mapping[str, bytes] | None = None,
) -> list[BytesLike]:
    """Return a sample's tar members as consecutive buffers.

    Several buffers avoid a copy of the image. ``extra_members`` maps file extensions to contents.
    """
    members = {"txt": caption.encode(), "json": metadata, **(extra_members or {})}
    tail = [_padding(image)]
    for extension, content in members.items():
        tail += member_parts(f"{key}.{extension}", content)
    return [_header(f"{key}.{EXTENSIONS[image_format]}", len(image)), image, b"".join(tail)]


def member_parts(name: str, content: bytes) -> list[bytes]:
    """Return a tar member as consecutive buffers."""
    return [_header(name, len(content)), content, _padding(content)]


def _padding(content: BytesLike) -> bytes:
    return bytes(-len(content) % tarfile.BLOCKSIZE)


_TEMPLATE = tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)
_SIZE, _CHECKSUM = slice(124, 135), slice(148, 156)
_TEMPLATE_SUM = sum(_TEMPLATE[:148]) + sum(_TEMPLATE[156:]) + 8 * ord(" ") - 11 * ord("0")
"""Checksum of a header without a name and a size: the sum of its bytes, with spaces in place of the
checksum. The template's size field holds eleven zeros, which every header replaces by digits."""


def _header(name: str, size: int) -> bytes:
    """Return a member's header as tarfile writes it, in a tenth of the time.

    Only the name, the size and the checksum differ; owner and time are constants.
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
    block[_CHECKSUM] = b"%06o\0 " % (_TEMPLATE_SUM + sum(encoded) + sum(digits))
    return bytes(block)


_FLUSH_BYTES = 1 << 20
"""Written at a time: every hand-over to the hashing thread costs some microseconds."""


class ShardWriter:
    """Writes one shard to ``sink``; keeps its digest and offsets in memory, not its content.

    A background thread computes the digest. Use as a context manager.
    """

    def __init__(self, sink: ShardSink, name: str) -> None:
        self._sink, self._name = sink, name
        self._digest = blake3()
        self._keys: list[str] = []
        self._offsets: list[int] = []
        self._size = 0
        self._pending: list[BytesLike] = []
        self._pending_bytes = 0
        self._hash_thread = ThreadPoolExecutor(1)
        self._last_hash: Future[None] | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hash_thread.shutdown()

    def append(self, key: str, *parts: BytesLike) -> None:
        """Append a sample, as one buffer or as the buffers of :func:`sample_parts`."""
        self._keys.append(key)
        self._offsets.append(self._size)
        for part in parts:
            self._buffer(part)
        if self._pending_bytes >= _FLUSH_BYTES:
            self._flush()

    def finish(
        self,
        widths: Sequence[int] = (),
        heights: Sequence[int] = (),
        colors: Sequence[str | None] = (),
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> Shard:
        """End the tar and return its description (:class:`Shard`)."""
        end = self._size
        self._buffer(END_MARK)
        self._flush()
        if self._last_hash is not None:
            self._last_hash.result()
        return Shard(
            name=self._name,
            bytes=self._size,
            blake3=self._digest.hexdigest(),
            keys=tuple(self._keys),
            offsets=(*self._offsets, end),
            widths=tuple(widths),
            heights=tuple(heights),
            colors=tuple(colors),
            columns={name: tuple(values) for name, values in (columns or {}).items()},
        )

    def _buffer(self, content: BytesLike) -> None:
        self._pending.append(content)
        self._pending_bytes += len(content)
        self._size += len(content)

    def _flush(self) -> None:
        buffers, self._pending, self._pending_bytes = self._pending, [], 0
        previous = self._last_hash
        self._last_hash = self._hash_thread.submit(self._hash, buffers)
        self._sink.writelines(buffers)
        if previous is not None:
            previous.result()  # bounds memory: at most two flushes wait for the hashing thread

    def _hash(self, buffers: list[BytesLike]) -> None:
        for buffer in buffers:
            self._digest.update(buffer)
