"""``sm_train.sample`` and ``sm_train.compare``: sample images from checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.models.image_grid import draw_grid, png
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.models.opened_checkpoint import open_checkpoint
from sm_train.toolkit.models.sampling.comparison_page import comparison_page
from sm_train.toolkit.models.sampling.sample import (
    find_source,
    require_training_packages,
    require_writable,
    sample_images,
)
from sm_train.toolkit.terminal.console import note

if TYPE_CHECKING:
    from PIL.Image import Image

_COLUMNS = 10


@dataclass(frozen=True, repr=False)
class Samples:
    """Sampled images, one for each prompt. In a notebook they are shown as a grid.

    ``checkpoint`` is the folder of the checkpoint or model that they are from, or its address in
    S3.
    """

    images: tuple[Image, ...]
    prompts: tuple[str, ...]
    checkpoint: Path | str
    seed: int

    def grid(self, columns: int = _COLUMNS) -> Image:
        """Return the images in rows of ``columns``, each with its prompt below."""
        return draw_grid(self.images, self.prompts, min(columns, len(self.prompts)))

    def save(self, path: str | Path, columns: int = _COLUMNS) -> None:
        """Write the grid to ``path`` as PNG, atomically.

        Raises:
            UsageError: it is a folder, or its folder does not exist.
        """
        require_writable(Path(path), "PNG")
        write_atomic(Path(path), png(self.grid(columns)))

    def __repr__(self) -> str:
        return f"Samples({len(self.images)} images from {str(self.checkpoint)!r})"

    def _repr_png_(self) -> bytes:
        return png(self.grid())


def sample(
    checkpoint: str | Path,
    prompts: Sequence[str],
    *,
    steps: int = 50,
    guidance: float = 5.0,
    seed: int = 0,
    stage: str | None = None,
    region: str | None = None,
    profile: str | None = None,
) -> Samples:
    """Sample one image for each prompt.

    Args:
        checkpoint: A run's name or file, a job's name, a local run's folder, a checkpoint
            (``step-…``), a stage's checkpoints, of which the latest complete one is used, or a
            model's folder; the last three local or ``s3://…``. What is in S3 is downloaded.
        prompts: The prompts.
        steps: Sampling steps.
        guidance: The scale of classifier-free guidance.
        seed: The seed of the noise; the same seed gives the same images.
        stage: The stage of the run; by default the last one with a checkpoint.
        region: The AWS region of the run; by default that of the run file or the environment.
        profile: The AWS profile.

    Returns:
        The images, which :meth:`Samples.save` writes as one grid.

    Raises:
        UsageError: there is no model or checkpoint, no prompt, or the training packages are not
            installed (the extra ``train``).
    """
    _require_prompts(prompts)
    require_training_packages()
    options = {"region": region, "profile": profile}
    with open_checkpoint(str(checkpoint), stage, options, note) as opened:
        source = find_source(opened.folder)
        images = sample_images(source, prompts, steps=steps, guidance=guidance, seed=seed)
    return Samples(tuple(images), tuple(prompts), opened.uri or source.weights, seed)


def compare(
    first: str | Path,
    second: str | Path,
    prompts: Sequence[str],
    out: str | Path = "compare.html",
    *,
    steps: int = 50,
    guidance: float = 5.0,
    seed: int = 0,
    region: str | None = None,
    profile: str | None = None,
) -> Path:
    """Write a page for blind comparison of two checkpoints' images, with the same noise for both.

    The page counts which model wins and reveals which is which after the last pair. It works
    offline.

    Args:
        first: What :func:`sample` takes.
        second: The same.
        prompts: The prompts.
        out: The HTML file to write.
        steps: Sampling steps.
        guidance: The scale of classifier-free guidance.
        seed: The seed of the noise.
        region: The AWS region of the runs; by default that of the run files or the environment.
        profile: The AWS profile.

    Returns:
        The path of the page.

    Raises:
        UsageError: there is no model or checkpoint, no prompt, the page cannot be written, or the
            training packages are not installed (the extra ``train``).
    """
    _require_prompts(prompts)
    out = Path(out)
    require_writable(out, "page")
    require_training_packages()
    options = {"region": region, "profile": profile}
    names = (str(first), str(second))
    with ExitStack() as opened:
        # Both are found before the first one is sampled, which takes minutes.
        sources = [
            find_source(opened.enter_context(open_checkpoint(name, None, options, note)).folder)
            for name in names
        ]
        images = tuple(
            sample_images(source, prompts, steps=steps, guidance=guidance, seed=seed)
            for source in sources
        )
    page = comparison_page(names, prompts, (images[0], images[1]), seed)
    write_atomic(out, page.encode())
    return out


def _require_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str) or not prompts:
        raise UserError("prompts: give a list with at least one prompt")
