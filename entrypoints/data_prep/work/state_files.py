"""Which files of unfinished work exist in the destination."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sm_train.entrypoints.storage.storage import S3Prefix, Storage

_LIST_SECONDS = 1.0
"""Age of a listing of S3 at which it is renewed."""


class StateFiles:
    """Which files in some folders exist. Those in S3 are listed again after a while."""

    def __init__(self, destination: Storage, folders: Sequence[str]) -> None:
        self._destination, self._folders = destination, folders
        self._names: set[str] = set()
        self._listed = -_LIST_SECONDS

    def has(self, name: str) -> bool:
        """Return whether a file exists, or existed once."""
        if name in self._names:
            return True
        if isinstance(self._destination, S3Prefix):
            if time.monotonic() - self._listed >= _LIST_SECONDS:
                self._listed = time.monotonic()
                for folder in self._folders:
                    listed = self._destination.list_sizes(folder)
                    self._names |= {f"{folder}/{name}" for name in listed}
        elif self._destination.size(name) is not None:
            self._names.add(name)
        return name in self._names
