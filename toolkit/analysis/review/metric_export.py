"""Exports the metrics of past jobs: CSV tables, or event files that TensorBoard opens."""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
from sm_train.entrypoints.tracking.scalars import NODE_KEYS, STEP_TAGS, event_scalars, node_tag
from sm_train.entrypoints.tracking.tensorboard_files import TensorBoardFiles, image_size
from sm_train.toolkit.analysis.review.job_log import JobLog
from sm_train.toolkit.analysis.review.sources import ReviewSource
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.extras import require_extra
from sm_train.toolkit.terminal.interrupts import set_complete


@dataclass(frozen=True)
class Scalar:
    """One value of the metric ``tag``; ``time`` is in seconds since 1970."""

    time: float
    step: int
    tag: str
    value: float


@dataclass(frozen=True)
class Exported:
    """What was written for one job."""

    path: Path
    scalars: int
    images: int


ParseLog = Callable[[ReviewSource], JobLog]


def export_jobs(
    sources: Iterable[ReviewSource], parse: ParseLog, target_format: str, folder: Path
) -> list[Exported]:
    """Write each job's metrics and evaluation images below ``folder``, in a folder of its name.

    The folders appear after the last job, so that the same command can follow an interrupted one.

    Raises:
        UserError: TensorBoard is not installed, a job's folder exists already, or a log or image
            cannot be read.
    """
    if target_format == "tensorboard":
        require_tensorboard()
    jobs = [(source, folder / _folder_name(source.name)) for source in sources]
    for _, path in jobs:
        if path.exists():
            raise UserError(f"--out: {path} exists already; name another folder, or remove it")
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export.") as temporary:
        for source, path in jobs:
            scalars = sorted(log_scalars(parse(source)), key=lambda scalar: scalar.time)
            read = ((grid.step, grid.read()) for grid in source.sample_grids())
            # An upload that was cut short leaves a part of an image.
            images = [(step, content) for step, content in read if image_size(content) is not None]
            staged = Path(temporary) / path.name
            staged.mkdir()
            write = _write_tensorboard if target_format == "tensorboard" else _write_csv
            write(staged, scalars, images)
            written.append(Exported(path, len(scalars), len(images)))
        set_complete(True)
        for _, path in jobs:
            (Path(temporary) / path.name).rename(path)
    return written


def _folder_name(name: str) -> str:
    """Return a job's name, or the last parts of a local folder, as the name of a folder."""
    parts = [part for part in Path(name).parts if part not in ("/", "..", ".")][-2:]
    return re.sub(r"[^a-zA-Z0-9._-]+", "-", "-".join(parts)) or "job"


def log_scalars(log: JobLog) -> Iterator[Scalar]:
    """Yield the known numbers of step, evaluation and node events."""
    steps = log.steps
    for key, tag in STEP_TAGS.items():
        for time, step, value in zip(steps["time"], steps["step"], steps[key], strict=True):
            if isfinite(value):
                yield Scalar(float(time), int(step), tag, float(value))
    for event in log.events["eval"]:
        for tag, loss in event_scalars(event).items():
            yield Scalar(event["time"], event["step"], tag, loss)
    for node, table in log.nodes.items():
        # Events of nodes have a time and no step: the last one that was logged before.
        at = np.searchsorted(steps["time"], table["time"], side="right") - 1
        for key in NODE_KEYS:
            for row, value in enumerate(table[key]):
                if isfinite(value):
                    step = int(steps["step"][at[row]]) if at[row] >= 0 else 0
                    time = float(table["time"][row])
                    yield Scalar(time, step, node_tag(node, key), float(value))


def _write_csv(
    folder: Path, scalars: Sequence[Scalar], images: Sequence[tuple[int, bytes]]
) -> None:
    """Write ``metrics.csv``, one row for each value, and the images as PNG."""
    with (folder / "metrics.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["time", "step", "metric", "value"])
        rows.writerows(
            (f"{scalar.time:.3f}", scalar.step, scalar.tag, scalar.value) for scalar in scalars
        )
    for step, content in images:
        (folder / "images").mkdir(exist_ok=True)
        (folder / "images" / f"step-{step:08d}.png").write_bytes(content)


def require_tensorboard() -> None:
    """Check that TensorBoard is installed.

    Raises:
        UserError: it is not.
    """
    require_extra("tensorboard", "tensorboard", purpose="--export tensorboard")


def _write_tensorboard(
    folder: Path, scalars: Sequence[Scalar], images: Sequence[tuple[int, bytes]]
) -> None:
    """Write an event file with the times of the job."""
    writer = TensorBoardFiles(folder)
    writer.create()
    for scalar in scalars:
        writer.log_scalars(scalar.step, scalar.time, {scalar.tag: scalar.value})
    times = {scalar.step: scalar.time for scalar in scalars}
    for step, content in images:
        time = times.get(step, scalars[-1].time if scalars else 0.0)
        writer.log_image(step, time, content)
    writer.close("done")
