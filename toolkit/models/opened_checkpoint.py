"""Opens the checkpoint that a user names as a local folder: what is in S3 is downloaded first."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.models.checkpoint_source import StoredModel, find_stored, local_stage
from sm_train.toolkit.models.progress import byte_progress
from sm_train.toolkit.terminal.formatting import format_bytes


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint in the local ``folder``; ``uri`` is where it was downloaded from, if it was."""

    folder: Path
    uri: str | None = None


@contextmanager
def open_checkpoint(
    target: str, stage: str | None, options: dict[str, Any], announce: Callable[[str], None]
) -> Iterator[OpenedCheckpoint]:
    """Yield the checkpoint or model that ``target`` names; ``options`` are the global ones.

    A download lies in a hidden folder here and is removed at the end. One that is interrupted
    stays, and the same target continues it.

    Raises:
        UserError: there is none, it is incomplete or damaged, or the disk is too small.
    """
    stored = find_stored(target, stage, options, whole_model=True)
    if stored is None:
        yield OpenedCheckpoint(local_stage(target, stage))
        return
    staging = Path(f".sm-train-{hashlib.sha256(stored.uri.encode()).hexdigest()[:16]}")
    folder = download_stored(stored, staging, announce)
    try:
        yield OpenedCheckpoint(folder, stored.uri)
    except UserError as error:
        # A damaged file must not be taken for a finished download by the next attempt.
        shutil.rmtree(staging, ignore_errors=True)
        raise UserError(str(error).replace(str(folder), stored.uri), error.exit_code) from None
    shutil.rmtree(staging, ignore_errors=True)


def download_stored(
    stored: StoredModel, folder: Path, announce: Callable[[str], None], *, copies: int = 1
) -> Path:
    """Download a checkpoint or model below ``folder``, which an earlier attempt may have begun.

    Return the checkpoint's folder. The disk must hold ``copies`` of it.

    Raises:
        UserError: AWS returns an error, or the disk is too small.
    """
    present = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    require_space(folder, copies * stored.bytes - present)
    announce(f"downloading {format_bytes(stored.bytes)} from {stored.uri}")
    with byte_progress("downloading", stored.bytes) as progress:
        return stored.download(folder, progress)


def require_space(path: Path, needed: int) -> None:
    """Refuse to write what the disk of ``path`` cannot hold; nothing there needs to exist.

    Raises:
        UserError: there is too little space.
    """
    existing = next(parent for parent in path.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{path}: needs {format_bytes(needed)} and {format_bytes(free)} are free; free some "
            "space or name another disk",
            ExitCode.UNEXPECTED,
        )
