"""Which folders of ``Accelerator.save_state`` are complete, and which one a job resumes from.

A folder below the checkpoints counts when it holds the marker of a checkpoint, with the size and
digest of every file, of all nodes; ``load_state`` ignores it. While a folder is written, a mark
lies in :data:`UNFINISHED`. Nothing is created where the script writes: ``save_state`` refuses a
numbered folder that exists (accelerate 1.15, ``automatic_checkpoint_naming``), and scripts list the
folders next to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.base.digests import file_digest
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    MarkerError,
    complete_marker,
)
from sm_train.entrypoints.job_interface.node_description import current_platform
from sm_train.entrypoints.records.upload_notes import is_upload_note

UNFINISHED = "unfinished-saves"
"""The folder below the checkpoints with a mark for each folder that ``save_state`` writes to."""

_FINGERPRINT = "accelerate"
_STATE_FILE = re.compile(r"random_states_\d+\.pkl|optimizer(_\d+)?\.bin|scheduler(_\d+)?\.bin")
"""Files in a folder of ``save_state`` (accelerate 1.1 to 1.15, utils/constants.py)."""

_DEPTH = 3
_LAST_NUMBER = re.compile(r"(\d+)$")


@dataclass(frozen=True)
class SavedState:
    """A complete folder: its path below the checkpoints, and the step that it was saved at."""

    name: str
    step: int


def complete_states(checkpoints: Path) -> list[SavedState]:
    """Return the folders below ``checkpoints`` whose files all exist as listed, newest first.

    Digests are compared only of the newest ones, until one matches.
    """
    marked = []
    for folder in _state_folders(checkpoints):
        name = folder.relative_to(checkpoints).as_posix()
        with contextlib.suppress(OSError):
            sizes = {
                path.relative_to(checkpoints).as_posix(): path.stat().st_size
                for path in folder.rglob("*")
            }
            marker, _ = complete_marker(
                name, sizes, lambda name: (checkpoints / name / MARKER).read_bytes()
            )
            if marker is not None:
                marked.append((SavedState(name, marker.step), marker))
    marked.sort(key=lambda marked_state: marked_state[0].step, reverse=True)
    while marked and not _has_digests(checkpoints / marked[0][0].name, marked[0][1]):
        marked.pop(0)
    return [state for state, _ in marked]


def remove_incomplete(checkpoints: Path, complete: Iterable[SavedState]) -> list[str]:
    """Remove folders that a save did not finish, and return their names.

    A script that looks for its latest checkpoint would choose them. A folder without a marker, as
    one that was copied here, stays unless it is newer than a complete one next to it.
    """
    newest: dict[str, int] = {}
    kept = {state.name for state in complete}
    for name in kept:
        stem, number = _split_number(name)
        newest[stem] = max(number, newest.get(stem, number))
    removed = []
    for folder in _state_folders(checkpoints):
        name = folder.relative_to(checkpoints).as_posix()
        stem, number = _split_number(name)
        newer = stem in newest and number > newest[stem]
        if name not in kept and (_mark(checkpoints, name).exists() or newer):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(name)
    shutil.rmtree(checkpoints / UNFINISHED, ignore_errors=True)
    return sorted(removed)


def begin(checkpoints: Path, name: str) -> None:
    """Mark the folder ``name`` unfinished before its files are written; do not create it."""
    mark = _mark(checkpoints, name)
    mark.parent.mkdir(exist_ok=True)
    write_atomic(mark, b"{}\n")
    (checkpoints / name / MARKER).unlink(missing_ok=True)


def end(checkpoints: Path, name: str) -> None:
    """Remove the mark of a folder whose files have been written."""
    mark = _mark(checkpoints, name)
    mark.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other folders are being written
        mark.parent.rmdir()


def _mark(checkpoints: Path, name: str) -> Path:
    return checkpoints / UNFINISHED / quote(name, safe="")


def list_files(folder: Path) -> list[CheckpointFile]:
    """Return the files of this node's part of a folder, with their digests."""
    files = []
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MARKER and not is_upload_note(name):
            with path.open("rb") as file:
                files.append(CheckpointFile(name, path.stat().st_size, file_digest(file)))
    return files


def mark_complete(
    checkpoints: Path, name: str, step: int, world_size: int, files: Iterable[CheckpointFile]
) -> CheckpointMarker:
    """Write the marker of the folder ``name``, after all nodes have written their files."""
    by_name = {file.name: file for file in files}
    files = tuple(by_name.values())
    marker = CheckpointMarker(step, world_size, _FINGERPRINT, files, current_platform())
    write_atomic(checkpoints / name / MARKER, marker.to_json().encode())
    end(checkpoints, name)
    return marker


def saved_step(folder: Path) -> int | None:
    """Return the step of a folder: its marker's, else the number that its name ends with."""
    try:
        return CheckpointMarker.parse((folder / MARKER).read_bytes()).step
    except (OSError, MarkerError):
        match = _LAST_NUMBER.search(folder.name)
        return int(match[1]) if match else None


def name_for_step(earlier: SavedState, step: int) -> str | None:
    """Return how a script that named ``earlier`` would name the checkpoint of ``step``.

    None if its names do not end with the step.
    """
    stem, number = _split_number(earlier.name)
    return f"{stem}{step}" if number == earlier.step else None


def _state_folders(checkpoints: Path) -> Iterator[Path]:
    """Yield the folders that ``save_state`` wrote or that are marked."""
    for parent, folders, names in os.walk(checkpoints):
        folder = Path(parent)
        if folder == checkpoints:
            if UNFINISHED in folders:
                folders.remove(UNFINISHED)
            continue
        name = folder.relative_to(checkpoints).as_posix()
        is_marked = MARKER in names or _mark(checkpoints, name).exists()
        if is_marked or any(map(_STATE_FILE.fullmatch, names)):
            yield folder
            folders.clear()
        if len(folder.relative_to(checkpoints).parts) >= _DEPTH:
            folders.clear()


def _split_number(name: str) -> tuple[str, int]:
    match = _LAST_NUMBER.search(name)
    return (name[: match.start()], int(match[1])) if match else (name, -1)


def _has_digests(folder: Path, marker: CheckpointMarker) -> bool:
    for listed in marker.files:
        with (folder / listed.name).open("rb") as file:
            if file_digest(file) != listed.blake3:
                return False
    return True
