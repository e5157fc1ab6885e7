"""A model folder in S3, read by ranges (:mod:`sm_train.entrypoints.models.component_files`)."""

from __future__ import annotations

from functools import cached_property

from sm_train.entrypoints.storage.store import ObjectStore
from sm_train.toolkit.aws.s3 import split_uri


class S3Components:
    """The objects below ``uri``; methods raise S3's errors unchanged."""

    def __init__(self, store: ObjectStore, uri: str) -> None:
        self._store = store
        self.location = uri
        self._bucket, self._prefix = split_uri(uri.rstrip("/") + "/")

    @cached_property
    def files(self) -> dict[str, int]:
        return {
            stored.key.removeprefix(self._prefix): stored.bytes
            for stored in self._store.objects(self._bucket, self._prefix)
            if not stored.key.endswith("/")
        }

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return a range of an object; see ``ComponentReader``."""
        length = min(length, self.files[path] - start)
        if length <= 0:
            return b""
        return self._store.get_range(self._bucket, f"{self._prefix}{path}", start, length)
