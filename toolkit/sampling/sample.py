"""Images from checkpoints for a person who waits: errors in one line, a bar on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.terminal.console import stderr_console

if TYPE_CHECKING:
    from sm_train.entrypoints.models.sampling import ModelSource


def require_file_place(out: Path, kind: str) -> None:
    """Refuse a place where no file of that ``kind`` can be written.

    Raises:
        UserError: it is a folder, or in none.
    """
    if out.is_dir():
        raise UserError(f"--out: {out}: is a folder; name the {kind} in it")
    if not out.parent.is_dir():
        raise UserError(f"--out: {out.parent}: no such folder; make it first")


def find_source(checkpoint: Path) -> ModelSource:
    """What is drawn from.

    Raises:
        UserError: it is no model and no checkpoint, or what draws is not installed.
    """
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: no such folder; give a model's or a run's checkpoints")
    try:
        from sm_train.entrypoints.checkpointing.manifest import CheckpointError
        from sm_train.entrypoints.models import sampling
    except ImportError as error:
        raise UserError(f"{error.name} is not installed; pip install 'sm-train[train]'") from None
    try:
        return sampling.find_source(checkpoint)
    except CheckpointError as error:
        raise UserError(str(error)) from None


def draw_images(
    source: ModelSource, prompts: Sequence[str], *, steps: int, guidance: float, seed: int
) -> list[Any]:
    """One PIL image for each prompt.

    Raises:
        UserError: the model or its weights cannot be read.
    """
    from rich.progress import Progress
    from sm_train.entrypoints.checkpointing.manifest import CheckpointError
    from sm_train.entrypoints.models import sampling

    console = stderr_console()
    try:
        pipeline = sampling.load_pipeline(source)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    images: list[Any] = []
    how = sampling.SamplingOptions(steps, guidance, seed)
    said = f"drawing from {(source.checkpoint or source.model).name}"
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(said, total=len(prompts))
        for some in sampling.generate(pipeline, prompts, how):
            images += some
            bar.advance(task, len(some))
    return images
