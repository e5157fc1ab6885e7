"""Reads the image grids that evaluations wrote, and scales them for the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from sm_train.entrypoints.job_interface.checkpoint_layout import parse_step_folder
from sm_train.entrypoints.storage.storage import Storage
from sm_train.toolkit.analysis.review.review_model import SampleImage

_FOLDER = "samples"
"""The folder of the grids next to the checkpoints (entrypoints/training/evaluator.py)."""
_MAX_GRIDS = 8
_MAX_PIXELS = (560, 560)
_QUALITY = 80


@dataclass(frozen=True)
class SampleGrid:
    """The grid of one evaluation, which ``read`` loads as PNG."""

    step: int
    location: str
    read: Callable[[], bytes]


def local_grids(folder: Path) -> list[SampleGrid]:
    """Return the grids below ``folder``, such as a local run's stage."""
    if not folder.is_dir():
        return []
    found = {}
    for path in sorted(folder.glob(f"**/{_FOLDER}/*.png")):
        if (step := parse_step_folder(path.stem)) is not None:
            found[step] = SampleGrid(step, str(path), path.read_bytes)
    return [found[step] for step in sorted(found)]


def stored_grids(storage: Storage) -> list[SampleGrid]:
    """Return the grids in a stage's checkpoint folder.

    Raises:
        OSError: the storage cannot be read.
    """
    grids = []
    for name in sorted(storage.list_sizes(_FOLDER)):
        step, key = parse_step_folder(PurePosixPath(name).stem), f"{_FOLDER}/{name}"
        if step is not None and name.endswith(".png"):
            grids.append(SampleGrid(step, storage.address(key), partial(storage.read, key)))
    return grids


def sample_images(grids: Sequence[SampleGrid]) -> tuple[SampleImage, ...]:
    """Return the first, the last and some grids between as small JPEG images.

    Raises:
        UserError: S3 rejects a request.
    """
    count = min(_MAX_GRIDS, len(grids))
    chosen = [grids[round(i * (len(grids) - 1) / max(1, count - 1))] for i in range(count)]
    images = ((grid, _scaled(grid.read())) for grid in chosen)
    return tuple(
        SampleImage(grid.step, grid.location, address)
        for grid, address in images
        if address is not None
    )


def _scaled(content: bytes) -> str | None:
    """Return an image as a data URI of a JPEG; None if it cannot be decoded."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(content)).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    image.thumbnail(_MAX_PIXELS)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
