"""Copies a node's checkpoint folder to S3 while training writes to it, and back before it starts.

All nodes copy to one prefix. A checkpoint's marker is uploaded last: only when S3 holds every file
that it lists, also those of other nodes. So a checkpoint with a marker in S3 is complete, whenever
nodes are lost. What training deletes is deleted in S3, the marker first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sm_train.entrypoints.common.atomic_write import NOT_UPLOADED_SUFFIX
from sm_train.entrypoints.common.checkpoint_layout import (
    MARKER,
    CheckpointMarker,
    MarkerError,
)
from sm_train.entrypoints.node_start.object_store import ObjectStore

POLL_SECONDS = 5.0
"""Polling interval of the folder."""

LAST_UPLOAD_SECONDS = 90.0
"""Time after the end of training in which other nodes may still upload files of a checkpoint.
Kubernetes kills a pod 120 s after SIGTERM (the manifest's terminationGracePeriodSeconds)."""

_Version = tuple[int, int]
"""What changes when a file does: time of modification and size."""


def restore(store: ObjectStore, folder: Path) -> int:
    """Download the prefix to ``folder``, without what is there; returns the number of files.

    Markers come last, so that an interrupted download leaves no checkpoint that seems complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    needed = [name for name in store.sizes() if not (folder / name).exists()]
    store.download((name for name in needed if not _is_marker(name)), folder)
    store.download((name for name in needed if _is_marker(name)), folder)
    return len(needed)


class CheckpointUploads:
    """Uploads from ``folder`` to ``store`` in a thread; ``warn`` is called with each failure.

    A file that S3 holds in its size counts as uploaded at the start (:func:`restore`).
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        warn: Callable[[str], None],
        *,
        poll_seconds: float = POLL_SECONDS,
        last_upload_seconds: float = LAST_UPLOAD_SECONDS,
    ) -> None:
        self._store, self._folder, self._warn = store, folder, warn
        self._poll_seconds, self._last_upload_seconds = poll_seconds, last_upload_seconds
        sizes = store.sizes()
        self._uploaded = {
            name: version for name, version in _files(folder) if sizes.get(name) == version[1]
        }
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> bool:
        """Upload what remains; returns whether S3 has everything."""
        self._ending.set()
        self._thread.join()
        deadline = time.monotonic() + self._last_upload_seconds
        while True:
            try:
                remaining = self._upload_changes()
            except Exception as error:
                remaining = [f"{type(error).__name__}: {error}"]
            if not remaining:
                return True
            if time.monotonic() > deadline:
                self._warn(
                    f"not uploaded to {self._store.uri}: {', '.join(remaining)}; the checkpoint "
                    "before it counts"
                )
                return False
            time.sleep(min(1.0, self._poll_seconds))

    def _run(self) -> None:
        while not self._ending.wait(self._poll_seconds):
            try:
                self._upload_changes()
            except Exception as error:
                # Training continues; the next round repeats what is missing.
                self._warn(f"{self._store.uri}: {type(error).__name__}: {error}")

    def _upload_changes(self) -> list[str]:
        """Upload and delete once; returns the markers that wait for files of other nodes."""
        present = dict(_files(self._folder))
        removed = self._uploaded.keys() - present.keys()
        for name in sorted(removed, key=lambda name: not _is_marker(name)):
            self._store.delete(name)
            del self._uploaded[name]
        changed = [name for name, version in present.items() if self._uploaded.get(name) != version]
        for name in (one for one in changed if not _is_marker(one)):
            self._upload(name, present[name])
        markers = [name for name in changed if _is_marker(name)]
        if not markers:
            return []
        sizes = self._store.sizes()
        waiting = []
        for name in markers:
            if self._is_complete(name, sizes):
                self._upload(name, present[name])
            else:
                waiting.append(name)
        return waiting

    def _upload(self, name: str, version: _Version) -> None:
        try:
            self._store.upload(name, self._folder / name)
        except FileNotFoundError:  # removed since it was listed
            return
        self._uploaded[name] = version

    def _is_complete(self, name: str, sizes: dict[str, int]) -> bool:
        """Return whether S3 holds every file of the marker ``name``, in its size."""
        step = name.rpartition("/")[0]
        try:
            marker = CheckpointMarker.parse((self._folder / name).read_bytes())
        except (FileNotFoundError, MarkerError):
            return False
        return all(sizes.get(f"{step}/{file.name}") == file.bytes for file in marker.files)


def _is_marker(name: str) -> bool:
    return name.rpartition("/")[2] == MARKER


def _files(folder: Path) -> Iterator[tuple[str, _Version]]:
    """Yield the files that belong to checkpoints, not those that are being written."""
    for path in sorted(folder.rglob("*")):
        if path.name.endswith(NOT_UPLOADED_SUFFIX) or path.name.startswith("."):
            continue
        try:
            if path.is_file():
                status = path.stat()
                yield path.relative_to(folder).as_posix(), (status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            continue
