"""Sample images from checkpoints on a terminal: one-line errors and a progress bar."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.extras import require_extra
from sm_train.toolkit.records.local_folder import find_local_run, newest_checkpoints
from sm_train.toolkit.terminal.console import stderr_console

if TYPE_CHECKING:
    from sm_train.entrypoints.models.image_sampling import ModelSource


def require_writable(out: Path, kind: str) -> None:
    """Check that a file of ``kind`` can be written to ``out``.

    Raises:
        UserError: it is a folder, or its folder does not exist.
    """
    if out.is_dir():
        raise UserError(f"--out: {out}: is a folder; name the {kind} in it")
    if not out.parent.is_dir():
        raise UserError(f"--out: {out.parent}: no such folder; create it first")


def require_training_packages() -> None:
    """Refuse to continue without the packages of a training process.

    Raises:
        UserError: PyTorch or diffusers is not installed.
    """
    packages = ("torch", "diffusers", "transformers", "safetensors")
    require_extra("train", *packages, purpose="a model's use")
    # Transformers warns about image processors that diffusers imports and nothing here uses.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def find_source(checkpoint: Path) -> ModelSource:
    """Find the model or checkpoint to sample from; of a local run, the newest checkpoints.

    Raises:
        UserError: there is none, or PyTorch or diffusers is not installed.
    """
    if (run := find_local_run(checkpoint)) is not None:
        checkpoint = newest_checkpoints(run)
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: no such folder; give a model's or a run's checkpoints")
    require_training_packages()
    from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError
    from sm_train.entrypoints.models import image_sampling

    try:
        return image_sampling.find_source(checkpoint)
    except CheckpointError as error:
        raise UserError(str(error)) from None


def sample_images(
    source: ModelSource, prompts: Sequence[str], *, steps: int, guidance: float, seed: int
) -> list[Any]:
    """Sample one PIL image for each prompt.

    Raises:
        UserError: the model or its weights cannot be read.
    """
    from rich.progress import Progress
    from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError
    from sm_train.entrypoints.models import image_sampling

    console = stderr_console()
    try:
        pipeline = image_sampling.load_pipeline(source)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    images: list[Any] = []
    options = image_sampling.SamplingOptions(steps, guidance, seed)
    label = f"sampling from {source.weights.name}"
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=len(prompts))
        for batch in image_sampling.generate(pipeline, prompts, options):
            images += batch
            bar.advance(task, len(batch))
    return images
