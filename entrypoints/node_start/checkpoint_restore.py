"""Copies from S3 what a node needs of its checkpoints, before training starts.

Folders of checkpoints whose names differ only in the number at the end belong together. Of these
the newest complete one is downloaded and verified, and an earlier one if that is damaged. Of the
others only the marker is downloaded: training counts and removes them as those that it wrote, and
:mod:`checkpoint_sync <sm_train.entrypoints.node_start.checkpoint_sync>` then deletes them in S3.
All other files are downloaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.common.atomic_write import write_atomic
from sm_train.entrypoints.common.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    MarkerError,
    is_shard_file,
    parse_step_folder,
)
from sm_train.entrypoints.common.digests import file_digest
from sm_train.entrypoints.job_records.node_record import FOLDER as JOB_RECORDS
from sm_train.entrypoints.node_start.prefix_copy import PrefixFiles

_THREADS = 8
_LAST_NUMBER = re.compile(r"\d+$")


@dataclass(frozen=True)
class Restored:
    """What was downloaded: the ``checkpoints`` by their folders, and all ``files`` in ``bytes``.

    ``others`` are the checkpoints of which S3 holds more than was downloaded.
    """

    checkpoints: tuple[str, ...]
    others: int
    files: int
    bytes: int


@dataclass(frozen=True)
class _StoredCheckpoint:
    """A checkpoint in S3; ``marker`` is None if its ``content`` is damaged or of another format."""

    folder: str
    content: bytes
    marker: CheckpointMarker | None

    @property
    def kind(self) -> str:
        """The name without the number at its end."""
        return _LAST_NUMBER.sub("", self.folder)

    @property
    def step(self) -> int:
        return -1 if self.marker is None else self.marker.step

    def is_complete(self, sizes: Mapping[str, int]) -> bool:
        """Return whether S3 holds every file of the marker, in its size."""
        return self.marker is not None and has_all_files(self.folder, self.marker, sizes)


def has_all_files(folder: str, marker: CheckpointMarker, sizes: Mapping[str, int]) -> bool:
    """Return whether every file of a checkpoint is in ``sizes``, in its size."""
    return all(sizes.get(f"{folder}/{file.name}") == file.bytes for file in marker.files)


def checkpoint_folders(names: Iterable[str]) -> dict[str, int | None]:
    """Return the folders of checkpoints among the files ``names``.

    The value is the step of one without a marker, which was not completed; else None.
    """
    folders: dict[str, int | None] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        if file == MARKER and folder:
            folders[folder] = None
        elif is_shard_file(file) and (step := parse_step_folder(folder)) is not None:
            folders.setdefault(folder, step)
    return folders


def restore(store: PrefixFiles, folder: Path, warn: Callable[[str], None]) -> Restored:
    """Download what is needed below ``folder`` and not there; ``warn`` of damaged checkpoints.

    Markers come last, so that an interrupted download leaves no checkpoint that seems complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = store.sizes()
    folders = checkpoint_folders(sizes)
    needed = [
        name
        for name in sizes
        if _folder_of(name, folders) is None
        and not name.startswith(f"{JOB_RECORDS}/")
        and not (folder / name).exists()
    ]
    store.download(needed, folder)
    stored = _stored(store, folders)
    restored = []
    for kind in sorted({checkpoint.kind for checkpoint in stored}):
        candidates = [checkpoint for checkpoint in stored if checkpoint.kind == kind]
        for checkpoint in sorted(candidates, key=lambda candidate: -candidate.step):
            if not checkpoint.is_complete(sizes):
                continue
            names, problem = _restore_files(store, checkpoint, folder)
            needed += names
            if problem is None:
                restored.append(checkpoint.folder)
                break
            warn(f"{store.uri}{checkpoint.folder}: {problem}; an earlier checkpoint is restored")
    for checkpoint in stored:
        if _write_marker(folder / checkpoint.folder / MARKER, checkpoint.content):
            needed.append(f"{checkpoint.folder}/{MARKER}")
    size = sum(sizes[name] for name in needed)
    return Restored(tuple(restored), len(folders) - len(restored), len(needed), size)


def newest_complete_step(store: PrefixFiles) -> int | None:
    """Return the step of the newest checkpoint that S3 holds completely; None if it holds none."""
    sizes = store.sizes()
    stored = _stored(store, checkpoint_folders(sizes))
    steps = [checkpoint.step for checkpoint in stored if checkpoint.is_complete(sizes)]
    return max(steps, default=None)


def _folder_of(name: str, folders: Mapping[str, int | None]) -> str | None:
    """Return the folder of the checkpoint that a file belongs to; None if it is of none."""
    parents = name.split("/")[:-1]
    paths = ("/".join(parents[:depth]) for depth in range(len(parents), 0, -1))
    return next((path for path in paths if path in folders), None)


def _stored(store: PrefixFiles, folders: Mapping[str, int | None]) -> list[_StoredCheckpoint]:
    """Return the checkpoints among :func:`checkpoint_folders` that have a marker."""
    return [
        _read(store, name) for name, unfinished_step in folders.items() if unfinished_step is None
    ]


def _read(store: PrefixFiles, folder: str) -> _StoredCheckpoint:
    content, marker = store.read(f"{folder}/{MARKER}"), None
    # The training refuses another format with its reason.
    with contextlib.suppress(MarkerError):
        marker = CheckpointMarker.parse(content)
    return _StoredCheckpoint(folder, content, marker)


def _restore_files(
    store: PrefixFiles, checkpoint: _StoredCheckpoint, folder: Path
) -> tuple[list[str], str | None]:
    """Download the files that are not there as the marker lists them.

    Return their names, and which one is damaged: then none of them is left.
    """
    assert checkpoint.marker is not None
    place = folder / checkpoint.folder
    if not _has_content(place / MARKER, checkpoint.content):
        (place / MARKER).unlink(missing_ok=True)
    files = dict.fromkeys(_differing(place, checkpoint.marker.files))
    names = [f"{checkpoint.folder}/{file.name}" for file in files]
    store.download(names, folder)
    damaged = next(_differing(place, files), None)
    if damaged is None:
        return names, None
    for file in files:
        (place / file.name).unlink(missing_ok=True)
    return [], f"{damaged.name} is not the file that its marker lists"


def _differing(place: Path, files: Iterable[CheckpointFile]) -> Iterator[CheckpointFile]:
    """Yield the files that are missing in the folder ``place`` or are not as listed."""

    def is_intact(file: CheckpointFile) -> bool:
        path = place / file.name
        if not path.is_file() or path.stat().st_size != file.bytes:
            return False
        with path.open("rb") as opened:
            return file_digest(opened) == file.blake3

    listed = list(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, intact in zip(listed, pool.map(is_intact, listed), strict=True):
            if not intact:
                yield file


def _has_content(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _write_marker(path: Path, content: bytes) -> bool:
    """Write a marker as S3 has it; return whether it was not there."""
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return True
