"""Objects of S3 of which small parts are read, one after another."""

from __future__ import annotations

from sm_train.entrypoints.object_store.store import ObjectStore

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
