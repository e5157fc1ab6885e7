"""Objects of S3 as seekable files, of which parts are read, one after another."""

from __future__ import annotations

import io
import os
from typing import Any

from sm_train.entrypoints.storage.store import ObjectStore

WINDOW_BYTES = 1 << 17
"""Read with each request: a member of a tar with the head of its image, or several small ones."""


class ObjectBytes:
    """An object of ``size`` bytes; keeps what the last request returned."""

    def __init__(self, store: ObjectStore, bucket: str, key: str, size: int) -> None:
        self._store, self._bucket, self._key = store, bucket, key
        self.size = size
        self._window, self._start = b"", 0

    def pread(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on, fewer at the end."""
        size = max(0, min(size, self.size - offset))
        at = offset - self._start
        if not 0 <= at <= len(self._window) - size:
            length = min(max(size, WINDOW_BYTES), self.size - offset)
            if length <= 0:
                return b""
            self._window = self._store.get_range(self._bucket, self._key, offset, length)
            self._start, at = offset, 0
        return self._window[at : at + size]


def open_object(store: ObjectStore, uri: str) -> S3File:
    """Open an object; only its size is requested.

    Raises:
        FileNotFoundError: it does not exist.
    """
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    head = store.head(bucket, key)
    if head is None:
        raise FileNotFoundError(2, "no such object", uri)
    return S3File(store, bucket, key, head.bytes)


class S3File(io.RawIOBase):
    """A read-only, seekable view of an S3 object; each read is one ranged request, nothing is
    cached. ``read`` raises S3's errors unchanged.
    """

    def __init__(self, store: ObjectStore, bucket: str, key: str, size: int) -> None:
        self._store, self._bucket, self._key = store, bucket, key
        self._size, self._offset = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._offset = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._size}[whence]
        )
        return self._offset

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._offset)
        if length <= 0:
            return 0
        content = self._store.get_range(self._bucket, self._key, self._offset, length)
        buffer[: len(content)] = content
        self._offset += len(content)
        return len(content)
