"""Copies from S3 what a node needs of its checkpoints, before training starts.

Folders of checkpoints whose names differ only in the number at the end belong together. Of these
the newest complete one is downloaded and verified, and an earlier one if that is damaged. Of the
others only the marker is downloaded: training counts and removes them as those that it wrote, and
:mod:`checkpoint_sync <sm_train.entrypoints.clusters.checkpoint_sync>` then deletes them in S3.
All other files are downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.base.digests import file_digest
from sm_train.entrypoints.clusters.node_record import FOLDER as JOB_RECORDS
from sm_train.entrypoints.clusters.prefix_copy import PrefixFiles
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    checkpoint_folders,
    checkpoint_series,
    complete_marker,
    newest_first,
    newest_listed,
)

_THREADS = 8


@dataclass(frozen=True)
class Restored:
    """What was downloaded: the ``checkpoints`` by their folders, and all ``files`` in ``bytes``.

    ``others`` are the checkpoints of which S3 holds more than was downloaded.
    """

    checkpoints: tuple[str, ...]
    others: int
    files: int
    bytes: int


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
    marked = [name for name, unfinished_step in folders.items() if unfinished_step is None]
    contents = {name: store.read(f"{name}/{MARKER}") for name in marked}

    def examine(name: str) -> tuple[CheckpointMarker | None, str]:
        return complete_marker(name, sizes, contents.__getitem__)

    restored = []
    for series in checkpoint_series(marked):
        # The training refuses another format with its reason.
        for name, marker in newest_first(series, examine, []):
            names, problem = _restore_files(store, name, contents[name], marker, folder)
            needed += names
            if problem is None:
                restored.append(name)
                break
            warn(f"{store.uri}{name}: {problem}; an earlier checkpoint is restored")
    for name, content in contents.items():
        if _write_marker(folder / name / MARKER, content):
            needed.append(f"{name}/{MARKER}")
    size = sum(sizes[name] for name in needed)
    return Restored(tuple(restored), len(folders) - len(restored), len(needed), size)


def newest_stored_step(store: PrefixFiles) -> int | None:
    """Return the step of the newest checkpoint that S3 holds completely; None if it holds none."""
    return newest_listed(store.sizes(), lambda name: store.read(f"{name}/{MARKER}")).step


def _folder_of(name: str, folders: Mapping[str, int | None]) -> str | None:
    """Return the folder of the checkpoint that a file belongs to; None if it is of none."""
    parents = name.split("/")[:-1]
    paths = ("/".join(parents[:depth]) for depth in range(len(parents), 0, -1))
    return next((path for path in paths if path in folders), None)


def _restore_files(
    store: PrefixFiles, name: str, content: bytes, marker: CheckpointMarker, folder: Path
) -> tuple[list[str], str | None]:
    """Download the files that are not there as the marker lists them.

    Return their names, and which one is damaged: then none of them is left.
    """
    place = folder / name
    if not _has_content(place / MARKER, content):
        (place / MARKER).unlink(missing_ok=True)
    files = dict.fromkeys(_differing(place, marker.files))
    names = [f"{name}/{file.name}" for file in files]
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
