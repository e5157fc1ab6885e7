"""An object in S3 as a file that is read in places: each read is one ranged request."""

from __future__ import annotations

import io
import os
from typing import Any


class S3File(io.RawIOBase):
    """Read-only and seekable; nothing is kept. S3's refusals come out of ``read`` as they are."""

    def __init__(self, s3: Any, bucket: str, key: str, size: int) -> None:
        self._s3, self._bucket, self._key = s3, bucket, key
        self._size, self._place = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        )
        return self._place

    def readinto(self, buffer: Any) -> int:
        last = min(self._place + len(buffer), self._size) - 1
        if last < self._place:
            return 0
        answer = self._s3.get_object(
            Bucket=self._bucket, Key=self._key, Range=f"bytes={self._place}-{last}"
        )
        content: bytes = answer["Body"].read()
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)
