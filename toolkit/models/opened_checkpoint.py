"""Opens the checkpoint that a user names as a local folder: what is in S3 is downloaded first."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.toolkit.base.errors import ExitCode, UserError
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
    with downloaded(stored, staging, announce, out=staging) as folder:
        yield OpenedCheckpoint(folder, stored.uri)


@contextmanager
def downloaded(
    stored: StoredModel,
    staging: Path,
    announce: Callable[[str], None],
    *,
    out: Path,
    copies: int = 1,
) -> Iterator[Path]:
    """Download a checkpoint or model below ``staging``, and yield its folder.

    ``staging`` is removed at the end. A download that is interrupted stays, and the next call
    continues it. The disk must hold ``copies`` of the files; an error names ``out``.

    Raises:
        UserError: AWS returns an error, or the disk is too small. One that the caller raises names
            the address in S3 in place of the folder.
    """
    folder = staging / "download"
    present = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    require_space(out, copies * stored.bytes - present)
    announce(f"downloading {format_bytes(stored.bytes)} from {stored.uri}")
    with byte_progress("downloading", stored.bytes) as progress:
        source = stored.download(folder, progress)
    try:
        yield source
    except UserError as error:
        # A damaged file must not be taken for a finished download by the next attempt.
        shutil.rmtree(staging, ignore_errors=True)
        raise UserError(str(error).replace(str(source), stored.uri), error.exit_code) from None
    shutil.rmtree(staging, ignore_errors=True)


def require_space(out: Path, needed: int) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        UserError: there is too little space.
    """
    free = shutil.disk_usage(out.absolute().parent).free
    if needed > free:
        raise UserError(
            f"{out}: needs {format_bytes(needed)} and {format_bytes(free)} are free; free some "
            "space or name another disk",
            ExitCode.UNEXPECTED,
        )
