"""Copies a node's checkpoint folder to S3 while training writes to it.

All nodes copy to one prefix. A checkpoint's marker is uploaded last: only when S3 holds every file
that it lists, also those of other nodes. So a checkpoint with a marker in S3 is complete, whenever
nodes are lost. Each uploaded file gets the note that SageMaker leaves
(``entrypoints/records/upload_notes.py``).

What training deletes is deleted in S3, the marker first; of a checkpoint that was not restored,
training deletes the marker alone. The newest checkpoint that is complete in S3 stays until a newer
one is: uploads of another node may fail. What an earlier attempt left of an unfinished one is
deleted then as well.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from sm_train.entrypoints.clusters.prefix_copy import PrefixFiles
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointMarker,
    MarkerError,
    checkpoint_folders,
    file_problem,
)
from sm_train.entrypoints.records.upload_notes import UPLOADED_SUFFIX, is_upload_note, note

POLL_SECONDS = 5.0
"""Polling interval of the folder."""

LAST_UPLOAD_SECONDS = 90.0
"""Time after the end of training in which other nodes may still upload files of a checkpoint.
Kubernetes kills a pod 120 s after SIGTERM (the manifest's terminationGracePeriodSeconds)."""

FAILED_UPLOAD_SECONDS = 10.0
"""The same after a failure: what other nodes have not uploaded by then, they no longer have."""

_Version = tuple[int, int]
"""What changes when a file does: time of modification and size."""


class CheckpointUploads:
    """Uploads from ``folder`` to ``store`` in a thread; ``warn`` is called with each failure.

    A file that S3 holds in its size counts as uploaded at the start: it was restored.
    """

    def __init__(
        self,
        store: PrefixFiles,
        folder: Path,
        warn: Callable[[str], None],
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._store, self._folder, self._warn = store, folder, warn
        self._poll_seconds = poll_seconds
        sizes, present = store.sizes(), dict(_files(folder))
        self._uploaded = {
            name: version for name, version in present.items() if sizes.get(name) == version[1]
        }
        self._not_restored = sizes.keys() - present.keys()
        folders = checkpoint_folders(sizes)
        self._unfinished = {name: step for name, step in folders.items() if step is not None}
        """Folder of each checkpoint that an earlier attempt left without a marker → its step."""
        self._steps = dict(self._unfinished)
        """Folder of each of these, and of each checkpoint that was complete here → its step."""
        self._read_steps(present)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, wait_seconds: float) -> list[str]:
        """Upload what remains, and wait for files of other nodes; returns what S3 lacks at last."""
        self._ending.set()
        self._thread.join()
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                remaining = self._upload_changes()
            except Exception as error:
                remaining = [f"{type(error).__name__}: {error}"]
            if not remaining:
                return []
            if time.monotonic() > deadline:
                self._warn(
                    f"not uploaded to {self._store.uri}: {', '.join(remaining)}; the checkpoint "
                    "before it counts"
                )
                return remaining
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
        self._read_steps(present)
        # Before new files of the same names are uploaded, under the marker of the old ones.
        self._delete_removed(present)
        waiting = self._upload_changed(present)
        # What waited for the checkpoint that is complete now.
        self._delete_removed(present)
        return waiting

    def _upload_changed(self, present: Mapping[str, _Version]) -> list[str]:
        changed = [name for name, version in present.items() if self._uploaded.get(name) != version]
        # A folder that was written again since the last round: new files never have an old marker.
        for name in (name for name in changed if _is_marker(name) and name in self._uploaded):
            self._store.delete(name)
            del self._uploaded[name]
        for name in (changed_file for changed_file in changed if not _is_marker(changed_file)):
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

    def _read_steps(self, present: Mapping[str, _Version]) -> None:
        for name in filter(_is_marker, present):
            with contextlib.suppress(FileNotFoundError, MarkerError):
                marker = CheckpointMarker.parse((self._folder / name).read_bytes())
                self._steps[name.rpartition("/")[0]] = marker.step

    def _delete_removed(self, present: Mapping[str, _Version]) -> None:
        """Delete in S3 what training has removed, except what S3 must keep for now."""
        self._not_restored -= present.keys()
        removed = self._uploaded.keys() - present.keys()
        removed |= {name for name in self._not_restored if self._is_superseded(name, present)}
        if not removed:
            return
        stored = self._store.sizes()
        for name in sorted(removed, key=lambda name: not _is_marker(name)):
            folder = self._checkpoint_of(name)
            if folder is None or self._may_delete(folder, present, stored):
                self._store.delete(name)
                self._uploaded.pop(name, None)
                self._not_restored.discard(name)
                stored.pop(name, None)

    def _is_superseded(self, name: str, present: Mapping[str, _Version]) -> bool:
        """Return whether training goes without the checkpoint of a file that was not restored."""
        folder = self._checkpoint_of(name)
        if folder is None or f"{folder}/{MARKER}" in present:
            return False
        # Other nodes may still upload files of an unfinished one.
        return folder not in self._unfinished or any(
            step > self._unfinished[folder] and f"{other}/{MARKER}" in present
            for other, step in self._steps.items()
        )

    def _checkpoint_of(self, name: str) -> str | None:
        """Return the folder of the checkpoint that a file belongs to; None if it is of none."""
        parents = (parent.as_posix() for parent in PurePosixPath(name).parents)
        return next((parent for parent in parents if parent in self._steps), None)

    def _may_delete(
        self, folder: str, present: Mapping[str, _Version], stored: Mapping[str, int]
    ) -> bool:
        """Return whether S3 can resume the job without the checkpoint in ``folder``.

        It needs a newer one that is complete there. A job that resumed from an earlier checkpoint
        has refused this one: then it needs that earlier one.
        """
        step = self._steps[folder]
        others = {
            self._steps[other]: f"{other}/{MARKER}" for other in self._steps if other != folder
        }
        if any(other > step and marker in stored for other, marker in others.items()):
            return True
        if f"{folder}/{MARKER}" not in stored:  # it is not complete there
            return folder not in self._unfinished
        newest_here = max(
            (other for other, marker in others.items() if marker in present), default=step
        )
        return newest_here < step and others[newest_here] in stored

    def _upload(self, name: str, version: _Version) -> None:
        path = self._folder / name
        try:
            self._store.upload(name, path)
        except FileNotFoundError:  # removed since it was listed
            return
        self._uploaded[name] = version
        # Training may have removed the folder.
        with contextlib.suppress(FileNotFoundError):
            note(path, UPLOADED_SUFFIX).touch()

    def _is_complete(self, name: str, sizes: dict[str, int]) -> bool:
        """Return whether S3 holds every file of the marker ``name``, in its size."""
        folder = name.rpartition("/")[0]
        try:
            marker = CheckpointMarker.parse((self._folder / name).read_bytes())
        except (FileNotFoundError, MarkerError):
            return False
        return not file_problem(folder, marker, sizes)


def _is_marker(name: str) -> bool:
    return name.rpartition("/")[2] == MARKER


def _files(folder: Path) -> Iterator[tuple[str, _Version]]:
    """Yield the files that belong to checkpoints, not those that are being written."""
    for path in sorted(folder.rglob("*")):
        if path.name.startswith(".") or is_upload_note(path.name):
            continue
        try:
            if path.is_file():
                status = path.stat()
                yield path.relative_to(folder).as_posix(), (status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            continue
