"""``sm_train.export``: turns a checkpoint into a model for other tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.toolkit.base.settings import default_profile
from sm_train.toolkit.models.export import ExportedModel, ExportRequest, run_export
from sm_train.toolkit.terminal.console import note

if TYPE_CHECKING:
    from sm_train.entrypoints.models.checkpoint_export import ExportFormat, WeightsKind


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    stage: str | None = None,
    weights: WeightsKind | None = None,
    dtype: str | None = None,
    format: ExportFormat = "diffusers",
    merge: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    dry_run: bool = False,
    region: str | None = None,
    profile: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> ExportedModel:
    """Write the model of a checkpoint to ``out``: from any step, also of a stopped run.

    Args:
        checkpoint: What :func:`sm_train.sample` takes.
        out: The folder or file to write; it must not exist.
        stage: The stage of the run; by default the last one with a checkpoint.
        weights: ``"ema"`` or ``"raw"``; by default the averaged ones, if the run kept them.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``; by default that of the checkpoint.
        format: A ``"diffusers"`` folder, a ``"single-file"`` (sd2, sdxl), or PyTorch's ``"dcp"``.
        merge: Add a LoRA adapter to the weights of the model that it extends.
        push_to_hub: Also upload to this repository, such as ``"org/name"``.
        private: Create the repository as private.
        dry_run: Write nothing.
        region: The AWS region of the run; by default that of the run file or the environment.
        profile: The AWS profile for credentials.
        announce: Called with a line before each download or upload; by default it is printed.

    Returns:
        ``out``, ``source``, ``download_bytes`` and ``commit_url``, None for what did not happen.

    Raises:
        UsageError: there is no checkpoint, ``out`` exists, or the training packages are not
            installed (the extra ``train``).
        PreflightError: the checkpoint is incomplete or damaged.
    """
    return run_export(
        str(checkpoint),
        stage,
        {"region": region, "profile": profile or default_profile()},
        ExportRequest(format, weights, dtype, Path(out), merge),
        announce or note,
        push_to_hub=push_to_hub,
        private=private,
        dry_run=dry_run,
    )
