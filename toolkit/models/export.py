"""Exports a checkpoint: downloads it if needed, writes the model, and renames it when complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.models.checkpoint_source import StoredModel, find_stored, local_stage
from sm_train.toolkit.models.hub.client import create_repository, require_token, upload
from sm_train.toolkit.models.opened_checkpoint import downloaded, require_space
from sm_train.toolkit.models.progress import byte_progress
from sm_train.toolkit.models.sampling.sample import find_source, require_training_packages
from sm_train.toolkit.terminal.interrupts import set_complete

if TYPE_CHECKING:
    from sm_train.entrypoints.models.checkpoint_export import ExportFormat, WeightsKind


@dataclass(frozen=True)
class ExportRequest:
    """What the command line asks for; ``weights`` and ``dtype`` are None for the defaults."""

    format: ExportFormat
    weights: WeightsKind | None
    dtype: str | None
    out: Path
    merge: bool = False

    @property
    def staging(self) -> Path:
        """The folder of downloads and unfinished files, next to ``out``: on the same disk."""
        return self.out.parent / f".{self.out.name}.export"


@dataclass(frozen=True)
class ExportedModel:
    """What was written, or would be with ``dry_run``; the document of ``export --json``.

    ``source`` is the checkpoint's folder or its address in S3. ``download_bytes`` is None for a
    folder here, ``commit_url`` if nothing was uploaded to the Hub.
    """

    out: Path
    source: str
    format: ExportFormat
    merge: bool
    dry_run: bool
    download_bytes: int | None = None
    commit_url: str | None = None


def run_export(
    checkpoint: str,
    stage: str | None,
    options: dict[str, Any],
    request: ExportRequest,
    announce: Callable[[str], None],
    *,
    push_to_hub: str | None = None,
    private: bool = False,
    dry_run: bool = False,
) -> ExportedModel:
    """Export what ``checkpoint`` names, and upload it to the Hub; ``options`` are the global ones.

    Raises:
        UserError: there is none, it is incomplete or damaged, the output exists, the disk is too
            small, or AWS or the Hub returns an error.
    """
    check_request(request)
    if push_to_hub is not None:
        require_token()
    stored = find_stored(checkpoint, stage, options, whole_model=request.merge)
    source = "" if stored is None else stored.uri
    if dry_run and stored is None:
        source = str(find_source(local_stage(checkpoint, stage)).weights)
    commit_url = None
    if not dry_run:
        if push_to_hub is not None:
            create_repository(push_to_hub, private=private)
        if stored is None:
            source = str(export_local(local_stage(checkpoint, stage), request))
        else:
            export_stored(stored, request, announce)
        if push_to_hub is not None:
            set_complete(False)
            announce(f"uploading to {push_to_hub}")
            message = f"Export of {source.rpartition('/')[2]}"
            commit_url = upload(push_to_hub, request.out, message)
    return ExportedModel(
        request.out,
        source,
        request.format,
        request.merge,
        dry_run,
        None if stored is None else stored.bytes,
        commit_url,
    )


def check_request(request: ExportRequest) -> None:
    """Refuse an output that exists or cannot be written.

    Raises:
        UserError: it does, or PyTorch or diffusers is not installed.
    """
    out = request.out
    if out.exists():
        raise UserError(f"{out}: exists; remove it or name another folder or file")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out.parent}: no such folder; create it first")
    if request.format == "single-file" and out.suffix != ".safetensors":
        raise UserError(f"{out}: name the single file *.safetensors, as programs expect it")
    require_training_packages()


def export_local(folder: Path, request: ExportRequest) -> Path:
    """Export the checkpoint or model in ``folder``; return the folder that was found there.

    Raises:
        UserError: it is incomplete or damaged, or the disk is too small.
    """
    from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError
    from sm_train.entrypoints.models import checkpoint_export

    source = find_source(folder)  # verifies digests
    options = checkpoint_export.ExportOptions(
        request.format,
        request.weights,
        checkpoint_export.DTYPES[request.dtype] if request.dtype else None,
        merge=request.merge,
    )
    scratch = request.staging / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        checkpoint_export.require_format(source, options.format, merge=options.merge)
        total = checkpoint_export.export_bytes(source, options)
        require_space(request.out, total)
        scratch.mkdir(parents=True)
        result = scratch / request.out.name
        with byte_progress(f"writing {request.out.name}", total) as progress:
            checkpoint_export.export(source, options, result, scratch, progress)
        set_complete(True)
        result.rename(request.out)
    except CheckpointError as error:
        raise UserError(str(error), ExitCode.PREFLIGHT) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not any(request.staging.glob("*")):
            shutil.rmtree(request.staging, ignore_errors=True)
    return source.weights


def export_stored(
    stored: StoredModel, request: ExportRequest, announce: Callable[[str], None]
) -> None:
    """Download the checkpoint or model next to ``request.out``, and export it.

    An interrupted download stays there, and the same command continues it.

    Raises:
        UserError: AWS returns an error, the checkpoint is damaged, or the disk is too small.
    """
    # One copy is the download, the other the model that is written from it.
    with downloaded(stored, request.staging, announce, out=request.out, copies=2) as folder:
        export_local(folder, request)
